"""Kills what a build consists of, at random moments, and says whether its files are those of an undisturbed one.

Each run is one dataset, built on a Ray cluster of two nodes of this machine. A kill is SIGKILL to an engine actor, to its
engine's own process (SGLang's scheduler; where there is none, to the actor), to the driver, which is then started again, or
to the second node's Ray, which is then replaced. At the end of a run its files must be the undisturbed build's, byte for byte.

    python pipelines/chaos.py --model .demo/model --dataset prompts.jsonl --layers 9 final --runs 100 --kills 3
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

from hsray.events import NAME as EVENTS_NAME

BUILD = Path(__file__).parent / "build.py"

KINDS = ("actor", "engine", "driver", "node")


@dataclass(slots=True, kw_only=True)
class Run:
    """What became of one run."""

    kills: list[str] = field(default_factory=list)
    """Kinds, in order."""
    identical: bool = False
    lost: int = 0
    """Shards of the undisturbed build that are not there, or are others."""
    doubled: int = 0
    """Shards that were captured and published twice."""
    repeated: int = 0
    """Shards that were with an actor when it died, and that another captured."""
    hung: bool = False
    elapsed_s: float = 0.0


class Chaos:
    """A cluster of two nodes, on which builds are disturbed."""

    def __init__(self, arguments: argparse.Namespace, folder: Path):
        self._arguments, self._folder, self._chosen = arguments, folder, random.Random(arguments.seed)
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        self._second = self._cluster.add_node(num_cpus=2)
        self._whole, self._duration_s = {}, 0.0

    def close(self) -> None:
        self._cluster.shutdown()

    def undisturbed(self) -> float:
        """Builds the dataset to compare with; the seconds it took."""
        started = time.monotonic()
        if status := self._start(self._folder / "whole").wait(self._arguments.limit_s):
            raise SystemExit(f"the undisturbed build failed with status {status}; its words are above")
        self._whole, self._duration_s = digests(self._folder / "whole"), time.monotonic() - started
        return self._duration_s

    def run(self, number: int) -> Run:
        """Builds it once more, and kills something now and again."""
        out, run, started = self._folder / f"run-{number:03d}", Run(), time.monotonic()
        driver = self._start(out)
        while len(run.kills) < self._arguments.kills:
            self._wait_for_a_moment(driver, out)
            if driver.poll() is not None:
                break
            kind = self._chosen.choice(KINDS)
            driver = self._kill(kind, driver, out) or driver
            run.kills.append(kind)
        try:
            status = driver.wait(self._arguments.limit_s)
        except subprocess.TimeoutExpired:
            run.hung = True
            driver.kill()
            status = driver.wait()
        self._judge(run, out, status)
        run.elapsed_s = time.monotonic() - started
        return run

    def _start(self, out: Path) -> subprocess.Popen:
        asked = self._arguments
        command = [sys.executable, str(BUILD), "--model", asked.model, "--dataset", *asked.dataset, "--out", str(out)]
        command += [
            "--layers",
            *asked.layers,
            "--engine",
            asked.engine,
            "--shard-bytes",
            asked.shard_bytes,
            "--no-progress",
        ]
        # A shard may be there when several kills fall; they are not its doing.
        command += ["--engines", str(asked.engines), "--max-attempts", str(asked.kills + 1)]
        environment = {**os.environ, "RAY_ADDRESS": self._cluster.address}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def _wait_for_a_moment(self, driver: subprocess.Popen, out: Path) -> None:
        """Until one more shard or some are published, or, now and then, any moment of the build's time."""
        published = num_published(out)
        wanted = published + self._chosen.randint(1, max(1, len(self._whole) // (2 * self._arguments.kills)))
        within_s = self._duration_s * (self._chosen.random() if self._chosen.random() < 0.3 else 5)
        ends = time.monotonic() + within_s
        while driver.poll() is None and num_published(out) < wanted and time.monotonic() < ends:
            time.sleep(0.02)
        time.sleep(self._chosen.random() * 0.2)

    def _kill(self, kind: str, driver: subprocess.Popen, out: Path) -> subprocess.Popen | None:
        """Kills one of a kind; gives the driver that goes on, where it was the driver."""
        if kind == "driver":
            driver.kill()
            driver.wait()
            return self._start(out)
        if kind == "node":
            self._cluster.remove_node(self._second, allow_graceful=False)
            self._second = self._cluster.add_node(num_cpus=2)
            return None
        while driver.poll() is None:
            processes = psutil.process_iter(["cmdline"])
            actors = [process for process in processes if "CaptureWorker" in " ".join(process.info["cmdline"] or ())]
            with suppress(psutil.NoSuchProcess):  # it has just ended by itself
                mine = [actor for actor in actors if os.getpid() in [parent.pid for parent in actor.parents()]]
                if mine:
                    actor = self._chosen.choice(mine)
                    engines = [child for child in actor.children() if "scheduler" in " ".join(child.cmdline())]
                    (engines[0] if kind == "engine" and engines else actor).kill()
                    return None
            time.sleep(0.05)
        return None

    def _judge(self, run: Run, out: Path, status: int) -> None:
        found = digests(out)
        run.identical = status == 0 and found == self._whole
        run.lost = sum(found.get(name) != digest for name, digest in self._whole.items() if name.startswith("shards/"))
        events = [json.loads(line) for line in (out / EVENTS_NAME).read_text().splitlines()]
        captured = [event["shard"] for event in events if event["event"] == "receipt" and event["captured"]]
        run.doubled = len(captured) - len(set(captured))
        retried = {event["shard"] for event in events if event["event"] == "retry"}
        run.repeated = len(retried.intersection(captured))


def num_published(out: Path) -> int:
    """Shards that are there."""
    return sum(1 for _ in out.glob("shards/[0-9]*"))


def digests(out: Path) -> dict[str, str]:
    """What each file of a dataset holds, by name, but the log of its runs."""
    paths = [path for path in out.rglob("*") if path.is_file() and path.name != EVENTS_NAME]
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def table_of(runs: Sequence[Run]) -> Table:
    """A line for the runs with each kind of kill, and one for all."""
    shown = Table("killed", "kills", "runs", "identical", "shards lost", "captured twice", "begun again", "hangs")
    for kind in (*KINDS, "all"):
        hit = [run for run in runs if kind == "all" or kind in run.kills]
        num_kills = sum(len(run.kills) if kind == "all" else run.kills.count(kind) for run in hit)
        sums = [sum(getattr(run, name) for run in hit) for name in ("identical", "lost", "doubled", "repeated", "hung")]
        shown.add_row(kind, *map(str, (num_kills, len(hit), *sums)))
    num_kills = sum(len(run.kills) for run in runs)
    shown.caption = f"begun again: {sum(run.repeated for run in runs) / max(1, num_kills):.2f} shards a kill"
    return shown


def main() -> int:
    """Prints a line for each run, then the table; the status is 0 if every run was identical."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True)
    add("--dataset", required=True, nargs="+")
    add("--layers", required=True, nargs="+")
    add("--engine", default="transformers", choices=["transformers", "sglang"])
    add("--engines", type=int, default=2, help="engine actors (default: 2)")
    add("--shard-bytes", default="1MiB", help="(default: 1MiB)")
    add("--runs", type=int, default=3, help="(default: 3; the bar is 100)")
    add("--kills", type=int, default=3, help="in each run (default: 3)")
    add("--limit-s", type=float, default=600.0, help="a run that takes longer after its last kill hangs (default: 600)")
    add("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console, runs = Console(width=130), []
    with tempfile.TemporaryDirectory(prefix="hsray-chaos-") as name:
        chaos = Chaos(arguments, Path(name))
        try:
            console.print(f"undisturbed: {chaos.undisturbed():.1f} s")
            for number in range(arguments.runs):
                runs.append(run := chaos.run(number))
                verdict = "identical" if run.identical else "NOT IDENTICAL"
                console.print(f"run {number}: {verdict} in {run.elapsed_s:.1f} s after {', '.join(run.kills)}")
        finally:
            chaos.close()
    console.print(table_of(runs))
    return 0 if all(run.identical for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
