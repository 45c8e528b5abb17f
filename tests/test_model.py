"""A model's description tells checkpoints apart without reading them whole."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hsray.model import describe_model


def weights_digest(folder: Path) -> str:
    return describe_model(str(folder)).weights_digest


def test_an_edit_of_any_tensor_is_another_checkpoint(tiny_llama, tmp_path):
    digests = {"as it was": weights_digest(tiny_llama)}
    weights = load_file(tiny_llama / "model.safetensors")
    for name in weights:
        edited = shutil.copytree(tiny_llama, tmp_path / name)
        changed = {key: value + 1 if key == name else value for key, value in weights.items()}
        save_file(changed, edited / "model.safetensors", metadata={"format": "pt"})
        digests[name] = weights_digest(edited)
    assert len(digests) > 50
    assert len(set(digests.values())) == len(digests)


def test_where_a_checkpoint_lies_does_not_matter(tiny_llama, tmp_path):
    moved = shutil.copytree(tiny_llama, tmp_path / "elsewhere")
    assert weights_digest(moved) == weights_digest(tiny_llama)


def test_any_part_of_a_file_of_another_kind_counts(tiny_llama, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(tiny_llama / "config.json", folder)
    data = bytes(1 << 20)
    (folder / "model.gguf").write_bytes(data)
    before = weights_digest(folder)
    (folder / "model.gguf").write_bytes(data[: 3 << 18] + b"\1" * 8192 + data[(3 << 18) + 8192 :])
    assert weights_digest(folder) != before


@pytest.mark.parametrize("kept_bytes", [4, 100])
def test_half_a_safetensors_file_is_an_error_that_names_it(tiny_llama, tmp_path, kept_bytes):
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ValueError, match=r"model\.safetensors is no whole safetensors file"):
        describe_model(str(folder))
