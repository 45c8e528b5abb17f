"""Builds, or resumes, a dataset of hidden states: `hsray.build` on the command line, one flag for each keyword.

    ray job submit --working-dir . -- python pipelines/build.py \\
        --model Qwen/Qwen3-8B --dataset prompts.jsonl --layers eagle3 --out s3://bucket/x

With `--preview N` it shows the first prompts instead, with `--dry-run` what the build would make and cost.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

import hsray
from hsray.engine import CaptureError
from hsray.flags import parse_bytes, parse_engines, parse_object
from hsray.lease import LeaseError

#: Flags that are no keyword of `hsray.build`: what else to do, and the keywords of `hsray.estimate`.
INSTEAD = ("preview", "dry_run")
ESTIMATE = ("tokens_per_s", "gpu_hour_price", "gb_month_price", "ratio")


def make_parser() -> argparse.ArgumentParser:
    """The parser; its flags are `hsray.build`'s keywords, and `INSTEAD` and `ESTIMATE`."""
    parser = argparse.ArgumentParser(
        description="Build a dataset of a language model's hidden states. Saying the same again resumes it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--dataset",
        required=True,
        nargs="+",
        metavar="PATH",
        help="JSONL, JSON, Parquet or Arrow files or globs, or a folder of datasets.save_to_disk, on any fsspec target; a row has "
        "messages, conversations, instruction and output, question and answer, prompt and completion, text, or input_ids "
        "(with loss_mask), and may have an id",
    )
    add("--model", required=True, help="a local folder or a hub name that every node can read")
    add(
        "--layers",
        required=True,
        nargs="+",
        metavar="LAYER",
        help="block outputs 0..N-1 (-1 is the last), ranges of them (0:32:4), 'embed', 'final', or one preset: eagle3, "
        "speculators-v1, dflash:5 (any number), all; layers.py shows what each comes to",
    )
    add(
        "--out",
        required=True,
        metavar="URL",
        help="the dataset's folder, on any fsspec target; one begun there is resumed",
    )
    add(
        "--engine",
        default="sglang",
        choices=["sglang", "transformers"],
        help="what runs the model; transformers is slower and takes models that SGLang lacks",
    )
    add(
        "--engine-args",
        type=parse_object,
        metavar="JSON",
        help='arguments for the engine itself, such as \'{"attention_backend": "triton"}\'',
    )
    add("--tensor-parallel", type=int, default=1, help="GPUs of one node that share the model in each engine")
    add(
        "--engines",
        type=parse_engines,
        metavar="N or MIN:MAX",
        help="engine actors; by default as many as the cluster's GPUs allow, or one without a GPU; those that have no room "
        "wait for nodes that join later; 2:16 is two, and more, up to 16, when there is room for one",
    )
    add(
        "--requests-in-flight",
        type=int,
        default=1,
        help="prompts that an engine is given at one time, to compute in one pass; above 1 pays where prompts are short (below "
        "about 2000 tokens on a GPU), best with shards of several passes; the last bits then depend on which shared a pass",
    )
    add("--prefill-tokens", type=int, default=16_384, help="tokens at which such a pass takes no more prompts")
    add(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float16", "float32", "float8_e4m3"],
        help="what the engine computes in and the states are stored in; auto is the checkpoint's own, and float8_e4m3 computes in "
        "that and stores eight bits, each token scaled",
    )
    add(
        "--columns",
        type=parse_object,
        metavar="JSON",
        help="what the rows call such a column, where not by its own name: "
        '\'{"question": "query", "answer": "reply", "id": "uuid"}\'',
    )
    add("--chat-template", metavar="PATH", help="a file with a Jinja template in place of the tokenizer's own")
    add(
        "--template-kwargs",
        type=parse_object,
        metavar="JSON",
        help="what the template is told besides, such as '{\"enable_thinking\": false}'",
    )
    add(
        "--train-on",
        default="all",
        choices=["all", "last"],
        help="the assistant messages that the loss mask marks: all, or the last of each conversation",
    )
    add(
        "--rewritten-history",
        default="error",
        choices=["error", "split"],
        help="a conversation whose earlier turns the template renders otherwise once later ones follow (most drop old reasoning) "
        "ends the build, or is split into a prompt for each assistant message",
    )
    add(
        "--untrained",
        default="error",
        choices=["error", "drop", "keep"],
        help="what becomes of a prompt of which no token is trained on",
    )
    add("--max-tokens", type=int, help="the longest prompt allowed; by default the model's context")
    add(
        "--too-long",
        default="error",
        choices=["error", "drop", "truncate"],
        help="a longer prompt ends the build, is dropped, or loses its end (and is dropped if nothing trained on is left)",
    )
    add(
        "--duplicates",
        default="keep",
        choices=["keep", "drop"],
        help="what becomes of a prompt with the tokens and mask of an earlier one; whatever is dropped is counted, and listed in "
        "dropped.parquet with its reason",
    )
    add(
        "--sort",
        default="input",
        choices=["input", "length"],
        help="the order of the prompts: the input's, or by length, the longest first",
    )
    add(
        "--shard-bytes",
        type=parse_bytes,
        default=256 << 20,
        metavar="BYTES",
        help="states in one shard, about; 256MiB, 1GB",
    )
    add(
        "--file-format",
        default="parquet",
        choices=["parquet", "arrow"],
        help="of the shards; arrow files (IPC) are mapped by training from a local disk, and take no compression",
    )
    add("--compression", default="none", help="of Parquet shards: none, or zstd:LEVEL")
    add(
        "--request-timeout-s",
        type=float,
        default=1800.0,
        help="an engine that answers nothing for so long is killed, and its shard tried again",
    )
    add(
        "--max-attempts",
        type=int,
        default=3,
        help="how often a shard is tried whose engine dies, before its prompts are tried one by one",
    )
    add(
        "--on-failure",
        default="stop",
        choices=["stop", "skip"],
        help="what becomes of a prompt whose states cannot be had: the build stops and names it, or it is skipped and listed in "
        "dropped.parquet with the engine's own words",
    )
    add(
        "--storage-options",
        type=parse_object,
        metavar="JSON",
        help="for the filesystem of --dataset and --out; never stored",
    )
    add("--trust-remote-code", action="store_true", help="let the model's own code run")
    add("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    instead = parser.add_argument_group("instead of building, without a GPU or weights")
    instead.add_argument(
        "--preview", type=int, metavar="N", help="show the first N prompts: what is trained on, and the special tokens"
    )
    instead.add_argument("--dry-run", action="store_true", help="show what the build would make and cost")
    instead.add_argument(
        "--tokens-per-s", type=float, help="of one engine, as measured; for the GPU-hours of --dry-run"
    )
    instead.add_argument("--gpu-hour-price", type=float, help="of one GPU for one hour, for --dry-run")
    instead.add_argument("--gb-month-price", type=float, help="of storing 10^9 bytes for a month, for --dry-run")
    instead.add_argument(
        "--ratio", type=float, help="stored bytes over raw ones; by default 0.79 for bfloat16 under zstd, and else 1"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Builds, or shows, as the flags say; prints the report, or one error."""
    arguments = vars(make_parser().parse_args(argv))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # The error that ends the build is printed below; of one that another engine ran into meanwhile Ray would print a page.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("interrupted: saying the same again resumes the build", file=sys.stderr)
        return 130
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # from now on from someone who will not wait until Ray has ended
            signal.signal(number, signal.SIG_DFL)


def _run(arguments: dict[str, Any]) -> int:
    from ray.exceptions import RayError  # takes seconds, which --help need not wait for

    if len(arguments["layers"]) == 1:
        arguments["layers"] = arguments["layers"][0]
    dataset, count, dry_run = (arguments.pop(name) for name in ("dataset", *INSTEAD))
    of_estimate = {name: arguments.pop(name) for name in ESTIMATE}
    try:
        if count is not None:
            for prompt in hsray.preview(dataset, count=count, **arguments):
                Console(highlight=False).print(prompt, end="\n\n", soft_wrap=True)
        elif dry_run:
            print(hsray.estimate(dataset, **of_estimate, **arguments))
        else:
            print(hsray.build(dataset, **arguments))
    except (ValueError, OSError, ImportError, CaptureError, LeaseError, RayError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
