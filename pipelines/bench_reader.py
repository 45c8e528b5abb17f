"""Reading speed from the page cache: whole shards, prompts at random, streams, and one .pt file a prompt with torch.load.

    python pipelines/bench_reader.py --folder /scratch --json reader.json

It makes a dataset of random states without an engine: 4 layers of width 4,096 in bfloat16, prompts of 128 to 4,096 tokens. Each
thing read is kept until the next is there, as a loop over it keeps it. Each way has some passes in each of some processes of its
own, which take turns with the other ways'; the middle one of all its passes counts, and the slowest and the fastest are shown. One
process's passes are alike: whether an allocator has pages at hand for what is read makes one twice as fast as another.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
from random_dataset import make_random_dataset
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.utils.data import DataLoader

import hsray
from hsray.layers import Layer, column_name
from hsray.reader import HiddenStates
from hsray.shard import FileFormat

LAYERS: list[Layer] = [9, 19, 29, "final"]
HIDDEN_SIZE = 4096
TOKEN_BYTES = len(LAYERS) * HIDDEN_SIZE * 2
SHARD_BYTES = 256 << 20
BATCH_TOKENS = 2048
PROCESSES, PASSES = 5, 5

#: The kernel counts CPU time in these.
TICK_S = 0.01


def make_dataset(folder: Path, num_bytes: int, file_format: FileFormat) -> int:
    """A dataset in ``dataset/`` and the same prompts in ``pt/``, one file each; returns the tokens."""
    chosen = np.random.default_rng(0)
    lengths = []
    while sum(lengths) * TOKEN_BYTES < num_bytes:
        lengths.append(int(chosen.integers(128, 4097)))
    make_random_dataset(
        folder / "dataset",
        lengths=lengths,
        layers=LAYERS,
        num_layers=30,
        hidden_size=HIDDEN_SIZE,
        shard_bytes=SHARD_BYTES,
        file_format=file_format,
    )
    (folder / "pt").mkdir()
    for index, prompt in enumerate(hsray.read(folder / "dataset")):
        hidden = {layer: hidden_TD.clone() for layer, hidden_TD in prompt["hidden_states"].items()}
        torch.save({**prompt, "hidden_states": hidden}, folder / "pt" / f"{index:06d}.pt")
    return sum(lengths)


def load_each(folder: Path, order: list[int]) -> Iterator[dict[str, Any]]:
    """One ``torch.load`` a prompt."""
    for index in order:
        yield torch.load(folder / "pt" / f"{index:06d}.pt", weights_only=True)


def whole_shards(dataset: HiddenStates) -> Iterator[pa.Table]:
    """Each row group of each shard, as tensors."""
    for shard in dataset.shards:
        file = dataset.open_shard(shard)
        for group in range(file.num_groups):
            yield file.read(group, [*map(column_name, LAYERS)])


def each_prompt(dataset: HiddenStates, order: list[int]) -> Iterator[dict[str, Any]]:
    """Each prompt by its index."""
    for index in order:
        yield dataset[index]


def cpu_seconds() -> float:
    """CPU time of this process and of its workers so far."""
    process = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in [process, *process.children()])


def runs(folder: Path) -> dict[str, Callable[[], Iterator]]:
    """What is measured, by name."""
    dataset = hsray.read(folder / "dataset")
    in_order = list(range(len(dataset)))
    shuffled = np.random.default_rng(1).permutation(len(dataset)).tolist()

    def stream(shuffle: bool, num_workers: int) -> Callable[[], Iterator]:
        packed = dataset.stream(batch_tokens=BATCH_TOKENS, shuffle=shuffle)
        if not num_workers:
            return lambda: iter(packed)
        # Their first pass starts them; another turn's is a training's.
        loader = DataLoader(packed, batch_size=None, num_workers=num_workers, persistent_workers=True)
        return lambda: iter(loader)

    return {
        "whole shards": lambda: whole_shards(dataset),
        "[i] in order": lambda: each_prompt(dataset, in_order),
        "[i] at random": lambda: each_prompt(dataset, shuffled),
        "torch.load in order": lambda: load_each(folder, in_order),
        "stream in order": stream(False, 0),
        "torch.load shuffled": lambda: load_each(folder, shuffled),
        "stream shuffled": stream(True, 0),
        "stream, 2 workers": stream(False, 2),
        "stream shuffled, 2 workers": stream(True, 2),
    }


def measure(folder: Path, name: str, num_bytes: int) -> list[tuple[float, float]]:
    """Of each of some passes, GB/s of this process's time and of its CPU time."""
    torch.set_num_threads(1)
    run, rates = runs(folder)[name], []
    for _ in range(PASSES):
        passed = run()  # starts the workers, if there are any
        started, cpu = time.monotonic(), cpu_seconds()
        for _kept in passed:
            pass
        took = time.monotonic() - started, cpu_seconds() - cpu
        rates.append(tuple(num_bytes / max(took_s, TICK_S) / 1e9 for took_s in took))
    return rates


def measure_in_turn(folder: Path, num_bytes: int) -> dict[str, dict[str, float]]:
    """The figures of each way, by name."""
    names, rates = list(runs(folder)), defaultdict(list)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as process:
        for _ in range(PROCESSES):
            measured = process.map(measure, [folder] * len(names), names, [num_bytes] * len(names))
            for name, passes in zip(names, measured, strict=True):
                rates[name] += passes
    figures = {}
    for name, passes in rates.items():
        wall, cpu = np.array(passes).T
        figures[name] = {
            "GB/s": float(np.median(wall)),
            "slowest": float(wall.min()),
            "fastest": float(wall.max()),
            "GB/s of CPU time": float(np.median(cpu)),
        }
    return figures


def main() -> int:
    """Prints a table, and writes JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write, in a temporary folder (default: the system's)")
    parser.add_argument("--bytes", type=float, default=1e9, help="of states (default: 1e9)")
    parser.add_argument("--file-format", choices=["parquet", "arrow"], default="parquet", help="(default: parquet)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hsray-bench-", dir=arguments.folder) as folder:
        num_bytes = make_dataset(Path(folder), int(arguments.bytes), arguments.file_format) * TOKEN_BYTES
        figures = measure_in_turn(Path(folder), num_bytes)
    shown = Table(f"{num_bytes / 1e9:.2f} GB of states, {os.cpu_count()} cores", *figures["whole shards"])
    for name, values in figures.items():
        shown.add_row(escape(name), *(f"{value:.2f}" for value in values.values()))
    Console(width=120).print(shown)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
