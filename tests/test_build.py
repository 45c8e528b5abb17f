"""A build, through Ray, gives each prompt its own states; a killed one, started again, ends as if never killed."""

import json
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
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch

import hsray
from hsray.engine import EngineDied
from hsray.events import NAME as EVENTS_NAME
from hsray.manifest import load_manifest
from hsray.store import Store

ROOT = Path(__file__).parent.parent
LAYERS = ["embed", 0, 3, 5, "final"]


def unique_prompts(count: int, longest: int, seed: int = 0, vocab_size: int = 1000) -> list[dict]:
    """Prompts of 1 to `longest` tokens, each length and each content its own."""
    chosen = random.Random(seed)
    lengths = [1, 2, longest, *(chosen.randint(1, longest) for _ in range(count - 3))]
    return [
        {"id": f"p{number}", "input_ids": [chosen.randrange(vocab_size) for _ in range(num_tokens)]}
        for number, num_tokens in enumerate(lengths)
    ]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def files_of(out: Path) -> dict[str, bytes]:
    """Of a dataset, by name; without the log of the runs that made it."""
    paths = [path for path in sorted(out.rglob("*")) if path.is_file() and path.name != EVENTS_NAME]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def test_each_of_200_prompts_gets_the_states_it_has_alone(ray_session, tiny_llama, tiny_sglang, tmp_path):
    rows = unique_prompts(200, longest=700)
    out = tmp_path / "out"
    report = hsray.build(
        rows, model=str(tiny_llama), layers=LAYERS, out=out, dtype="float32", shard_bytes=8 << 20, progress=False
    )
    assert (report.prompts, report.new_shards) == (200, report.shards)
    assert report.shards > 20
    dataset = hsray.read(out)
    assert [dataset[i]["prompt_id"] for i in range(200)] == [row["id"] for row in rows]
    for index, row in enumerate(rows):
        prompt, alone = dataset[index], tiny_sglang.capture_alone(row["input_ids"])
        assert prompt["input_ids"].tolist() == row["input_ids"]
        for layer, hidden_TD in prompt["hidden_states"].items():
            assert torch.equal(hidden_TD, alone[layer]), f"{row['id']}, layer {layer}"


@pytest.fixture
def resumable(tiny_llama, tmp_path, ray_session, request):
    """A build to kill: its command for an `out`, and the files of an undisturbed run."""
    dataset = write_jsonl(tmp_path / "prompts.jsonl", unique_prompts(300, longest=700, seed=1))

    def command(out: Path) -> list[str]:
        script = [
            sys.executable,
            str(ROOT / "pipelines/build.py"),
            "--engine",
            request.config.getoption("resume_engine"),
        ]
        what = ["--model", str(tiny_llama), "--dataset", str(dataset), "--layers", *map(str, LAYERS)]
        return [*script, *what, "--out", str(out), "--shard-bytes", "4MiB", "--no-progress"]

    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    started = time.monotonic()
    subprocess.run(command(tmp_path / "whole"), env=environment, check=True)
    return command, environment, files_of(tmp_path / "whole"), time.monotonic() - started


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
        some = len(published) + chosen.randint(1, max(1, 2 * (num_shards - len(published)) // (left + 2)))
        timeout_s = chosen.uniform(0.05, 1.0) * duration_s if left % 2 else 10 * duration_s
        wait_for(driver, out, some, timeout_s)
        assert driver.poll() is None, f"it ended before it was killed: exit status {driver.returncode}"
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        # A file that is written again gets another inode, even with the same bytes.
        inodes = {path.name: path.stat().st_ino for path in out.glob("shards/[0-9]*")}
        assert inodes.items() >= published.items(), "a published shard was written again"
        published = inodes
        kills.append(len(published))
    driver = subprocess.Popen(command(out), env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(driver, out, len(published) + 1, 10 * duration_s)
    driver.send_signal(signal.SIGINT)
    assert driver.communicate()[1].splitlines()[-1] == "interrupted: saying the same again resumes the build"
    assert driver.returncode == 130
    subprocess.run(command(out), env=environment, check=True)
    assert {path.name: path.stat().st_ino for path in out.glob("shards/*")}.items() >= published.items()
    assert files_of(out) == whole
    assert any(0 < kill < num_shards for kill in kills), "no kill fell inside the capture"
    print(f"shards published at each kill, of {num_shards}: {kills}")


def wait_for(driver: subprocess.Popen, out: Path, shards: int, timeout_s: float) -> None:
    """Until a build has ended, has published so many shards, or the time is over."""
    ends = time.monotonic() + timeout_s
    while driver.poll() is None and sum(1 for _ in out.glob("shards/[0-9]*")) < shards and time.monotonic() < ends:
        time.sleep(0.01)


@contextmanager
def actors_killed(times: int) -> Iterator[list[int]]:
    """SIGKILLs the engine actor of a running build, as soon as it is seen, so many times; gives their process ids."""
    killed: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05) and len(killed) < times:
            for process in psutil.process_iter(["cmdline"]):
                if "CaptureWorker" in " ".join(process.info["cmdline"] or ()) and process.pid not in killed:
                    process.kill()
                    killed.append(process.pid)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield killed
    finally:
        ended.set()
        watcher.join()


def test_an_engine_actor_that_is_killed_is_replaced(ray_session, tiny_llama, tmp_path):
    rows = unique_prompts(20, longest=50)
    with actors_killed(1) as killed:
        report = build_tiny(tiny_llama, rows, tmp_path / "out", shard_bytes=1 << 16)
    assert len(killed) == 1
    assert report.new_shards == report.shards > 3
    build_tiny(tiny_llama, rows, tmp_path / "undisturbed", shard_bytes=1 << 16)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "undisturbed")


def test_an_engine_actor_that_always_dies_ends_the_build(ray_session, tiny_llama, tmp_path):
    with actors_killed(20) as killed, pytest.raises(EngineDied, match=r"an engine's process died again and again"):
        build_tiny(tiny_llama, unique_prompts(20, longest=50), tmp_path / "out")
    assert (
        7 <= len(killed) <= 8
    )  # 2 * max_attempts new starts; Ray also replaces an actor that dies before its first task


def test_a_shard_of_another_dataset_or_a_damaged_one_is_refused_and_restored_once_removed(tiny_llama, out, tmp_path):
    rows = FINISHED_ROWS
    build_tiny(tiny_llama, unique_prompts(5, longest=50, seed=1), tmp_path / "other")
    build_tiny(tiny_llama, rows, tmp_path / "other layer", layers=[1])
    whole, shard = files_of(out), out / "shards/000000.parquet"
    shard.write_bytes(bytes(len(whole["shards/000000.parquet"])))
    with pytest.raises(ValueError, match="is damaged"):  # complete, and every file of its size
        build_tiny(tiny_llama, rows, out)
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
            build_tiny(tiny_llama, rows, out)
        with pytest.raises(ValueError, match=message):
            hsray.read(out)[0]
    shard.unlink()
    build_tiny(tiny_llama, rows, out)
    assert files_of(out) == whole


@pytest.fixture(scope="module")
def finished(ray_session, tiny_llama, tmp_path_factory) -> Path:
    """A finished dataset of `FINISHED_ROWS`, one shard; for tests that change a copy."""
    out = tmp_path_factory.mktemp("finished") / "out"
    assert build_tiny(tiny_llama, FINISHED_ROWS, out).new_shards == 1
    return out


FINISHED_ROWS = unique_prompts(5, longest=50)


@pytest.fixture
def out(finished, tmp_path) -> Path:
    """A copy of the finished dataset."""
    return shutil.copytree(finished, tmp_path / "out")


def test_a_finished_dataset_opens_no_engine(tiny_llama, out):
    whole = files_of(out)
    again = build_tiny(tiny_llama, FINISHED_ROWS, out)
    assert (again.new_shards, again.nbytes) == (0, len(whole["shards/000000.parquet"]))
    assert "no engine was opened" in str(again)
    assert files_of(out) == whole


CHANGES = [
    ({"layers": [1]}, "layers: the dataset has (0,), this build asks for (1,)"),
    ({"dtype": "bfloat16"}, "dtype: the dataset has 'float32', this build asks for 'bfloat16'"),
    ({"dataset": FINISHED_ROWS[:4]}, "prompts_digest: the dataset has"),
    ({"shard_bytes": 1 << 20}, "shard_bytes: the dataset has"),
    ({"max_tokens": 100}, "max_tokens: the dataset has 1024, this build asks for 100"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_resuming_with_something_else_shows_both_sides(tiny_llama, out, change, message):
    before = files_of(out)
    with pytest.raises(ValueError, match=re.escape(message)):
        build_tiny(tiny_llama, **({"dataset": FINISHED_ROWS, "out": out} | change))
    assert files_of(out) == before


BAD_ROWS = [
    ('{"input_ids": [1, 2]}\n{"input_ids": [1,\n', "prompts.jsonl:2: not JSON"),
    ('{"input_ids": [1, 2]}\n{"body": "x"}\n', "prompts.jsonl:2: has the columns of no known shape"),
    ('{"input_ids": []}\n', "prompts.jsonl:1: an empty prompt"),
    ('{"input_ids": [1, 1000]}\n', "prompts.jsonl:1: token id 1000 is outside the model's vocabulary 0..999"),
    (json.dumps({"input_ids": [1] * 1025}) + "\n", "prompts.jsonl:1: 1025 tokens, over max_tokens=1024"),
    ("", "the dataset has no prompt"),
]


@pytest.mark.parametrize(("text", "message"), BAD_ROWS)
def test_a_bad_row_is_named_and_nothing_is_left(ray_session, tiny_llama, tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        build_tiny(tiny_llama, path, tmp_path / "out")
    assert files_of(tmp_path / "out") == {}


def build_tiny(tiny: Path, dataset: Path | list, out: Path | str, **changes: object) -> "hsray.pipeline.BuildReport":
    asked = {"model": str(tiny), "layers": [0], "out": out, "engine": "transformers", "progress": False}
    return hsray.build(dataset, **(asked | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layers": [6]}, ValueError, "layer 6 is out of range: the model has 6 blocks"),
        ({"model": "/nowhere/at/all"}, FileNotFoundError, "'/nowhere/at/all' is no folder here"),
        ({"out": "/proc/hsray"}, OSError, "'/proc/hsray' cannot be written"),
        ({"dataset": "/nowhere/*.jsonl"}, FileNotFoundError, "names no file"),
        ({"max_tokens": 5000}, ValueError, "the model's context is 1024"),
        ({"shard_bytes": 0.5}, ValueError, "shard_bytes=0.5; give a whole number from 1 up"),
        ({"engine": "vllm"}, ValueError, "engine='vllm' is not known; wanted 'sglang' or 'transformers'"),
        ({"engine": "sglang", "engine_args": {"disable_radix_cache": False}}, ValueError, "leave it out"),
        ({"requests_in_flight": 2}, ValueError, "requests_in_flight=2 is for engine='sglang'"),
        ({"requests_in_flight": 5000, "engine": "sglang"}, ValueError, "give 1 up to 1024"),
        ({"prefill_tokens": None}, ValueError, "prefill_tokens=None; leave it out, or give a number"),
        ({"request_timeout_s": "5"}, ValueError, "request_timeout_s='5'; give a number of seconds above 0"),
        ({"compression": "gzip"}, ValueError, "compression='gzip'; wanted 'none' or 'zstd:1' to 'zstd:22'"),
        ({"out": "memory://x"}, ValueError, "out='memory://x' is memory of this process alone"),
    ],
)
def test_a_bad_request_is_one_clear_error(ray_session, tiny_llama, tmp_path, changes, error, message):
    dataset = changes.pop("dataset", [{"input_ids": [1]}])
    out = changes.pop("out", tmp_path / "out")
    with pytest.raises(error, match=re.escape(message)):
        build_tiny(tiny_llama, dataset, out, **changes)
    assert not (tmp_path / "out").exists() or files_of(tmp_path / "out") == {}


def test_a_folder_that_holds_something_else_is_left_alone(ray_session, tiny_llama, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("do not lose")
    with pytest.raises(ValueError, match=r"not empty and holds no manifest\.json \(found thesis\.tex\)"):
        build_tiny(tiny_llama, [{"input_ids": [1]}], tmp_path / "out")
    assert files_of(tmp_path / "out") == {"thesis.tex": b"do not lose"}


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
        build_tiny(tiny_llama, FINISHED_ROWS, out)
    assert list((out / "shards").iterdir()) == []
    assert manifest.state == "complete"


def test_prompts_dropped_by_policy_are_counted_and_listed(ray_session, tiny_llama, tmp_path):
    import pyarrow.parquet as pq

    rows = [{"id": "short", "input_ids": [1] * 5}, {"id": "long", "input_ids": [1] * 50}]
    report = build_tiny(tiny_llama, rows, tmp_path / "out", max_tokens=10, too_long="drop")
    assert (report.prompts, report.dropped) == (1, 1)
    listed = pq.read_table(tmp_path / "out" / "dropped.parquet").to_pylist()
    assert listed == [
        {"source": "dataset[1]", "prompt_id": "long", "num_tokens": 50, "reason": "50 tokens, over max_tokens=10"}
    ]


def test_a_sorted_and_truncated_build_is_resumed_as_it_was(ray_session, tiny_llama, tmp_path):
    rows = unique_prompts(30, longest=60)
    asked = {"sort": "length", "max_tokens": 50, "too_long": "truncate", "shard_bytes": 1 << 14, "duplicates": "drop"}
    asked |= {"dataset": [*rows, {"input_ids": rows[0]["input_ids"]}], "out": tmp_path / "out"}
    first = build_tiny(tiny_llama, **asked)
    num_long = sum(len(row["input_ids"]) > 50 for row in rows)
    assert (first.prompts, first.dropped, first.truncated) == (30, 1, num_long)
    lengths = [len(hsray.read(asked["out"])[index]["input_ids"]) for index in range(30)]
    assert lengths == sorted((min(50, len(row["input_ids"])) for row in rows), reverse=True)
    (tmp_path / "out/shards/000000.parquet").unlink()
    assert build_tiny(tiny_llama, **asked).new_shards == 1
    with pytest.raises(ValueError, match="sort: the dataset has 'length', this build asks for 'input'"):
        build_tiny(tiny_llama, **(asked | {"sort": "input"}))
    with pytest.raises(ValueError, match="prompts_digest: the dataset has"):
        build_tiny(tiny_llama, **(asked | {"dataset": asked["dataset"][::-1]}))


def test_a_cluster_with_gpus_runs_an_engine_on_each(tiny_llama, tmp_path):
    """Ray hands out GPUs that are not there, and the engines compute without: the graph is what is tested."""
    dataset = write_jsonl(tmp_path / "prompts.jsonl", unique_prompts(12, longest=50))
    script = f"""
import ray, hsray
ray.init(num_cpus=3, num_gpus=2, include_dashboard=False, log_to_driver=False)
report = hsray.build({str(dataset)!r}, model={str(tiny_llama)!r}, layers=[0], out={str(tmp_path / "out")!r},
                     engine="transformers", shard_bytes=4096, progress=False)
actors = [actor for actor in ray._private.state.actors().values() if "CaptureWorker" in actor["ActorClassName"]]
print("actors", len(actors), "shards", report.new_shards == report.shards)
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "actors 2 shards True"


def test_an_engine_that_does_not_start_ends_the_build_in_its_own_words(ray_session, tiny_llama, tmp_path):
    with pytest.raises(EngineDied, match=r"^the engine did not start: TypeError: .*'bogus'$"):
        build_tiny(tiny_llama, [{"input_ids": [1]}], tmp_path / "out", engine_args={"bogus": 1})
    # It made nothing, so it binds nobody.
    report = build_tiny(tiny_llama, [{"input_ids": [1]}], tmp_path / "out", max_tokens=np.int64(100))
    assert report.new_shards == 1


def test_states_that_are_not_finite_end_the_build_naming_the_prompt(ray_session, tiny_llama, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "model"
    broken.mkdir()
    for name in ("config.json", "generation_config.json"):
        (broken / name).write_bytes((tiny_llama / name).read_bytes())
    weights = load_file(tiny_llama / "model.safetensors")
    weights["model.embed_tokens.weight"][13] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    rows = [{"id": "good", "input_ids": [1, 2]}, {"id": "bad", "input_ids": [12, 13, 14]}]
    with pytest.raises(
        ValueError, match=r"layer 0 of shard 0 has NaN or infinite numbers in 3 rows of the prompts 'bad'"
    ):
        build_tiny(broken, rows, tmp_path / "out")
    assert not any((tmp_path / "out").glob("shards/*"))
