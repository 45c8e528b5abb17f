"""The chaos command, in short: what is killed at random leaves the files of a build that nothing happened to."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = str(Path(__file__).parents[1] / "pipelines/chaos.py")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """Enough for some seconds."""
    chosen, path = random.Random(0), tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": f"p{n}", "input_ids": [chosen.randrange(900) for _ in range(400)]} for n in range(400)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("kinds", "kills"), [(["node"], 1), (["actor", "driver", "hang"], 2)], ids=str)
def test_a_build_that_was_killed_again_and_again_has_the_files_of_one_that_was_not(
    tiny_llama, prompts, tmp_path, kinds, kills
):
    asked = f"--model {tiny_llama} --dataset {prompts} --layers 0 final --runs 1 --kills {kills} --request-timeout-s 3"
    command = [sys.executable, CHAOS, *asked.split(), "--kinds", *kinds, "--json", str(tmp_path / "runs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert len(runs[-1]["kills"]) == kills
    # A node's loss is no shard's fault, though Ray counts it as several attempts at each, and no other actor's.
    wanted = {"identical": True} | dict.fromkeys(("lost", "doubled", "set_aside", "cut_short", "hung"), 0)
    assert [{name: run[name] for name in wanted} for run in runs] == [wanted] * len(runs)
