"""`ray job submit` against a real cluster of this machine: exit codes, logs, engines, a clean stop, a token that is asked for."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import hsray
from hsray.manifest import LEASE_NAME
from tests.builds import unique_prompts, write_jsonl
from tests.conftest import ROOT

pytestmark = pytest.mark.alone

RAY = Path(sys.executable).with_name("ray")

#: A cluster's start, and a job's, where many share the machine.
LIMIT_S = 180


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment of a client of a cluster that asks for a token and knows nothing of hsray.

    Ray hands out GPUs that are not there, and the engines compute without.
    """
    folder, dashboard = tmp_path_factory.mktemp("cluster"), free_port()
    sessions = tempfile.mkdtemp(prefix="ray-")  # a socket's path may not be longer
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**inherited, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    flags = {
        "num-cpus": 4,
        "num-gpus": 2,
        "node-ip-address": "127.0.0.1",
        "port": free_port(),
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": free_port(),  # the agent starts the jobs; another Ray's may have the usual one
        "temp-dir": sessions,
    }
    command = [RAY, "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    with (folder / "log").open("w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
        client = {**environment, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
        ends = time.monotonic() + LIMIT_S
        # The job server answers before there is an agent to run a job.
        while subprocess.run([RAY, "job", "submit", "--", "true"], env=client, capture_output=True).returncode:
            assert head.poll() is None and time.monotonic() < ends, (folder / "log").read_text()
        yield client
        # Asked to end, they take half a minute.
        for process in [*psutil.Process(head.pid).children(recursive=True), head]:
            process.kill()
        head.wait(LIMIT_S)
    shutil.rmtree(sessions, ignore_errors=True)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """What travels with a job: the two folders of code."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("hsray", "pipelines"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def submit(client: dict[str, str], checkout: Path, job: str, **flags: object) -> subprocess.Popen:
    script = [sys.executable, "pipelines/build.py", "--engine", "transformers", "--layers", "0", "--no-progress"]
    for name, value in flags.items():
        script += [f"--{name.replace('_', '-')}", value]
    command = [RAY, "job", "submit", "--working-dir", checkout, "--submission-id", job, "--", *script]
    return subprocess.Popen(command, env=client, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_job_that_is_stopped_leaves_a_folder_that_the_next_resumes_and_says_so(
    cluster, checkout, tiny_llama, tmp_path
):
    dataset = write_jsonl(tmp_path / "prompts.jsonl", unique_prompts(200, longest=600))
    out = tmp_path / "out"
    flags = {"model": tiny_llama, "dataset": dataset, "out": out, "shard_bytes": "256KiB"}
    job = submit(cluster, checkout, "stopped", **flags)
    ends = time.monotonic() + LIMIT_S
    while not any(out.glob("shards/[0-9]*")):
        assert job.poll() is None and time.monotonic() < ends
        time.sleep(0.05)
    assert json.loads((out / LEASE_NAME).read_text())["job"] == "stopped"
    subprocess.run([RAY, "job", "stop", "stopped"], env=cluster, check=True, capture_output=True, timeout=LIMIT_S)
    words, _ = job.communicate(timeout=LIMIT_S)
    assert "interrupted: saying the same again resumes the build" in words and "Job 'stopped' was stopped" in words
    assert not (out / LEASE_NAME).exists(), "it was killed before it gave the folder back"
    # A writer may have been ended in the midst of a file, whose part is swept later.
    published = {path: path.stat().st_ino for path in out.glob("shards/[0-9]*")}

    again = submit(cluster, checkout, "again", **flags)
    words, _ = again.communicate(timeout=LIMIT_S)
    assert again.returncode == 0, words
    assert f"{out}: 200 prompts" in words and "Traceback" not in words
    actors = subprocess.run(
        [RAY, "list", "actors", "--address", cluster["RAY_API_SERVER_ADDRESS"], "--format=json"],
        env=cluster,
        check=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    engines = Counter(actor["job_id"] for actor in json.loads(actors.stdout) if "CaptureWorker" in actor["class_name"])
    assert sorted(engines.values()) == [2, 2], "each build has an engine on each GPU"
    made = {path: path.stat().st_ino for path in out.glob("shards/*")}
    assert len(made) > len(published) and made.items() >= published.items()
    assert len(hsray.read(out)) == 200


def test_a_job_that_fails_ends_with_one_and_one_clear_line(cluster, checkout, tiny_llama, tmp_path):
    job = submit(cluster, checkout, "bad", model=tiny_llama, dataset="any.jsonl", layers="99", out=tmp_path / "out")
    words, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 1
    assert "error: layer 99" in words and "Traceback" not in words
    assert not (tmp_path / "out").exists()


def test_a_client_without_the_token_is_refused(cluster):
    stranger = {**cluster, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ended = subprocess.run([RAY, "job", "list"], env=stranger, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode != 0
    assert "token" in (ended.stdout + ended.stderr).lower()
