"""Writes a dataset as another trainer's own files: `hsray.export` on the command line, one flag for each keyword.

python pipelines/export.py --out s3://bucket/x --target speculators --to s3://bucket/x-speculators
"""

import argparse
import sys
from collections.abc import Sequence

import hsray
from hsray.engine import CaptureError
from hsray.flags import parse_object
from hsray.targets import TARGETS


def make_parser() -> argparse.ArgumentParser:
    """The parser; its flags are `hsray.export`'s keywords."""
    targets = "; ".join(f"{name}: {target.what}" for name, target in TARGETS.items())
    parser = argparse.ArgumentParser(
        description="Write a dataset as another trainer's own files. Saying the same again resumes it.",
        epilog=f"Targets: {targets}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", required=True, metavar="URL", help="the dataset's folder")
    add("--target", required=True, choices=list(TARGETS), help="whose files; see below")
    add(
        "--to",
        required=True,
        metavar="URL",
        help="the folder for the files, on any fsspec target; new, or begun before",
    )
    add(
        "--layers",
        nargs="+",
        metavar="LAYER",
        help="those that the drafter reads; by default every block that the dataset holds but the last one, or, where the "
        "target knows no last state, all it holds",
    )
    add("--context-size", type=int, default=1024, help="tokens of a row, for sae-lens")
    add(
        "--model",
        help="where the model lies now, should its final norm be needed; by default where it lay at the build",
    )
    add(
        "--storage-options",
        type=parse_object,
        metavar="JSON",
        help="for the filesystem of --out and --to; never stored",
    )
    add("--trust-remote-code", action="store_true", help="let the model's own code run")
    add("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exports as the flags say; prints the report, or one error."""
    arguments = vars(make_parser().parse_args(argv))
    from ray.exceptions import RayError  # takes seconds, which --help need not wait for

    if arguments["layers"] is not None and len(arguments["layers"]) == 1:
        arguments["layers"] = arguments["layers"][0]
    try:
        print(hsray.export(arguments.pop("out"), arguments.pop("target"), **arguments))
    except (ValueError, OSError, ImportError, CaptureError, RayError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
