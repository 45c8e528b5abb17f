"""Measures exports: how fast a core writes each target's files, and what the driver holds meanwhile.

The states are random. A core's speed is that of one shard's files, read and written in this process, by its CPU time; the
driver's memory is the most it holds above what it held before, while whole datasets of ever more prompts are exported
through Ray. It should not grow with their number.

    python pipelines/bench_export.py --prompts 1000 10000 --json export.json
"""

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path

import torch
from random_dataset import make_random_dataset
from rich.console import Console
from rich.table import Table

import hsray
from hsray.exporter import ExportJob, read_samples, select
from hsray.manifest import load_manifest
from hsray.store import Store
from hsray.targets import TARGETS

NUM_TOKENS = 256
LAYERS = [1, 2, 4, 5, "final"]
TURNS = 3


def measure_core(out: Path, target: str) -> dict[str, float]:
    """The first shard's files, written in this process: GB of states, and of files, a second of CPU time."""
    dataset, best_s = Store(out), float("inf")
    manifest = load_manifest(dataset)
    job = ExportJob(
        out=str(out),
        to="",
        storage_options=None,
        target=target,
        selection=select(manifest, target, layers=None, context_size=1024),
        manifest=manifest,
        trust_remote_code=False,
    )
    for _ in range(TURNS):
        with tempfile.TemporaryDirectory(prefix="hsray-bench-", dir=out.parent) as to:
            started = time.process_time()
            written = TARGETS[target].write(Store(to), 0, read_samples(dataset, job, 0, 0), job.selection)
            best_s = min(best_s, time.process_time() - started)
    num_bytes = 2 * manifest.identity.hidden_size * manifest.plan.shard_tokens[0] * len(job.selection.read)
    return {"states": num_bytes / best_s / 1e9, "files": written.nbytes / best_s / 1e9}


def measure_driver(out: Path, target: str) -> dict[str, float]:
    """A whole export: seconds, GB written, and the most bytes that this process held beyond those before."""
    with tempfile.TemporaryDirectory(prefix="hsray-bench-", dir=out.parent) as to:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: Linux, proc(5)
        before, started = _memory("VmRSS"), time.monotonic()
        report = hsray.export(out, target, to=to, progress=False)
        seconds, held = time.monotonic() - started, _memory("VmHWM") - before
    return {"prompts": report.prompts, "shards": report.new_shards, "bytes": report.nbytes, "s": seconds, "held": held}


def _memory(name: str) -> int:
    """A line of this process's status, in bytes."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def main() -> int:
    """Prints both tables, and writes JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prompts", type=int, nargs="+", default=[200, 1000], help=f"of {NUM_TOKENS} tokens (default: 200 1000)")
    add("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS), help="(default: all)")
    add("--driver-target", default="speculators", choices=list(TARGETS), help="exported whole (default: speculators)")
    add("--hidden-size", type=int, default=512, help="(default: 512)")
    add("--shard-bytes", type=int, default=64 << 20, help="(default: 64 MiB)")
    add("--folder", type=Path, help="where to write, in a temporary folder (default: the system's)")
    add("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cores, drivers = {}, []
    for num_prompts in arguments.prompts:
        with tempfile.TemporaryDirectory(prefix="hsray-bench-", dir=arguments.folder) as name:
            out = Path(name) / "dataset"
            make_random_dataset(
                out,
                lengths=[NUM_TOKENS] * num_prompts,
                layers=LAYERS,
                num_layers=6,
                hidden_size=arguments.hidden_size,
                shard_bytes=arguments.shard_bytes,
            )
            cores = cores or {target: measure_core(out, target) for target in arguments.targets}
            if not drivers:
                measure_driver(out, arguments.driver_target)  # loads and starts Ray
            drivers.append(measure_driver(out, arguments.driver_target))
    by_core = Table("target", "GB of states a CPU second", "GB of files", title="one core, one shard")
    for target, figure in cores.items():
        by_core.add_row(target, f"{figure['states']:.2f}", f"{figure['files']:.2f}")
    by_driver = Table("prompts", "shards", "GB written", "s", "driver's peak, MB", title=arguments.driver_target)
    for figure in drivers:
        counts = (f"{figure['prompts']:,}", f"{figure['shards']:,}", f"{figure['bytes'] / 1e9:.2f}")
        by_driver.add_row(*counts, f"{figure['s']:.0f}", f"{figure['held'] / 1e6:.1f}")
    console = Console()
    console.print(by_core, by_driver)
    if arguments.json:
        arguments.json.write_text(json.dumps({"core": cores, "driver": drivers}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
