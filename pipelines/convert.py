"""Writes a dataset again in another container or compression: `hsray.convert` on the command line.

    python pipelines/convert.py OUT --to COPY --file-format arrow

The contents stay as they are, digest by digest. Saying the same again goes on where a conversion ended.
"""

import argparse
import sys
from collections.abc import Sequence

import hsray
from hsray.engine import CaptureError
from hsray.flags import parse_object


def make_parser() -> argparse.ArgumentParser:
    """The parser; its flags are `hsray.convert`'s keywords."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", metavar="OUT", help="the dataset's folder, on any fsspec target that every node reaches")
    add("--to", required=True, metavar="URL", help="the folder for the copy; one begun there is resumed")
    add(
        "--file-format", default="parquet", choices=["parquet", "arrow"], help="of the copy's shards (default: parquet)"
    )
    add("--compression", default="none", help="of Parquet shards: none, or zstd:LEVEL (default: none)")
    add("--storage-options", type=parse_object, metavar="JSON", help="for the filesystem of OUT and --to; never stored")
    add("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Converts as the flags say; prints the report, or one error."""
    arguments = vars(make_parser().parse_args(argv))
    try:
        print(hsray.convert(arguments.pop("out"), **arguments))
    except (ValueError, OSError, ImportError, CaptureError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
