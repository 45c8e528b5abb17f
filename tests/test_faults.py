"""Whatever dies, hangs or refuses: nothing is lost or doubled, and a prompt that is to blame is named, or left out and listed."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import hsray
from hsray.engine import EngineDied, PromptFailed, open_engine
from hsray.events import NAME as EVENTS_NAME
from hsray.flags import parse_engines
from hsray.manifest import load_manifest
from hsray.raydata import blocks_of
from hsray.store import Store
from tests.builds import files_of
from tests.processes import schedulers
from tests.reference import options_for

#: What becomes of a model that meets one of these tokens.
EXITS, HANGS, RAISES, NOT_FINITE, FREEZES, LEAKS, BREAKS = range(901, 908)

#: What a build that stops at a prompt says last.
ADVICE = "; pass on_failure='skip', or take it out of the dataset, which is then another and needs another out"

#: A model that is loaded with this in its environment dies of it.
DIES_AT_START = "HSRAY_TEST_DIES_AT_START"

MODELING = f"""
import ctypes, os, time
import numpy as np
from transformers import LlamaForCausalLM

leaked = []
broken = False

class PoisonedLlama(LlamaForCausalLM):
    def __init__(self, config):
        if "{DIES_AT_START}" in os.environ:
            with open(os.environ["{DIES_AT_START}"], "a") as deaths:
                deaths.write("dead\\n")
            os._exit(1)
        super().__init__(config)

    def get_decoder(self):
        self.model.register_forward_pre_hook(poison, with_kwargs=True)
        return self.model

def poison(module, args, kwargs):
    global broken
    ids = kwargs["input_ids"]
    broken = broken or bool((ids == {BREAKS}).any())
    if broken:  # as an accelerator is
        raise RuntimeError("CUDA error: device-side assert triggered")
    if (ids == {EXITS}).any():
        os._exit(1)
    if (ids == {HANGS}).any():
        time.sleep(3600)
    if (ids == {FREEZES}).any():
        ctypes.PyDLL(None).sleep(3600)  # with Python's lock: no thread of the process runs
    if (ids == {LEAKS}).any():
        leaked.append(np.ones(1 << 26))  # 512 MiB
    if (ids == {RAISES}).any():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if (ids == {NOT_FINITE}).any():
        module.embed_tokens.weight.data[{NOT_FINITE}] = float("nan")
"""


@pytest.fixture(scope="module")
def poisoned(tiny_llama, tmp_path_factory) -> Path:
    """The tiny Llama, with code of its own that some tokens make die, hang, raise or compute no number."""
    folder = shutil.copytree(tiny_llama, tmp_path_factory.mktemp("poisoned") / "model")
    (folder / "modeling_poisoned.py").write_text(MODELING)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_poisoned.PoisonedLlama"}
    config["architectures"] = ["PoisonedLlama"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompts_with(**poison: int) -> list[dict]:
    """Twelve prompts, two to a shard, some with a token of poison in them."""
    rows = [{"id": f"p{number}", "input_ids": list(range(number, number + 10))} for number in range(12)]
    for name, token in poison.items():
        rows[int(name[1:])]["input_ids"][5] = token
    return rows


def asked_of(model: Path, out: Path, **changes: object) -> dict[str, object]:
    asked = {"model": str(model), "layers": [0, "final"], "out": out, "engine": "transformers", "progress": False}
    return asked | {"trust_remote_code": True, "shard_bytes": 20 * 2 * 128 * 4, "max_attempts": 1} | changes


def build(model: Path, rows: list[dict], out: Path, **changes: object) -> "hsray.report.BuildReport":
    return hsray.build(rows, **asked_of(model, out, **changes))


def assert_holds(out: Path, rows: list[dict], model: Path) -> None:
    """That a dataset has these prompts, in order, and of each what an engine computes that nothing has happened to."""
    dataset = hsray.read(out)
    assert [prompt["prompt_id"] for prompt in dataset] == [row["id"] for row in rows]
    with open_engine("transformers", options_for(model, trust_remote_code=True)) as healthy:
        for index, row in enumerate(rows):
            alone = healthy.capture_alone(row["input_ids"])
            for layer in (0, "final"):
                assert torch.equal(dataset[index]["hidden_states"][layer], alone[layer])
    assert hsray.check(out, deep=True, progress=False).ok


def test_prompts_that_fail_are_left_out_and_listed_and_the_others_are_kept(ray_session, poisoned, tmp_path):
    rows = prompts_with(p3=EXITS, p4=RAISES, p5=NOT_FINITE, p8=RAISES)
    report = build(poisoned, rows, tmp_path / "out", on_failure="skip")
    assert (report.prompts, report.tokens, report.dropped, report.shards) == (8, 80, 4, 6)
    listed = pq.read_table(tmp_path / "out/dropped.parquet").to_pylist()
    assert [(row["source"], row["prompt_id"], row["num_tokens"]) for row in listed] == [
        ("shards/000001.parquet", "p3", 10),
        ("shards/000002.parquet", "p4", 10),
        ("shards/000002.parquet", "p5", 10),
        ("shards/000004.parquet", "p8", 10),
    ]
    died, refused, not_finite, _ = (row["reason"] for row in listed)
    assert "process died 1 time while it was there, without a word" in died
    assert "CUDA error: an illegal memory access" in refused
    assert "NaN or infinite numbers" in not_finite
    events = [json.loads(line) for line in (tmp_path / "out" / EVENTS_NAME).read_text().splitlines()]
    assert [event["event"] for event in events[:1] + events[-1:]] == ["build", "end"]
    assert sorted(event["shard"] for event in events if event["event"] == "receipt") == list(range(6))
    assert [event["prompt_id"] for event in events if event["event"] == "drop"] == ["p3", "p4", "p5", "p8"]
    assert any(event["event"] == "retry" and event["shard"] == 1 and event["attempt"] == 1 for event in events)
    assert report.retries == sum(event["attempt"] for event in events if event["event"] == "retry")
    assert f"engines' deaths ended {report.retries} attempts at shards" in str(report)
    assert_holds(tmp_path / "out", [row for row in rows if row["id"] not in ("p3", "p4", "p5", "p8")], poisoned)
    whole = files_of(tmp_path / "out")
    (tmp_path / "out/shards/000001.parquet").unlink()
    (tmp_path / "out/shards/000002.parquet").unlink()  # the one that holds nothing
    manifest = load_manifest(Store(tmp_path / "out"))
    manifest.reopened().save(Store(tmp_path / "out"))
    assert build(poisoned, rows, tmp_path / "out", on_failure="skip").new_shards == 2  # what was left out stays so
    assert files_of(tmp_path / "out") == whole


def test_a_prompt_after_which_its_process_can_compute_none_takes_no_other_with_it(ray_session, poisoned, tmp_path):
    rows = prompts_with(p2=BREAKS, p7=BREAKS)
    report = build(poisoned, rows, tmp_path / "out", on_failure="skip", engines=1)
    assert (report.prompts, report.dropped) == (10, 2)
    listed = pq.read_table(tmp_path / "out/dropped.parquet").to_pylist()
    assert [row["prompt_id"] for row in listed] == ["p2", "p7"]
    assert all("device-side assert triggered (and since then" in row["reason"] for row in listed)
    assert_holds(tmp_path / "out", [row for row in rows if row["id"] not in ("p2", "p7")], poisoned)


def test_an_engine_that_dies_of_everything_is_not_tried_with_every_shard(ray_session, poisoned, tmp_path):
    rows = prompts_with(**{f"p{number}": EXITS for number in range(12)})
    with pytest.raises(
        PromptFailed, match=r"prompt 'p\d+' of shard \d, 10 tokens: the engine's process died 1 time while"
    ):
        build(poisoned, rows, tmp_path / "out")
    events = [json.loads(line) for line in (tmp_path / "out" / EVENTS_NAME).read_text().splitlines()]
    assert sum(event["event"] == "failed" for event in events) == 3  # of 6


def test_shards_whose_failures_are_lost_with_their_actor_are_looked_at_all_the_same(
    ray_session, poisoned, tmp_path, monkeypatch
):
    rounds = []

    def losing(dataset: object) -> Iterator[pa.Table]:
        """Loses what the first round's actors say; Ray does so with the last blocks before an error."""
        rounds.append(dataset)
        for block in blocks_of(dataset):
            if len(rounds) > 1:
                yield block

    monkeypatch.setattr("hsray.rounds.blocks_of", losing)
    rows = prompts_with(**{f"p{number}": EXITS for number in range(12)})
    with pytest.raises(
        PromptFailed, match=r"prompt 'p\d+' of shard \d, 10 tokens: the engine's process died 1 time while"
    ):
        build(poisoned, rows, tmp_path / "out")
    events = [json.loads(line)["event"] for line in (tmp_path / "out" / EVENTS_NAME).read_text().splitlines()]
    assert events.count("lost") == 1 and events.count("failed") == 3


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (RAISES, r"prompt 'p7' of shard 3: RuntimeError: CUDA error: an illegal memory access was encountered"),
        (NOT_FINITE, r"layer \S+ of shard 3 has NaN or infinite numbers in 10 rows of the prompts 'p7'; .*"),
    ],
)
def test_a_prompt_whose_states_cannot_be_had_is_named_with_the_way_out(ray_session, poisoned, tmp_path, token, words):
    with pytest.raises(PromptFailed, match=words + re.escape(ADVICE)):
        build(poisoned, prompts_with(p7=token), tmp_path / "out")


def test_a_prompt_that_hangs_its_engine_is_named_in_the_engines_words(ray_session, poisoned, tmp_path):
    words = "prompt 'p7' of shard 3, 10 tokens: the engine gave no answer within request_timeout_s=2 and was killed"
    with pytest.raises(PromptFailed, match=re.escape(words + ADVICE)):
        build(poisoned, prompts_with(p7=HANGS), tmp_path / "out", request_timeout_s=2)
    assert load_manifest(Store(tmp_path / "out")).skipped == ()
    assert not (tmp_path / "out/lease.json").exists()


def test_a_prompt_that_makes_the_whole_process_stand_still_is_left_out_and_the_others_are_kept(
    ray_session, poisoned, tmp_path
):
    rows = prompts_with(p7=FREEZES)
    report = build(poisoned, rows, tmp_path / "out", request_timeout_s=2, on_failure="skip")
    assert (report.prompts, report.dropped) == (11, 1)
    [listed] = pq.read_table(tmp_path / "out/dropped.parquet").to_pylist()
    assert (listed["source"], listed["prompt_id"]) == ("shards/000003.parquet", "p7")
    assert "it stood still for request_timeout_s" in listed["reason"]
    assert hsray.check(tmp_path / "out", deep=True, progress=False).ok


STARTING = """
import json, sys
import ray, hsray

ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
hsray.build(**json.loads(sys.argv[1]))
"""


def test_an_engine_whose_process_dies_at_its_start_is_tried_so_often_and_no_more(poisoned, tmp_path):
    asked = asked_of(poisoned, tmp_path / "out", max_attempts=2)
    command = [sys.executable, "-c", STARTING, json.dumps({"dataset": prompts_with(), **asked}, default=str)]
    environment = {**os.environ, DIES_AT_START: str(tmp_path / "deaths")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 1
    words = "the engine did not start: EngineDied: the engine's process died 2 times while it started, without a word"
    assert words in done.stderr
    assert (tmp_path / "deaths").read_text() == "dead\n" * 2


def kill_schedulers(stop: threading.Event, most: int, killed: list[int]) -> None:
    """Kills up to so many of SGLang's schedulers, each as soon as it is there, which is before it has loaded its model."""
    while len(killed) < most and not stop.wait(0.01):
        for process in schedulers(except_for=killed):
            with suppress(psutil.NoSuchProcess):
                process.kill()
                killed.append(process.pid)


@pytest.fixture
def killed(request) -> Iterator[list[int]]:
    """The schedulers that were killed at their start; `request.param` says how many may be."""
    stop, killed = threading.Event(), []
    killer = threading.Thread(target=kill_schedulers, args=(stop, request.param, killed))
    killer.start()
    yield killed
    stop.set()
    killer.join()


@pytest.mark.parametrize("killed", [1], indirect=True)
def test_an_engine_whose_own_process_is_killed_at_its_start_is_started_again(ray_session, tiny_llama, tmp_path, killed):
    report = build(tiny_llama, prompts_with(), tmp_path / "out", engine="sglang", max_attempts=2)
    assert len(killed) == 1 and (report.new_shards, report.dropped) == (6, 0)
    assert hsray.check(tmp_path / "out", deep=True, progress=False).ok


@pytest.mark.parametrize("killed", [99], indirect=True)
def test_one_that_is_killed_at_each_start_ends_the_build_in_its_words(ray_session, tiny_llama, tmp_path, killed):
    words = r"the engine did not start: EngineDied: SGLang .* did not start on .*: Rank 0 scheduler died .*-9"
    with pytest.raises(EngineDied, match=words):
        build(tiny_llama, prompts_with(), tmp_path / "out", engine="sglang", max_attempts=2)
    assert len(killed) == 2


LIMITED = """
import json, sys
import psutil, ray, hsray

memory = psutil.virtual_memory()
limit = {"memory_usage_threshold": (memory.total - memory.available + (3 << 30)) / memory.total, "memory_monitor_refresh_ms": 50}
ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", _system_config=limit)
report = hsray.build(**json.loads(sys.argv[1]))
print(report.shards, report.dropped)
"""


@pytest.mark.alone  # the machine's memory is what Ray looks at
def test_an_engine_that_leaks_memory_is_ended_and_its_shards_are_made_by_others(poisoned, tmp_path):
    """Eight prompts leak 4 GiB, where Ray, which ends what takes too much, allows 3 with the engine."""
    rows = prompts_with(**{f"p{number}": LEAKS for number in range(8)})
    asked = asked_of(poisoned, tmp_path / "out", max_attempts=3, on_failure="stop")
    command = [sys.executable, "-c", LIMITED, json.dumps({"dataset": rows, **asked}, default=str)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, "6 0" in done.stdout.splitlines()) == (0, True), done.stderr
    events = [json.loads(line) for line in (tmp_path / "out" / EVENTS_NAME).read_text().splitlines()]
    assert any(event["event"] in ("retry", "lost") for event in events)
    assert_holds(tmp_path / "out", rows, poisoned)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engines": (3, 2)}, "engines=(3, 2); give a number, or the fewest and the most, as in (2, 16)"),
        ({"engines": (1, 2, 3)}, "engines=(1, 2, 3); give a number, or the fewest and the most"),
        ({"engines": (0, 2)}, "engines=0; give a whole number from 1 up"),
        ({"max_attempts": True}, "max_attempts=True; give a whole number from 1 up"),
        ({"max_attempts": 0}, "max_attempts=0; give a whole number from 1 up"),
        ({"on_failure": "ignore"}, "on_failure='ignore'; wanted 'stop' or 'skip'"),
    ],
)
def test_what_cannot_be_asked_for_is_one_clear_error(tiny_llama, tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(tiny_llama, prompts_with(), tmp_path / "out", **changes)


@pytest.mark.parametrize(("text", "engines"), [("4", 4), ("2:16", (2, 16)), (" 1:1 ", (1, 1))])
def test_a_number_of_engines_is_read_or_a_range_of_them(text, engines):
    assert parse_engines(text) == engines


@pytest.mark.parametrize("text", ["", "2:", ":2", "1-2", "-1", "two"])
def test_what_is_no_number_of_engines_is_an_error_that_shows_it(text):
    with pytest.raises(
        argparse.ArgumentTypeError, match=f"{text!r} is no number of engines; write for example 4, or 2:16"
    ):
        parse_engines(text)
