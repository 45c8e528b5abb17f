"""Measures the driver alone: builds of ever more shards through an engine that computes nothing.

Everything else is real: prompts, plan, Ray, actors, Parquet files, manifest. The engine is put into the actors' process as
that process starts. What the driver does for a shard should not grow with their number.

    python pipelines/bench_driver.py --shards 1000 10000 100000
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from rich.console import Console
from rich.table import Table

import hsray
import hsray.worker
from hsray.engine import CaptureEngine, EngineOptions, ShardBuffer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}


class ZeroEngine(CaptureEngine):
    """Says that every state is zero."""

    name, version = "zero", "0"

    def __init__(self, options: EngineOptions):
        num_bytes = options.buffer_tokens * options.bytes_per_token
        super().__init__(options, [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(options.num_buffers)])

    def _run(self, prompts: Sequence[np.ndarray], rows: Sequence[int], into: ShardBuffer) -> None:
        for hidden_SD in into.states.values():
            hidden_SD.zero_()

    def close(self) -> None:
        pass


def use_zero_engine() -> None:
    """Run by Ray in each of its worker processes as it starts."""
    hsray.worker.open_engine = lambda _name, options: ZeroEngine(options)


def measure(num_shards: int, folder: Path) -> dict[str, float]:
    """A build of so many shards, of a prompt of one token each: seconds, and the driver's CPU and memory."""
    rows = folder / "prompts.parquet"
    ids = pa.array([[number % 1000] for number in range(num_shards)], pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": ids}), rows)
    driver = psutil.Process()
    before, started, cpu_s = driver.memory_info().rss, time.monotonic(), sum(driver.cpu_times()[:2])
    report = hsray.build(
        str(rows),
        model=str(folder),
        layers=[0],
        out=folder / "out",
        engine="transformers",
        shard_bytes=1,
        progress=False,
    )
    assert report.new_shards == num_shards
    return {
        "shards": num_shards,
        "plan_s": report.plan_s,
        "capture_s": report.capture_wall_s,
        "whole_s": time.monotonic() - started,
        "driver_cpu_s": sum(driver.cpu_times()[:2]) - cpu_s,
        "driver_bytes": driver.memory_info().rss - before,
    }


def main() -> int:
    """Prints a row for each number of shards, and writes JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[1000, 10_000], help="(default: 1000 10000)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"worker_process_setup_hook": use_zero_engine},
    )
    shown = Table("shards", "whole s", "ms a shard: planning", "capture", "all", "driver's CPU", "driver's KB a shard")
    figures = []
    for num_shards in arguments.shards:
        with tempfile.TemporaryDirectory(prefix="hsray-bench-") as name:
            folder = Path(name)
            (folder / "config.json").write_text(json.dumps(CONFIG))
            figure = measure(num_shards, folder)
        figures.append(figure)
        milliseconds = [1e3 * figure[part] / num_shards for part in ("plan_s", "capture_s", "whole_s", "driver_cpu_s")]
        shown.add_row(
            f"{num_shards:,}",
            f"{figure['whole_s']:.1f}",
            *(f"{value:.2f}" for value in milliseconds),
            f"{figure['driver_bytes'] / num_shards / 1e3:.1f}",
        )
    Console(width=120).print(shown)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
