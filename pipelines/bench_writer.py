"""Measures the writer alone, on one core: shards of states to Parquet files, against pyarrow's own `write_table`.

Each figure is the best of several turns, taken alternately, of the same table in the same process; memory is measured
in a fresh one. Write to a folder in memory, or the disk is what is measured.

    python pipelines/bench_writer.py --folder /dev/shm
"""

import argparse
import gc
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table

from hsray.shard import ShardPrompts, codec, shard_schema, shard_table, write_table
from hsray.store import Store

LAYERS = (1, 17, 32, 35)
NUM_TOKENS, HIDDEN_SIZE, NUM_PROMPTS = 2048, 4096, 4
TURNS = 7


def make_table() -> pa.Table:
    """A shard of random bfloat16 states: 256 MiB, prompts of [2048, 4096] in each of four layers."""
    prompts = ShardPrompts(
        shard=0,
        prompt_ids=pa.array([f"p{number}" for number in range(NUM_PROMPTS)]),
        input_ids=pa.array([list(range(NUM_TOKENS))] * NUM_PROMPTS, pa.list_(pa.int32())),
        loss_masks=pa.array([[True] * NUM_TOKENS] * NUM_PROMPTS),
    )
    states = {}
    for layer in LAYERS:
        states[layer] = torch.empty(NUM_PROMPTS * NUM_TOKENS, HIDDEN_SIZE, dtype=torch.bfloat16)
        for rows_TD in states[layer].split(NUM_TOKENS):
            rows_TD.normal_()
    return shard_table(prompts, states, shard_schema(LAYERS, hidden_size=HIDDEN_SIZE, dtype="bfloat16"))


def write_ours(table: pa.Table, folder: str, compression: str) -> None:
    """As the worker does: to a temporary sibling, synchronised and renamed."""
    with Store(folder).staged("shard.parquet") as sink:
        write_table(table, sink, compression=compression)


def write_theirs(table: pa.Table, folder: str, compression: str) -> None:
    """pyarrow's fastest: no dictionary, no statistics."""
    name, level = codec(compression, "parquet")
    path = f"{folder}/shard.parquet"
    pq.write_table(table, path, compression=name, compression_level=level, use_dictionary=False, write_statistics=False)


WRITERS: dict[str, Callable[[pa.Table, str, str], None]] = {"hsray": write_ours, "pyarrow": write_theirs}


def measure_speed(table: pa.Table, folder: str, compression: str) -> dict[str, float]:
    """GB/s of states, by writer."""
    fastest_s = dict.fromkeys(WRITERS, float("inf"))
    for _ in range(TURNS):
        for name, write in WRITERS.items():
            Path(folder, "shard.parquet").unlink(missing_ok=True)
            started = time.monotonic()
            write(table, folder, compression)
            fastest_s[name] = min(fastest_s[name], time.monotonic() - started)
    return {name: table.nbytes / seconds / 1e9 for name, seconds in fastest_s.items()}


def measure_memory(folder: str, compression: str) -> float:
    """The most that our writer takes over the shard it writes, as a share of the shard; in a fresh process."""
    table = make_table()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident_bytes("VmRSS")
    write_ours(table, folder, compression)
    return (resident_bytes("VmHWM") - before) / table.nbytes


def resident_bytes(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def on_one_core() -> None:
    """Keeps this process to one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def main() -> int:
    """Prints a table, and writes JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write, in a temporary folder (default: the system's)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    on_one_core()
    data = make_table()
    shown = Table("GB/s of states, one core", *WRITERS, "share", "memory over the shard, in shards")
    figures = []
    with (
        tempfile.TemporaryDirectory(prefix="hsray-bench-", dir=arguments.folder) as folder,
        multiprocessing.get_context("spawn").Pool(1, initializer=on_one_core, maxtasksperchild=1) as fresh,
    ):
        for compression in ("none", "zstd:1"):
            speeds = measure_speed(data, folder, compression)
            memory = fresh.apply(measure_memory, (folder, compression))
            share = speeds["hsray"] / speeds["pyarrow"]
            shown.add_row(compression, *(f"{value:.2f}" for value in speeds.values()), f"{share:.2f}", f"{memory:.2f}")
            figures.append({"compression": compression, "GB/s": speeds, "share": share, "memory": memory})
    Console(width=120).print(shown)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
