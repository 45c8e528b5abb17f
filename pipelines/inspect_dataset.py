"""Shows what is in a dataset: model, layers, counts, lengths, norms, and prompts with what is trained on in green.

    python pipelines/inspect_dataset.py OUT --html report.html

(A script called inspect.py would stand in the way of Python's own module of that name, for every script beside it.)
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hsray.flags import parse_object
from hsray.summary import page, show, summarize


def make_parser() -> argparse.ArgumentParser:
    """The parser; its flags are `hsray.summary.summarize`'s keywords, and where to write a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", metavar="OUT", help="the dataset's folder, on any fsspec target")
    add("--sample", type=int, default=16, help="prompts whose norms are taken (default: 16)")
    add("--show", type=int, default=3, help="prompts of those to show (default: 3)")
    add("--storage-options", type=parse_object, metavar="JSON", help="for the filesystem of OUT; never stored")
    add("--html", type=Path, metavar="FILE", help="also write it as one HTML page, with plots, that needs nothing else")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Shows, and writes if asked; or prints one error."""
    arguments = vars(make_parser().parse_args(argv))
    file = arguments.pop("html")
    try:
        summary = summarize(arguments.pop("out"), **arguments)
        show(summary, Console())
        if file is not None:
            file.write_text(page(summary))
            print(f"also written: {file}", file=sys.stderr)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
