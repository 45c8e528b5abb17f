"""Measures the driver alone: builds of ever more shards through an engine that computes nothing.

Everything else is real: prompts, plan, Ray, actors, Parquet files, manifest. The engine is put into the actors' process as
that process starts. What the driver does for a shard should not grow with their number. With --nodes it measures how a build
scales over nodes, simulated on this machine, each with an engine that takes --shard-s for a shard. With --published it ends each
build after so many shards, and says how long the first took to come.

    python pipelines/bench_driver.py --shards 1000 10000 100000
    python pipelines/bench_driver.py --shards 300 --nodes 1 4
    python pipelines/bench_driver.py --shards 1000000 --published 1000
"""

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

import hsray
import hsray.worker
from hsray.engine import CaptureEngine, EngineOptions, ShardBuffer
from hsray.events import NAME as EVENTS_NAME
from hsray.report import BuildReport

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


#: Tells the actors how long their engine takes for a shard.
SHARD_S = "HSRAY_BENCH_SHARD_S"


class ZeroEngine(CaptureEngine):
    """Says that every state is zero, after a while."""

    name, version = "zero", "0"

    def __init__(self, options: EngineOptions):
        import torch  # in the actors alone: it would be half of the driver's memory

        num_bytes = options.buffer_tokens * options.bytes_per_token
        super().__init__(options, [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(options.num_buffers)])

    def _run(self, prompts: Sequence[np.ndarray], rows: Sequence[int], into: ShardBuffer) -> None:
        time.sleep(float(os.environ[SHARD_S]))
        for hidden_SD in into.states.values():
            hidden_SD.zero_()

    def close(self) -> None:
        pass


def use_zero_engine() -> None:
    """Run by Ray in each of its worker processes as it starts."""
    hsray.worker.open_engine = lambda _name, options: ZeroEngine(options)


@contextmanager
def cluster_of(num_nodes: int, shard_s: float) -> Iterator[None]:
    """A Ray of this machine, connected; several nodes have a core each, so that each has one engine."""
    runtime_env = {"worker_process_setup_hook": use_zero_engine, "env_vars": {SHARD_S: str(shard_s)}}
    quiet = {"log_to_driver": False, "runtime_env": runtime_env}
    if not num_nodes:
        ray.init(address="local", include_dashboard=False, **quiet)
        yield
        ray.shutdown()
        return
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(num_nodes - 1):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, **quiet)
    yield
    ray.shutdown()
    cluster.shutdown()


@contextmanager
def build_of(num_shards: int, num_nodes: int, shard_s: float) -> Iterator[Callable[[], BuildReport]]:
    """A build of so many shards, of a prompt of one token each, to be called; in ``out`` of the current folder."""
    with tempfile.TemporaryDirectory(prefix="hsray-bench-") as name, chdir(name), cluster_of(num_nodes, shard_s):
        Path("config.json").write_text(json.dumps(CONFIG))
        ids = pa.array([[number % 1000] for number in range(num_shards)], pa.list_(pa.int32()))
        pq.write_table(pa.table({"input_ids": ids}), "prompts.parquet")
        yield partial(
            hsray.build,
            "prompts.parquet",
            model=name,
            layers=[0],
            out=f"{name}/out",
            engine="transformers",
            engines=max(1, num_nodes),
            shard_bytes=1,
            progress=False,
        )


def measure(num_shards: int, num_nodes: int, shard_s: float) -> dict[str, float]:
    """A whole build: seconds, and the driver's CPU and memory."""
    with build_of(num_shards, num_nodes, shard_s) as build:
        driver = psutil.Process()
        before, started, cpu_s = driver.memory_info().rss, time.monotonic(), sum(driver.cpu_times()[:2])
        report = build()
        assert report.new_shards == num_shards
        return {
            "shards": num_shards,
            "nodes": num_nodes,
            "plan_s": report.plan_s,
            "capture_s": report.capture_wall_s,
            "whole_s": time.monotonic() - started,
            "driver_cpu_s": sum(driver.cpu_times()[:2]) - cpu_s,
            "driver_bytes": driver.memory_info().rss - before,
        }


def measure_begin(num_shards: int, num_published: int) -> dict[str, float]:
    """A build that is interrupted, as Ctrl-C does, once so many shards are published; then another, that finds the plan made.

    For each the seconds from the call to the plan, from there to the first shard, and how long all of them took.
    """
    figures: dict[str, float] = {"shards": num_shards}
    with build_of(num_shards, 0, 0.0) as build:
        for name in ("", "resumed_"):
            started, seen = time.time(), len(receipt_times())
            watcher = threading.Thread(target=interrupt_after, args=(seen + num_published,), daemon=True)
            watcher.start()
            with suppress(KeyboardInterrupt):
                build()
            watcher.join()
            begun_at, *published_at = build_times()[-1], *receipt_times()[seen:]
            figures |= {
                f"{name}plan_s": begun_at - started,
                f"{name}first_s": published_at[0] - begun_at,
                f"{name}rest_s": published_at[-1] - published_at[0],
                f"{name}published": len(published_at),
                f"{name}peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
    return figures


def interrupt_after(num_receipts: int) -> None:
    """Interrupts this process once a build has logged so many receipts."""
    while len(receipt_times()) < num_receipts:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)


def build_times() -> list[float]:
    """When the builds in ``out`` had their plan, in seconds since the epoch."""
    return times_of("build")


def receipt_times() -> list[float]:
    """When shards were published."""
    return times_of("receipt")


def times_of(event: str) -> list[float]:
    log = Path("out") / EVENTS_NAME
    lines = log.read_text().splitlines() if log.exists() else []
    return [
        datetime.fromisoformat(json.loads(line)["time"]).timestamp() for line in lines if f'"event": "{event}"' in line
    ]


def show_shards(figures: Sequence[dict[str, float]], console: Console) -> None:
    """A row for each number of shards."""
    shown = Table("shards", "whole s", "ms a shard: planning", "capture", "all", "driver's CPU", "driver's KB a shard")
    for figure in figures:
        parts = ("plan_s", "capture_s", "whole_s", "driver_cpu_s")
        shown.add_row(
            f"{figure['shards']:,}",
            f"{figure['whole_s']:.1f}",
            *(f"{1e3 * figure[part] / figure['shards']:.2f}" for part in parts),
            f"{figure['driver_bytes'] / figure['shards'] / 1e3:.1f}",
        )
    console.print(shown)


def show_nodes(figures: Sequence[dict[str, float]], console: Console) -> None:
    """A row for each number of nodes; seconds are from the first shard's begin to the last one's publication."""
    shown = Table("nodes", "shards", "seconds", "shards/s", "times the first")
    first = figures[0]["shards"] / figures[0]["capture_s"]
    for figure in figures:
        speed = figure["shards"] / figure["capture_s"]
        cells = (
            f"{figure['nodes']}",
            f"{figure['shards']}",
            f"{figure['capture_s']:.1f}",
            f"{speed:.2f}",
            f"{speed / first:.2f}",
        )
        shown.add_row(*cells)
    console.print(shown)


def show_begins(figures: Sequence[dict[str, float]], console: Console) -> None:
    """Two rows for each number of shards: the build that made the plan, and the one that found it."""
    shown = Table(
        "shards", "", "s to the plan", "s to the first shard", "s for the rest", "of so many", "driver's peak MB"
    )
    for figure in figures:
        for name, what in (("", "planned"), ("resumed_", "resumed")):
            cells = [f"{figure[f'{name}{part}']:.1f}" for part in ("plan_s", "first_s", "rest_s")]
            cells += [f"{figure[f'{name}published']:,}", f"{figure[f'{name}peak_bytes'] / 1e6:,.0f}"]
            shown.add_row(f"{figure['shards']:,}", what, *cells)
    console.print(shown)


def main() -> int:
    """Prints a table, and writes JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[1000, 10_000], help="(default: 1000 10000)")
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[], help="measure each number of shards on so many nodes"
    )
    parser.add_argument(
        "--shard-s",
        type=float,
        default=0.0,
        help="how long an engine takes for a shard (default: 0, or 1 with --nodes)",
    )
    parser.add_argument("--published", type=int, help="end each build after so many shards, twice")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if arguments.published:
        figures = [measure_begin(num_shards, arguments.published) for num_shards in arguments.shards]
        show_begins(figures, Console(width=120))
        return write(figures, arguments.json)
    shard_s = arguments.shard_s or (1.0 if arguments.nodes else 0.0)
    each = [(num_shards, num_nodes) for num_shards in arguments.shards for num_nodes in arguments.nodes or [0]]
    figures = [measure(num_shards, num_nodes, shard_s) for num_shards, num_nodes in each]
    (show_nodes if arguments.nodes else show_shards)(figures, Console(width=120))
    return write(figures, arguments.json)


def write(figures: Sequence[dict[str, float]], path: Path | None) -> int:
    """Writes JSON, if asked; the exit status."""
    if path:
        path.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
