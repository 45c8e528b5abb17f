"""A build that died is resumed by saying it again, and ends as if it had never died; another one is refused."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import ray

import hsray
from hsray.engine import EngineDied
from hsray.lease import Holder
from hsray.manifest import LEASE_NAME, load_manifest
from hsray.report import BuildReport
from hsray.store import Store
from tests.builds import build_tiny, files_of, unique_prompts, write_jsonl
from tests.datasets import make_dataset

ROOT = Path(__file__).parent.parent
LAYERS = ["embed", 0, 3, 5, "final"]
KILLED_ROWS = unique_prompts(100, longest=300, seed=1)
KILLED_SHARD_BYTES = 512 << 10
ROWS = unique_prompts(30, longest=60)
FINISHED = {
    "dataset": [*ROWS, {"input_ids": ROWS[0]["input_ids"]}],
    "sort": "length",
    "max_tokens": 50,
    "too_long": "truncate",
    "duplicates": "drop",
    "shard_bytes": 1 << 16,
}


@pytest.fixture(scope="module")
def resumable(tiny_llama, tmp_path_factory, ray_session, request):
    """A build to kill: its command for an `out`, and the files of an undisturbed run."""
    folder = tmp_path_factory.mktemp("resumable")
    dataset = write_jsonl(folder / "prompts.jsonl", KILLED_ROWS)

    def command(out: Path) -> list[str]:
        script = [
            sys.executable,
            str(ROOT / "pipelines/build.py"),
            "--engine",
            request.config.getoption("resume_engine"),
        ]
        what = ["--model", str(tiny_llama), "--dataset", str(dataset), "--layers", *map(str, LAYERS)]
        return [*script, *what, "--out", str(out), "--shard-bytes", str(KILLED_SHARD_BYTES), "--no-progress"]

    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    started = time.monotonic()
    subprocess.run(command(folder / "whole"), env=environment, check=True)
    return command, environment, files_of(folder / "whole"), time.monotonic() - started


@pytest.mark.timeout(1800)  # six builds at the least, each of which starts an engine
def test_a_build_killed_again_and_again_equals_an_undisturbed_one_and_makes_no_shard_twice(
    resumable, tmp_path, request
):
    command, environment, whole, duration_s = resumable
    out, chosen, published, kills = tmp_path / "killed", random.Random(7), {}, []
    num_shards = sum(name.startswith("shards/") for name in whole)
    for left in range(request.config.getoption("kills"), 0, -1):
        driver = subprocess.Popen(command(out), env=environment)
        # By turns within the capture, after some of its shards, and at any moment up to that.
        more = chosen.randint(1, max(1, 2 * (num_shards - len(published)) // (left + 2)))
        timeout_s = chosen.uniform(0.05, 1.0) * duration_s if left % 2 else 10 * duration_s
        wait_for(driver, out, more, timeout_s)
        assert driver.poll() is None, f"it ended before it was killed: exit status {driver.returncode}"
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        # A file that is written again gets another inode, even with the same bytes.
        inodes = {path.name: path.stat().st_ino for path in out.glob("shards/[0-9]*")}
        assert inodes.items() >= published.items(), "a published shard was written again"
        published = inodes
        kills.append(len(published))
    driver = subprocess.Popen(
        command(out), env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    )
    wait_for(driver, out, 1, 10 * duration_s)
    driver.send_signal(signal.SIGINT)
    assert driver.communicate()[1].splitlines()[-1] == "interrupted: saying the same again resumes the build"
    assert driver.returncode == 130
    subprocess.run(command(out), env=environment, check=True)
    assert {path.name: path.stat().st_ino for path in out.glob("shards/*")}.items() >= published.items()
    assert files_of(out) == whole
    assert any(0 < kill < num_shards for kill in kills), "no kill fell inside the capture"
    print(f"shards published at each kill, of {num_shards}: {kills}")


def heed_interrupts() -> None:
    """What a shell starts in the background is told to ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(driver: subprocess.Popen, out: Path, more: int, timeout_s: float) -> None:
    """Until a build has ended, has published so many shards more, or the time is over.

    They count from when it holds the lease: the engines of a driver that was killed may go on for a moment.
    """
    ends = time.monotonic() + timeout_s
    before = None
    while driver.poll() is None and time.monotonic() < ends:
        published = sum(1 for _ in out.glob("shards/[0-9]*"))
        if before is None:
            with suppress(FileNotFoundError):
                if Holder.parse((out / LEASE_NAME).read_bytes()).pid == driver.pid:
                    before = published
        elif published >= before + more:
            return
        time.sleep(0.01)


@contextmanager
def actors_killed(times: int) -> Iterator[list[int]]:
    """SIGKILLs an engine actor of this process's Ray, as soon as it is seen, so many times; gives their process ids."""
    killed: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2) and len(killed) < times:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if "CaptureWorker" in " ".join(process.cmdline()) and process.pid not in killed:
                        process.kill()
                        killed.append(process.pid)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield killed
    finally:
        ended.set()
        watcher.join()


def test_an_engine_actor_that_is_killed_is_replaced(resumable, tiny_llama, tmp_path, request):
    _, _, undisturbed, _ = resumable
    asked = {"layers": LAYERS, "shard_bytes": KILLED_SHARD_BYTES, "engine": request.config.getoption("resume_engine")}
    with actors_killed(1) as killed:
        report = build_tiny(tiny_llama, KILLED_ROWS, tmp_path / "out", **asked)
    assert len(killed) == 1
    assert report.new_shards == report.shards > 3
    assert files_of(tmp_path / "out") == undisturbed


def test_an_engine_actor_that_always_dies_ends_the_build(ray_session, tiny_llama, tmp_path):
    with actors_killed(20) as killed, pytest.raises(EngineDied, match=r"an engine's process died again and again"):
        build_tiny(tiny_llama, unique_prompts(20, longest=50), tmp_path / "out", max_attempts=2)
    # It is started anew 4 * max_attempts times, and once more by Ray if it dies before its first task.
    assert 9 <= len(killed) <= 10


@pytest.fixture(scope="module")
def finished(ray_session, tiny_llama, tmp_path_factory) -> BuildReport:
    """Of a build of `FINISHED`, sorted and truncated; for tests that change a copy of its dataset."""
    return build_tiny(tiny_llama, **FINISHED, out=tmp_path_factory.mktemp("finished") / "out")


@pytest.fixture
def out(finished, tmp_path) -> Path:
    """A copy of the finished dataset."""
    return shutil.copytree(finished.out, tmp_path / "out")


def test_a_sorted_and_truncated_build_has_its_longest_prompts_first_and_cut(finished):
    num_long = sum(len(row["input_ids"]) > 50 for row in ROWS)
    assert (finished.prompts, finished.dropped, finished.truncated) == (30, 1, num_long)
    assert finished.new_shards == finished.shards > 3
    lengths = [len(prompt["input_ids"]) for prompt in hsray.read(finished.out)]
    assert lengths == sorted((min(50, len(row["input_ids"])) for row in ROWS), reverse=True)


def test_a_finished_dataset_opens_no_engine(tiny_llama, out):
    whole = files_of(out)
    again = build_tiny(tiny_llama, **FINISHED, out=out)
    shard_bytes = sum(len(content) for name, content in whole.items() if name.startswith("shards/"))
    assert (again.new_shards, again.nbytes) == (0, shard_bytes)
    assert "no engine was opened" in str(again)
    assert files_of(out) == whole


def test_a_shard_of_another_dataset_or_a_damaged_one_is_refused_and_restored_once_removed(tiny_llama, out, tmp_path):
    lengths = [len(prompt["input_ids"]) for prompt in hsray.read(out)]
    make_dataset(tiny_llama, tmp_path / "other", lengths=lengths, layers=[0])
    make_dataset(tiny_llama, tmp_path / "other layer", lengths=lengths, layers=[1])
    whole, shard = files_of(out), out / "shards/000000.parquet"
    shard.write_bytes(bytes(len(whole["shards/000000.parquet"])))
    with pytest.raises(ValueError, match="is damaged"):  # complete, and every file of its size
        build_tiny(tiny_llama, **FINISHED, out=out)
    manifest = load_manifest(Store(out))
    manifest.reopened().save(Store(out))
    bad = [
        ("is not of this dataset: its identity_digest", files_of(tmp_path / "other")["shards/000000.parquet"]),
        ("is not of this dataset: its identity_digest", files_of(tmp_path / "other layer")["shards/000000.parquet"]),
        ("is damaged", whole["shards/000000.parquet"][:-100]),
    ]
    for message, content in bad:
        shard.write_bytes(content)
        with pytest.raises(ValueError, match=rf"shards/000000\.parquet {message}.*remove it, and build again"):
            build_tiny(tiny_llama, **FINISHED, out=out)
        with pytest.raises(ValueError, match=message):
            hsray.read(out)[0]
    shard.unlink()
    assert build_tiny(tiny_llama, **FINISHED, out=out).new_shards == 1
    assert files_of(out) == whole


CHANGES = [
    ({"layers": [1]}, "layers: the dataset has (0,), this build asks for (1,)"),
    ({"dtype": "bfloat16"}, "dtype: the dataset has 'float32', this build asks for 'bfloat16'"),
    ({"dataset": FINISHED["dataset"][:4]}, "prompts_digest: the dataset has"),
    ({"dataset": FINISHED["dataset"][::-1]}, "prompts_digest: the dataset has"),
    ({"sort": "input"}, "sort: the dataset has 'length', this build asks for 'input'"),
    ({"shard_bytes": 1 << 20}, "shard_bytes: the dataset has"),
    ({"max_tokens": 100}, "max_tokens: the dataset has 50, this build asks for 100"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_resuming_with_something_else_shows_both_sides(tiny_llama, out, change, message):
    before = files_of(out)
    with pytest.raises(ValueError, match=re.escape(message)):
        build_tiny(tiny_llama, **(FINISHED | {"out": out} | change))
    assert files_of(out) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [("plan/000000.parquet", "000000.parquet is changed"), ("manifest.json", "manifest.json is damaged")],
)
def test_a_corrupted_plan_or_manifest_is_refused_before_any_shard(tiny_llama, out, name, message):
    (out / "shards/000000.parquet").unlink()
    manifest = load_manifest(Store(out))
    broken = bytearray((out / name).read_bytes())
    broken[len(broken) // 2] ^= 0xFF
    (out / name).write_bytes(broken)
    with pytest.raises(ValueError, match=message):
        build_tiny(tiny_llama, **FINISHED, out=out)
    assert not (out / "shards/000000.parquet").exists()
    assert manifest.state == "complete"
