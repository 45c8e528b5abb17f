"""Measures what Ray adds: a bare loop of `engine.capture` against the whole `build`, same engine, same prompts.

python pipelines/bench.py --model .demo/model --dataset problems.jsonl --layers 9 19 29 final
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from build import parse_bytes
from rich.console import Console
from rich.table import Table

import hsray
from hsray.engine import EngineOptions, open_engine
from hsray.layers import resolve_layers
from hsray.manifest import load_manifest
from hsray.model import describe_model
from hsray.plan import read_plan_file
from hsray.store import Store


def main() -> int:
    """Builds, loops bare over the very same plan, and prints both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="a local folder or a hub name")
    add("--dataset", required=True, help="prompts as for build.py, or rows of question and answer")
    add("--layers", required=True, nargs="+", help="as for build.py")
    add("--engine", default="sglang", choices=["sglang", "transformers"])
    add("--dtype", default="auto")
    add("--prompts", type=int, default=300, help="how many rows of the dataset (default: 300)")
    add("--shard-bytes", type=parse_bytes, default=64 << 20, metavar="BYTES")
    add("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    rows = read_conversations(Path(arguments.dataset), arguments.prompts)
    layers = arguments.layers[0] if len(arguments.layers) == 1 else arguments.layers
    with tempfile.TemporaryDirectory(prefix="hsray-bench-") as out:
        report = hsray.build(
            rows,
            model=arguments.model,
            layers=layers,
            out=out,
            engine=arguments.engine,
            dtype=arguments.dtype,
            shard_bytes=arguments.shard_bytes,
        )
        bare_s = bare_loop(out, arguments)
    figures = {
        "prompts": report.prompts,
        "tokens": report.tokens,
        "bare_loop_s": bare_s,
        "build_s": report.capture_wall_s,
        "ratio": report.capture_wall_s / bare_s,
    }
    table = Table("", "seconds", "tokens/s", title=f"{report.prompts} prompts, {report.tokens:,} tokens")
    table.add_row("bare loop of engine.capture", f"{bare_s:.2f}", f"{report.tokens / bare_s:,.0f}")
    table.add_row("build through Ray, to files", f"{report.capture_wall_s:.2f}", f"{report.tokens_per_s:,.0f}")
    Console().print(table, f"ratio {figures['ratio']:.3f} (engine start apart in both)")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def read_conversations(path: Path, num_rows: int) -> list[dict]:
    """The first rows of a JSONL file; a question and its answer become a conversation."""
    rows = []
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            if "question" in row:
                turns = zip(("user", "assistant"), (row["question"], row["answer"]), strict=True)
                row = {"messages": [{"role": role, "content": content} for role, content in turns]}
            rows.append(row)
    return rows[:num_rows]


def bare_loop(out: str, arguments: argparse.Namespace) -> float:
    """Seconds to capture the planned prompts, one after the other, in this process."""
    model = describe_model(arguments.model, dtype=arguments.dtype)
    store = Store(out)
    plan = load_manifest(store).plan
    layers = arguments.layers[0] if len(arguments.layers) == 1 else arguments.layers
    options = EngineOptions(
        model=model,
        layers=resolve_layers(layers, num_layers=model.num_layers),
        max_tokens=plan.longest_prompt,
        buffer_tokens=max(plan.shard_tokens),
    )
    shards = [shard for file in plan.files for shard in read_plan_file(store, file)["input_ids"].to_pylist()]
    with open_engine(arguments.engine, options) as engine:
        started = time.monotonic()
        for prompts in shards:
            buffer, row = engine.buffer(sum(map(len, prompts))), 0
            for input_ids in prompts:
                engine.capture(input_ids, into=buffer, at=row)
                row += len(input_ids)
            buffer.release()
        return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
