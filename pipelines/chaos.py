"""Kills what a build consists of, at random moments, and says whether its files are those of an undisturbed one.

Each run is one dataset, built on a Ray cluster of two nodes of this machine. At the end of a run its files must be the
undisturbed build's, byte for byte. What is killed, with SIGKILL but for the last two:

- an engine actor;
- its engine's own process (SGLang's scheduler; where there is none, the actor);
- an actor that has written a part of a shard's file;
- the driver, which is then started again;
- the second node's Ray, which is then replaced;
- that node, as a cloud takes back a spot machine: it is drained for some seconds first;
- nothing, but an engine's process (or the actor) is stopped: a hang, which the build itself must see and end.

    python pipelines/chaos.py --model .demo/model --dataset prompts.jsonl --layers 9 final --runs 100 --kills 3
"""

import argparse
import hashlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import build
import psutil
import pyarrow.parquet as pq
import torch
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

from hsray.events import NAME as EVENTS_NAME
from hsray.flags import parse_object
from hsray.store import TEMPORARY_PREFIX

KINDS = ("actor", "engine", "publish", "driver", "node", "drain", "hang")

#: How long a node that is drained lives on: a cloud gives 30 s to two minutes.
DRAIN_S = 5

#: How long one is looked for that can be killed so.
LOOK_FOR_S = 20.0

#: Tells the actors of a run where to write which shard they begin.
TRAIL = "HSRAY_CHAOS_TRAIL"


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
    begun_again: list[int] = field(default_factory=list)
    """For each kill, the shards that what it killed had begun to capture and that were begun anew."""
    captured_again: list[int] = field(default_factory=list)
    """Those of them that it had captured to the end, and not published yet."""
    set_aside: int = 0
    """Shards that were suspected of killing their engines, and of which each prompt was tried alone."""
    cut_short: int = 0
    """Rounds that Ray ended for the death of one actor, so that all had to start anew."""
    hung: bool = False
    differences: list[str] = field(default_factory=list)
    """From the undisturbed build."""
    elapsed_s: float = 0.0


class Chaos:
    """A cluster of two nodes, on which builds are disturbed."""

    def __init__(self, arguments: argparse.Namespace, folder: Path):
        self._arguments, self._folder, self._chosen = arguments, folder, random.Random(arguments.seed)
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        self._second = self._cluster.add_node(num_cpus=2)
        self._whole, self._duration_s = {}, 0.0
        self._actors_before: list[set[int]] = []  # of the run's kills

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
        driver, self._actors_before = self._start(out), []
        while len(run.kills) < self._arguments.kills:
            self._wait_for_a_moment(driver, out)
            if driver.poll() is not None:
                break
            kind = self._chosen.choice(self._arguments.kinds)
            before = {actor.pid for actor in self._actors()}
            killed, driver = self._kill(kind, driver, out)
            if killed:
                self._actors_before.append(before)
                run.kills.append(kind)
        try:
            status = driver.wait(self._arguments.limit_s)
        except subprocess.TimeoutExpired:
            run.hung = True
            driver.kill()
            status = driver.wait()
        self._judge(run, out, status)
        if run.identical:
            shutil.rmtree(out, ignore_errors=True)
        run.elapsed_s = time.monotonic() - started
        return run

    def _start(self, out: Path) -> subprocess.Popen:
        asked = self._arguments
        command = [sys.executable, __file__, "build", "--model", asked.model, "--dataset", *asked.dataset]
        command += ["--out", str(out), "--layers", *asked.layers, "--engine", asked.engine, "--no-progress"]
        command += ["--shard-bytes", asked.shard_bytes, "--engines", str(asked.engines)]
        command += ["--engine-args", json.dumps(asked.engine_args)] if asked.engine_args else []
        # A shard may be there when several kills fall; they are not its doing.
        command += ["--max-attempts", str(asked.kills + 1), "--request-timeout-s", str(asked.request_timeout_s)]
        environment = {**os.environ, "RAY_ADDRESS": self._cluster.address, TRAIL: f"{out}.trail"}
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

    def _kill(self, kind: str, driver: subprocess.Popen, out: Path) -> tuple[bool, subprocess.Popen]:
        """Kills one of a kind, if there is one before long; whether it did, and the driver that goes on."""
        if kind == "driver":
            driver.kill()
            driver.wait()
            return True, self._start(out)
        if kind in ("node", "drain"):
            if kind == "drain":
                self._drain()
            self._cluster.remove_node(self._second, allow_graceful=False)
            self._second = self._cluster.add_node(num_cpus=2)
            return True, driver
        ends = time.monotonic() + LOOK_FOR_S
        while driver.poll() is None and time.monotonic() < ends:
            with suppress(psutil.NoSuchProcess):  # it has just ended by itself
                if self._strike(kind, out):
                    return True, driver
            time.sleep(0 if kind == "publish" else 0.05)
        return False, driver

    def _drain(self) -> None:
        """Tells Ray that the second node will be taken away, as a cloud's notice does, and lets it live on so long."""
        ray_drains = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self._cluster.address]
        ray_drains += ["--node-id", self._second.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        ray_drains += ["--reason-message", "spot", "--deadline-remaining-seconds", str(DRAIN_S)]
        subprocess.run(ray_drains, check=True, stdout=subprocess.DEVNULL)
        time.sleep(DRAIN_S)

    def _strike(self, kind: str, out: Path) -> bool:
        """Strikes one actor, or its engine, if there is one to strike."""
        actors = self._actors()
        if kind == "publish":
            actors = [actor for actor in actors if self._is_publishing(actor, out)]
        if kind == "hang":  # one that has not begun may be where nobody watches it yet
            begun = {pid for _, pid, _ in steps_in(out)}
            actors = [actor for actor in actors if actor.pid in begun]
        if not actors:
            return False
        actor = self._chosen.choice(actors)
        engines = [child for child in actor.children() if "scheduler" in " ".join(child.cmdline())]
        struck = engines[0] if kind in ("engine", "hang") and engines else actor
        (struck.suspend if kind == "hang" else struck.kill)()
        return True

    def _actors(self) -> list[psutil.Process]:
        """This cluster's engine actors: others' may be on the machine."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            with suppress(psutil.NoSuchProcess):
                is_actor = "CaptureWorker" in " ".join(process.info["cmdline"] or ())
                if is_actor and os.getpid() in [parent.pid for parent in process.parents()]:
                    found.append(process)
        return found

    def _is_publishing(self, actor: psutil.Process, out: Path) -> bool:
        """Whether it has a part of a shard's file; it is stopped then, so that it still has it when it is killed."""
        if not any(out.glob(f"shards/{TEMPORARY_PREFIX}*")):
            return False
        actor.suspend()
        if any(Path(file.path).name.startswith(TEMPORARY_PREFIX) for file in actor.open_files()):
            return True
        actor.resume()
        return False

    def _judge(self, run: Run, out: Path, status: int) -> None:
        found = digests(out)
        run.identical = status == 0 and found == self._whole
        differing = sorted(
            name for name in found.keys() | self._whole.keys() if found.get(name) != self._whole.get(name)
        )
        run.differences = [f"status {status}"] * (status != 0) + [self._difference(name, out) for name in differing]
        run.lost = sum(found.get(name) != digest for name, digest in self._whole.items() if name.startswith("shards/"))
        events = [json.loads(line) for line in (out / EVENTS_NAME).read_text().splitlines()]
        captured = [event["shard"] for event in events if event["event"] == "receipt" and event["captured"]]
        run.doubled = len(captured) - len(set(captured))
        run.set_aside = sum(event["event"] == "failed" for event in events)
        run.cut_short = sum(event["event"] == "lost" for event in events)
        run.begun_again, run.captured_again = self._repeated(out, "begun"), self._repeated(out, "captured")

    def _difference(self, name: str, out: Path) -> str:
        """What is the matter with a file; of a shard, by how much its states are others than the undisturbed build's."""
        paths = [folder / name for folder in (self._folder / "whole", out)]
        for path, which in zip(paths, ("only the disturbed", "only the undisturbed"), strict=True):
            if not path.is_file():
                return f"{name}: {which} build has it"
        if not name.startswith("shards/"):
            return f"{name}: its bytes differ"
        whole, other = map(pq.read_table, paths)
        equal = [column for column in whole.column_names if whole[column].equals(other[column])]
        worst, prompts, values = 0.0, set(), 0
        for column in set(whole.column_names) - set(equal):
            if stored := (whole.schema.field(column).metadata or {}).get(b"hsray.dtype"):
                dtype = getattr(torch, stored.decode())
                for row, pair in enumerate(zip(whole[column].to_pylist(), other[column].to_pylist(), strict=True)):
                    a, b = (torch.frombuffer(bytearray(value), dtype=dtype).float() for value in pair)
                    if differing := int((a != b).sum()):
                        prompts.add(row)
                        values += differing
                        worst = max(worst, float((a - b).abs().max() / a.abs().max()))
        columns = ", ".join(column for column in whole.column_names if column not in equal) or "its metadata"
        by = f"{values} numbers by up to {worst:.2g} of the largest, in {len(prompts)} of {len(whole)} prompts"
        return f"{name}: {columns} differ; {by}"

    def _repeated(self, out: Path, step: str) -> list[int]:
        """For each kill, the captures that its victims had come so far with and that were begun once more."""
        steps = steps_in(out)
        last = {shard: place for place, (shard, _, other) in enumerate(steps) if other == "begun"}
        repeated = [0] * len(self._actors_before)
        for place, (shard, pid, other) in enumerate(steps):
            # Its process was there before some kills; the last of them ended it.
            if other == step and place < last[shard]:
                seen = [kill for kill, pids in enumerate(self._actors_before) if pid in pids]
                repeated[seen[-1] if seen else 0] += 1
        return repeated


def steps_in(out: Path) -> list[tuple[str, int, str]]:
    """What a run's actors have done so far: the shard, the process, and whether it was "begun" or "captured"."""
    trail = Path(f"{out}.trail")
    lines = trail.read_text().splitlines() if trail.exists() else []
    return [(shard, int(pid), step) for shard, pid, step in map(str.split, lines)]


def build_with_a_trail(command: Sequence[str]) -> int:
    """`build.py`, in actors that write down each shard that they begin to capture."""
    import ray

    runtime_env = {"worker_process_setup_hook": leave_a_trail, "env_vars": {TRAIL: os.environ[TRAIL]}}
    ray.init(runtime_env=runtime_env, logging_level=logging.ERROR, log_to_driver=False)
    return build.main(command)


def leave_a_trail() -> None:
    """Run by Ray in each of its worker processes as it starts."""
    import hsray.worker

    asking = hsray.worker.CaptureWorker._asking

    @contextmanager
    def asking_and_telling(self: hsray.worker.CaptureWorker, key: str) -> Iterator[None]:
        _, shard = key.split("/", maxsplit=1)  # after what tells this driver's attempts from another's
        tell(shard, "begun")
        with asking(self, key):
            yield
        tell(shard, "captured")

    def tell(shard: str, step: str) -> None:
        with open(os.environ[TRAIL], "a") as trail:
            trail.write(f"{shard} {os.getpid()} {step}\n")

    hsray.worker.CaptureWorker._asking = asking_and_telling


def num_published(out: Path) -> int:
    """Shards that are there."""
    return sum(1 for _ in out.glob("shards/[0-9]*"))


def digests(out: Path) -> dict[str, str]:
    """What each file of a dataset holds, by name, but the log of its runs."""
    paths = [path for path in out.rglob("*") if path.is_file() and path.name != EVENTS_NAME]
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def table_of(runs: Sequence[Run]) -> Table:
    """A line for the runs with each kind of kill, and one for all."""
    sums = {
        "identical": "identical",
        "shards lost": "lost",
        "published twice": "doubled",
        "set aside": "set_aside",
        "rounds cut": "cut_short",
        "hangs": "hung",
    }
    shown = Table("killed", "kills", "runs", *sums, "begun again", "captured again")
    for kind in (*KINDS, "all"):
        hit = [run for run in runs if kind == "all" or kind in run.kills]
        counts = [sum(getattr(run, name) for run in hit) for name in sums.values()]
        kills = [
            costs
            for run in hit
            for name, *costs in zip(run.kills, run.begun_again, run.captured_again, strict=True)
            if kind in ("all", name)
        ]
        costs = map(mean_and_most, zip(*kills, strict=True)) if kills else ("", "")
        shown.add_row(kind, *map(str, (len(kills), len(hit), *counts)), *costs)
    shown.caption = "shards a kill, mean / most: whose capture was begun and then begun once more; of them, those that were captured to the end"
    return shown


def mean_and_most(counts: Sequence[int]) -> str:
    """As "0.50 / 2"."""
    return f"{sum(counts) / len(counts):.2f} / {max(counts)}"


def main() -> int:
    """Prints a line for each run, then the table; the status is 0 if every run was identical, and one had all its kills."""
    if sys.argv[1:2] == ["build"]:
        return build_with_a_trail(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True)
    add("--dataset", required=True, nargs="+")
    add("--layers", required=True, nargs="+")
    add("--engine", default="transformers", choices=["transformers", "sglang"])
    add("--engine-args", type=parse_object, metavar="JSON", help="as for build.py")
    add("--engines", type=int, default=2, help="engine actors (default: 2)")
    add("--shard-bytes", default="1MiB", help="(default: 1MiB)")
    add(
        "--runs",
        type=int,
        default=3,
        help="with all their kills; one that is over before is one more (default: 3; the bar is 100)",
    )
    add("--kills", type=int, default=3, help="in each run (default: 3)")
    add("--kinds", nargs="+", default=KINDS, choices=KINDS, help="of kills (default: all)")
    add("--request-timeout-s", type=float, default=30.0, help="after which an engine hangs (default: 30)")
    add("--limit-s", type=float, default=600.0, help="a run that takes longer after its last kill hangs (default: 600)")
    add("--within-s", type=float, default=float("inf"), help="begin no run after so many seconds (default: begin all)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="also write what became of each run here")
    arguments = parser.parse_args()
    console, runs, whole, started = Console(width=130), [], 0, time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="hsray-chaos-"))
    chaos = Chaos(arguments, folder)
    try:
        console.print(f"undisturbed: {chaos.undisturbed():.1f} s")
        for number in range(2 * arguments.runs):
            if whole == arguments.runs or time.monotonic() - started > arguments.within_s:
                break
            runs.append(run := chaos.run(number))
            whole += len(run.kills) == arguments.kills
            verdict = "identical" if run.identical else "NOT IDENTICAL"
            console.print(f"run {number}: {verdict} in {run.elapsed_s:.1f} s after {', '.join(run.kills)}")
            for difference in run.differences:
                console.print(f"    {difference}")
            if arguments.json:
                arguments.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    finally:
        chaos.close()
        if all(run.identical for run in runs):
            shutil.rmtree(folder)
        else:
            console.print(f"kept: {folder}, with the undisturbed dataset and those that are not identical")
    console.print(table_of(runs))
    if whole < arguments.runs:
        console.print(f"{whole} runs of {arguments.runs} had all their kills; more prompts make longer runs")
    return 0 if whole and all(run.identical for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
