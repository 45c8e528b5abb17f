"""Where the engines of a build run: nodes that join later, GPUs of one node, a cluster that several builds share.

The nodes are Rays of this machine; the GPUs are numbers, and the engines compute without.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

import hsray
from hsray.rounds import Pool
from tests.builds import unique_prompts, write_jsonl
from tests.conftest import ROOT

#: A Ray's start, and a build's, where many share the machine.
LIMIT_S = 240


@contextmanager
def cluster_of(**head: int) -> Iterator[Cluster]:
    """A Ray of one node, to which others may be added."""
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
    try:
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Work for one engine that lasts longer than another's start."""
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", unique_prompts(700, longest=1000))


def start_build(cluster: Cluster, model: Path, dataset: Path, out: Path, **flags: object) -> subprocess.Popen:
    command = [sys.executable, ROOT / "pipelines/build.py", "--model", model, "--dataset", dataset, "--out", out]
    command += ["--engine", "transformers", "--layers", "0", "final", "--shard-bytes", "512KiB", "--no-progress"]
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end_of(build: subprocess.Popen) -> tuple[int, str]:
    words, _ = build.communicate(timeout=LIMIT_S)
    return build.returncode, words


def engines_of(node) -> list[psutil.Process]:
    """The engine actors that run on a node."""
    [raylet] = [info.process.pid for info in node.all_processes["raylet"]]
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.NoSuchProcess):
            is_engine = "CaptureWorker" in " ".join(process.info["cmdline"] or ())
            if is_engine and raylet in [parent.pid for parent in process.parents()]:
                found.append(process)
    return found


def wait_for(what) -> None:
    ends = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < ends
        time.sleep(0.05)


def receipts_of(out: Path) -> list[Mapping[str, object]]:
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "receipt"]


def test_a_node_that_joins_later_is_used_and_two_builds_share_a_cluster(tiny_llama, dataset, tmp_path):
    with cluster_of(num_cpus=1) as cluster:
        first = start_build(cluster, tiny_llama, dataset, tmp_path / "first", engines="1:2")
        wait_for(lambda: any((tmp_path / "first").glob("shards/[0-9]*")))
        assert len(engines_of(cluster.head_node)) == 1
        cluster.add_node(num_cpus=2)
        few = write_jsonl(tmp_path / "few.jsonl", unique_prompts(50, longest=100))
        second = start_build(cluster, tiny_llama, few, tmp_path / "second", engines=1)
        for build in (first, second):
            status, words = end_of(build)
            assert status == 0, words
    makers = {receipt["pid"] for receipt in receipts_of(tmp_path / "first")}
    assert len(makers) == 2, "the engine on the later node has published nothing"
    assert [len(hsray.read(tmp_path / name)) for name in ("first", "second")] == [700, 50]


def test_an_engine_takes_the_gpus_of_one_node_and_it_is_said_where_none_has_so_many(tiny_llama, dataset, tmp_path):
    with cluster_of(num_cpus=2, num_gpus=1) as cluster:
        larger = cluster.add_node(num_cpus=2, num_gpus=2)
        status, words = end_of(
            start_build(cluster, tiny_llama, dataset, tmp_path / "none", engine="sglang", tensor_parallel=4)
        )
        assert status == 1 and words.endswith(
            "error: tensor_parallel=4: no node has so many GPUs; the most that one has is 2. Give a smaller tensor_parallel, or "
            "the cluster a larger node\n"
        )
        assert not (tmp_path / "none/manifest.json").exists()

        build = start_build(cluster, tiny_llama, dataset, tmp_path / "out", engine="sglang", tensor_parallel=2)
        wait_for(lambda: engines_of(larger) or engines_of(cluster.head_node))
        assert len(engines_of(larger)) == 1 and not engines_of(cluster.head_node)
        build.terminate()
        status, words = end_of(build)
        assert status == 130, words


@pytest.mark.parametrize(
    ("nodes", "tensor_parallel", "engines", "wanted"),
    [
        ([(0, 2)], 1, None, Pool(fewest=1, most=1, gpus_each=0, cpus_each=1, writers_each=1)),
        ([(0, 1), (0, 1)], 4, (1, 8), Pool(fewest=1, most=8, gpus_each=0, cpus_each=1, writers_each=1)),
        ([(0, 8), (8, 64)], 1, None, Pool(fewest=8, most=8, gpus_each=1, cpus_each=2, writers_each=2)),
        # What is left of a node's GPUs is no engine, nor are two nodes one.
        (
            [(0, 8), (3, 64), (3, 64), (1, 64)],
            2,
            None,
            Pool(fewest=2, most=2, gpus_each=2, cpus_each=2, writers_each=2),
        ),
        # The head's many CPUs are of no use to eight engines of a node that has eight, or four.
        ([(0, 96), (8, 8)], 1, 8, Pool(fewest=8, most=8, gpus_each=1, cpus_each=1, writers_each=2)),
        ([(0, 96), (8, 4)], 1, 8, Pool(fewest=8, most=8, gpus_each=1, cpus_each=0, writers_each=2)),
        ([(2, 8)], 1, 500, Pool(fewest=100, most=100, gpus_each=1, cpus_each=2, writers_each=2)),
    ],
)
def test_engines_fill_what_the_nodes_have(nodes, tensor_parallel, engines, wanted):
    assert Pool.of(nodes, tensor_parallel=tensor_parallel, engines=engines, num_tasks=100) == wanted
