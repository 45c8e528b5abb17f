"""Says whether a dataset's states are right, or what is wrong with which layer: `hsray.verify` on the command line.

    python pipelines/verify.py --out s3://bucket/x --sample 64

The exit status is 0 for right, 1 for wrong, 2 where it could not be told.
"""

import argparse
import sys
from collections.abc import Sequence

import hsray
from hsray.engine import CaptureError
from hsray.flags import parse_object


def make_parser() -> argparse.ArgumentParser:
    """The parser; its flags are `hsray.verify`'s keywords."""
    parser = argparse.ArgumentParser(
        description="Say whether a dataset's states are right, or what is wrong with which layer. The exit status is 0 for "
        "right, 1 for wrong, 2 where it could not be told.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", required=True, metavar="URL", help="the dataset's folder")
    add("--sample", type=int, default=64, help="prompts to recompute")
    add("--seed", type=int, default=0, help="another one chooses other prompts")
    add(
        "--engine",
        default="transformers",
        choices=["transformers", "sglang", "none"],
        help="what recomputes them; none makes only the checks that need no engine",
    )
    add(
        "--engine-args",
        type=parse_object,
        metavar="JSON",
        help='arguments for that engine, such as \'{"device": "cpu"}\'',
    )
    add("--dtype", default="float32", choices=["auto", "bfloat16", "float16", "float32"], help="what it computes in")
    add("--model", help="where the model lies now; by default where it lay when the dataset was built")
    add(
        "--tolerance",
        type=float,
        help="how far a prompt's mean token may be off, as a share of its norm; by default a few times what rounding to the "
        "stored dtype does",
    )
    add("--storage-options", type=parse_object, metavar="JSON", help="for the filesystem of --out; never stored")
    add("--trust-remote-code", action="store_true", help="let the model's own code run")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Verifies as the flags say; prints the report, or one error."""
    arguments = vars(make_parser().parse_args(argv))
    if arguments["engine"] == "none":
        arguments["engine"] = None
    try:
        report = hsray.verify(arguments.pop("out"), **arguments)
    except (ValueError, OSError, ImportError, CaptureError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report.right else 1


if __name__ == "__main__":
    sys.exit(main())
