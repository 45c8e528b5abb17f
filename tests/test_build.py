"""A build, through Ray, takes what is right and says what is wrong in one clear error."""

import json
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

import hsray
from hsray.engine import EngineDied, PromptFailed
from hsray.manifest import ManifestError
from hsray.report import BuildReport
from hsray.rounds import PLAN_READERS
from tests.builds import build_tiny, files_of, unique_prompts

BAD_ROWS = [
    ('{"input_ids": [1, 2]}\n{"input_ids": [1,\n', "prompts.jsonl:2: not JSON"),
    ('{"input_ids": [1, 2]}\n{"body": "x"}\n', "prompts.jsonl:2: has the columns of no known shape"),
    ('{"input_ids": []}\n', "prompts.jsonl:1: an empty prompt"),
    ('{"input_ids": [1, 1000]}\n', "prompts.jsonl:1: token id 1000 is outside the model's vocabulary 0..999"),
    (json.dumps({"input_ids": [1] * 1025}) + "\n", "prompts.jsonl:1: 1025 tokens, over max_tokens=1024"),
    ("", "the dataset has no prompt"),
]

BUILT = {
    "dataset": [*unique_prompts(60, longest=300), {"id": "long", "input_ids": [1] * 301}],
    "layers": [0, 2, "final"],
    "shard_bytes": 1 << 19,
    "dtype": "float32",
    "max_tokens": np.int64(300),
    "too_long": "drop",
}


@pytest.mark.parametrize(("text", "message"), BAD_ROWS)
def test_a_bad_row_is_named_and_nothing_is_left(ray_session, tiny_llama, tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        build_tiny(tiny_llama, path, tmp_path / "out")
    assert files_of(tmp_path / "out") == {}


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
        ({"request_timeout_s": True}, ValueError, "request_timeout_s=True; give a number of seconds above 0"),
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


@pytest.fixture(scope="module")
def built(ray_session, tiny_llama, tmp_path_factory) -> tuple[EngineDied, BuildReport]:
    """Of a build whose engine does not start, its error; and of `BUILT`, in the same folder, the report."""
    out = tmp_path_factory.mktemp("built") / "out"
    with pytest.raises(EngineDied) as failed:
        build_tiny(tiny_llama, [{"input_ids": [1]}], out, engine_args={"bogus": 1})
    return failed.value, build_tiny(tiny_llama, out=out, **BUILT)


def test_an_engine_that_does_not_start_ends_the_build_in_its_own_words_and_binds_nobody(built):
    error, report = built
    assert re.match(r"^the engine did not start: TypeError: .*'bogus'$", str(error))
    assert report.new_shards == report.shards > 1


def test_prompts_dropped_by_policy_are_counted_and_listed(built):
    _, report = built
    assert (report.prompts, report.dropped) == (60, 1)
    listed = pq.read_table(Path(report.out) / "dropped.parquet").to_pylist()
    assert listed == [
        {"source": "dataset[60]", "prompt_id": "long", "num_tokens": 301, "reason": "301 tokens, over max_tokens=300"}
    ]


def test_a_build_makes_what_was_estimated_from_the_config_alone(built, model_without_weights):
    _, report = built
    found = hsray.estimate(model=str(model_without_weights), engine="transformers", **BUILT)
    assert (found.prompts, found.tokens, found.shards, found.dropped) == (60, report.tokens, report.shards, 1)
    assert found.raw_bytes == found.stored_bytes == pytest.approx(report.nbytes, rel=0.02)
    everything = sum(map(len, files_of(Path(report.out)).values()))
    assert found.raw_bytes + found.plan_bytes == pytest.approx(everything, rel=0.02)


def test_the_plan_is_read_by_a_few_processes_however_many_files_it_has(ray_session, tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(hsray.plan, "FILE_SHARDS", 60)
    done, readers = threading.Event(), []

    def watch() -> None:
        while not done.wait(0.1):
            count = 0
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):  # it has ended since
                    count += "_read_plan" in " ".join(process.cmdline())
            readers.append(count)

    watcher = threading.Thread(target=watch)
    watcher.start()
    # So many that a reader has to wait for the engine, and another would be begun meanwhile.
    rows = [{"input_ids": [number]} for number in range(480)]
    try:
        report = build_tiny(tiny_llama, rows, tmp_path / "out", shard_bytes=1)
    finally:
        done.set()
        watcher.join()
    assert (report.new_shards, len([*(tmp_path / "out" / "plan").iterdir()])) == (480, 8)
    assert 1 <= max(readers) <= PLAN_READERS


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
    words = r"layer 0 of shard 0 has NaN or infinite numbers in 3 rows of the prompts 'bad'.*pass on_failure='skip'"
    with pytest.raises(PromptFailed, match=words):
        build_tiny(broken, rows, tmp_path / "out")
    assert not any((tmp_path / "out").glob("shards/*"))


def test_a_shard_that_is_cut_short_meanwhile_is_missed_before_the_dataset_is_complete(
    ray_session, tiny_llama, tmp_path
):
    out, rows = tmp_path / "out", unique_prompts(60, longest=200)
    with ThreadPoolExecutor(1) as thread:
        building = thread.submit(build_tiny, tiny_llama, rows, out, shard_bytes=100_000)
        while not (published := list(out.glob("shards/[0-9]*"))):
            assert not building.done(), building.result()
            time.sleep(0.01)
        os.truncate(published[0], 500)
        with pytest.raises(ManifestError, match=r"is 500 bytes, and was \d+ when it was published"):
            building.result()
    published[0].unlink()
    assert build_tiny(tiny_llama, rows, out, shard_bytes=100_000).new_shards == 1
    assert hsray.check(out, deep=True, progress=False).ok


def test_a_plan_that_is_removed_meanwhile_is_missed_before_the_dataset_is_complete(ray_session, tiny_llama, tmp_path):
    out, rows = tmp_path / "out", unique_prompts(60, longest=200)
    with ThreadPoolExecutor(1) as thread:
        building = thread.submit(build_tiny, tiny_llama, rows, out, shard_bytes=100_000)
        while not any(out.glob("shards/[0-9]*")):
            assert not building.done(), building.result()
            time.sleep(0.01)
        shutil.rmtree(out / "plan")
        with pytest.raises(ManifestError, match="1 of 1 files of the plan were removed during the build"):
            building.result()
    assert json.loads((out / "manifest.json").read_text())["state"] == "building"
