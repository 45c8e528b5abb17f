"""Checks a dataset of hidden states, shard by shard, through Ray: `hsray.check` on the command line.

Every shard must be there, with the bytes of the inventory, the schema, and the plan's ids, tokens and masks; its states
must be as many as its tokens, and finite. The exit status is 1 where one is not.
"""

import argparse
import sys
from collections.abc import Sequence

import hsray
from hsray.engine import CaptureError
from hsray.flags import parse_object


def make_parser() -> argparse.ArgumentParser:
    """The parser; its flags are `hsray.check`'s keywords."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", metavar="OUT", help="the dataset's folder, on any fsspec target that every node reaches")
    add("--deep", action="store_true", help="also compare the digest of each shard's content")
    add(
        "--repair",
        action="store_true",
        help="remove bad shards, so that the next build makes them again; the status is still 1",
    )
    add("--storage-options", type=parse_object, metavar="JSON", help="for the filesystem of OUT; never stored")
    add("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Checks as the flags say; prints what was found, or one error."""
    arguments = vars(make_parser().parse_args(argv))
    try:
        report = hsray.check(arguments.pop("out"), **arguments)
    except (ValueError, OSError, ImportError, CaptureError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
