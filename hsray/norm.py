"""A model's own final norm, alone: what turns layer N-1 into ``"final"``.

The module is the model class's own, so that each family's variant (Gemma's 1 + w, GPT-OSS's float32 product) is what its
authors wrote and not guessed; its weight is the one tensor read of the checkpoint.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsray.engine_transformers import auto_model_class, final_norm

if TYPE_CHECKING:
    import torch

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"


class NormError(ValueError):
    """A model's final norm cannot be had."""


def load_final_norm(model: str, *, dtype: str, trust_remote_code: bool = False) -> "torch.nn.Module":
    """Loads the module between the last block and the LM head, on the CPU, its weight in `dtype`.

    Raises:
        NormError: the model's class has no such module, or its checkpoint no (single) weight for it.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        whole = auto_model_class(config).from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
        )
    norm = final_norm(whole.get_decoder())
    [path] = [path for path, module in whole.named_modules() if module is norm]
    weights = {
        name: _read_tensor(model, path, name, tuple(parameter.shape)).to(parameter.dtype)
        for name, parameter in norm.named_parameters()
    }
    norm.load_state_dict(weights, assign=True)
    return norm.eval().requires_grad_(False)


def _read_tensor(model: str, path: str, name: str, shape: tuple[int, ...]) -> "torch.Tensor":
    """The checkpoint's tensor for a parameter of the norm, whose place in the model is `path`."""
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for file in _weight_files(model, f"{path}.{name}"):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (it is no dict)
                if _may_be(key, path, name) and tuple(tensors.get_slice(key).get_shape()) == shape:
                    found[key] = tensors.get_tensor(key)
    if f"{path}.{name}" in found:
        return found[f"{path}.{name}"]
    # A multimodal checkpoint may name its language model otherwise than its class does.
    if len(found) != 1:
        raise NormError(
            f"model {model!r}: its safetensors hold {len(found)} tensors that may be {path}.{name} of shape {list(shape)} "
            f"({', '.join(sorted(found)) or 'none'}); one was wanted"
        )
    return found.popitem()[1]


def _may_be(key: str, path: str, name: str) -> bool:
    """Whether a tensor's name ends as the final norm's does and is no block's."""
    last = f"{path.rsplit('.', 1)[-1]}.{name}"
    return (key == last or key.endswith(f".{last}")) and not any(part.isdecimal() for part in key.split("."))


def _weight_files(model: str, wanted: str) -> list[str]:
    """The files to look into: by the index the one that holds `wanted`, or all that may."""
    from transformers.utils import cached_file

    def find(name: str) -> str | None:
        return cached_file(model, name, _raise_exceptions_for_missing_entries=False)

    index = find(INDEX_NAME)
    if index is None:
        names = [SINGLE_NAME]
    else:
        places = json.loads(Path(index).read_text())["weight_map"]
        path, _, name = wanted.rpartition(".")
        keys = [wanted] if wanted in places else [key for key in places if _may_be(key, path, name)]
        names = sorted({places[key] for key in keys})
    files = [find(name) for name in names]
    if not files or None in files:
        raise NormError(f"model {model!r} has no {INDEX_NAME if index else SINGLE_NAME} that holds {wanted}")
    return files
