"""A model and its tokenizer are read beside the driver, which says the same, and has neither PyTorch nor Transformers after."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hsray.describe import describe

TEMPLATE = "{{ messages[0]['content'] }}"


@pytest.fixture
def elsewhere(monkeypatch) -> None:
    """Has another process read it, as if this one had not loaded Transformers."""
    monkeypatch.delitem(sys.modules, "transformers")


def asked(folder: object, **changes: object) -> dict:
    return {"model": str(folder), "dtype": "auto", "trust_remote_code": False, "chat_template": None} | changes


@pytest.mark.parametrize("changes", [{}, {"dtype": "float16"}, {"chat_template": TEMPLATE}])
def test_another_process_finds_what_this_one_does(demo_model, monkeypatch, changes):
    here = describe(**asked(demo_model, **changes))
    assert here.has_tokenizer
    assert here.chat_template == TEMPLATE or not changes.get("chat_template")
    monkeypatch.delitem(sys.modules, "transformers")
    assert describe(**asked(demo_model, **changes)) == here


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "half", "float"])
def test_a_config_is_the_same_with_pytorch_and_without(tiny_gemma, tmp_path, monkeypatch, dtype):
    folder = shutil.copytree(tiny_gemma, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    here = describe(**asked(folder))
    assert here.model.dtype == {"half": "float16", "float": "float32"}.get(dtype, dtype)
    monkeypatch.delitem(sys.modules, "transformers")
    assert describe(**asked(folder)) == here


def test_a_model_without_a_tokenizer_has_none_there_either(tiny_llama, elsewhere):
    found = describe(**asked(tiny_llama))
    assert (found.has_tokenizer, found.tokenizer_digest, found.chat_template) == (False, "no tokenizer", "")


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model": "/nowhere/at-all"}, FileNotFoundError, "is no folder here"),
        ({"dtype": "int7"}, ValueError, "dtype 'int7' of model"),
    ],
)
def test_an_error_of_the_other_process_is_raised_as_itself(tiny_llama, elsewhere, changes, kind, message):
    with pytest.raises(kind, match=message):
        describe(**asked(tiny_llama, **changes))


def test_what_a_librarys_own_error_is_among_pythons_is_raised(tiny_llama, tmp_path, elsewhere):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(OSError, match="config.json"):
        describe(**asked(tmp_path))


def test_an_error_that_cannot_be_made_of_words_is_what_it_is_a_kind_of(demo_model, tmp_path, elsewhere):
    folder = shutil.copytree(demo_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="can't decode byte 0xff"):
        describe(**asked(folder))


def test_what_lies_in_the_current_folder_is_not_imported(tiny_llama, tmp_path, elsewhere, monkeypatch):
    for name in ("random", "transformers", "hsray"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), str(Path(__file__).parents[1])])
    assert not describe(**asked(tiny_llama)).has_tokenizer


def test_a_driver_that_plans_loads_neither_pytorch_nor_transformers(tiny_llama, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3]}))
    script = "import sys, hsray; hsray.estimate(sys.argv[1], model=sys.argv[2], layers=[0]); "
    script += "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    command = [sys.executable, "-c", script, str(tmp_path / "prompts.jsonl"), str(tiny_llama)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stderr
