"""What must be known of a model before its weights are loaded: depth, width, context, vocabulary, identity."""

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

#: The dtypes a state can be computed in, and the bytes of one number; and those that it can be stored in.
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
STORED_BYTES = {**DTYPE_BYTES, "float8_e4m3": 1}

DTYPE_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}

#: How a weight file is sampled for its digest.
SAMPLE_BYTES = 4096
SAMPLES = 256

#: Any of these says that a model's folder holds a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model", "vocab.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model as its config describes it."""

    model: str
    """A local folder or a hub name."""
    architecture: str
    num_layers: int
    """Decoder blocks, N."""
    hidden_size: int
    """Numbers in one token's state, D."""
    vocab_size: int
    """Rows of the embedding: token ids lie in 0..vocab_size-1."""
    max_tokens: int
    """The longest prompt that the model's positions cover."""
    dtype: str
    """The dtype that the engine computes in."""
    config_digest: str
    """SHA-256 of the config."""
    weights_digest: str
    """What tells two checkpoints of one config apart; see `_weights_digest`."""


def describe_model(model: str, *, dtype: str = "auto", trust_remote_code: bool = False) -> ModelDescription:
    """Reads a model's config; for a multimodal checkpoint, its language model's.

    Raises:
        FileNotFoundError: `model` is neither a folder with a config.json nor a name that a reachable hub knows.
        ValueError: the config lacks what is needed, or `dtype` is not one of `DTYPE_BYTES` or ``"auto"``.
    """
    config = _load_config(model, trust_remote_code)
    text = config.get_text_config()
    sizes = {name: getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size")}
    for name, value in sizes.items():
        if not isinstance(value, int):
            raise ValueError(f"model {model!r}: its config has no {name}; a decoder-only language model is needed")
    return ModelDescription(
        model=str(model),
        architecture=(config.architectures or [type(config).__name__])[0],
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        vocab_size=sizes["vocab_size"],
        max_tokens=getattr(text, "max_position_embeddings", None) or 2**31 - 1,
        dtype=_resolve_dtype(model, dtype, config, text),
        config_digest=_config_digest(config),
        weights_digest=_weights_digest(model, config),
    )


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase | None":
    """Loads a model's own tokenizer; None for a folder that has none, which serves rows of ``input_ids`` alone."""
    folder = Path(model)
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # takes seconds, which rows of ``input_ids`` alone need not wait for

    return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """SHA-256 of all that decides which ids a text or a conversation becomes: vocabulary, rules, chat template."""
    if tokenizer is None:
        return "no tokenizer"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _sha256_json([rules, special, tokenizer.chat_template])


def _load_config(model: str, trust_remote_code: bool) -> "PretrainedConfig":
    from transformers import AutoConfig

    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise FileNotFoundError(f"model {model!r} is a folder without a config.json; name a saved Transformers model")
    load = functools.partial(AutoConfig.from_pretrained, model, trust_remote_code=trust_remote_code)
    try:
        return load()
    except (OSError, ValueError) as error:
        if path.is_dir():
            if _register_configs_of_sglang():
                return load()
            raise
        raise FileNotFoundError(
            f"model {model!r} is no folder here, and no hub that can be reached knows it; "
            f"give a local folder or a hub name ({str(error).splitlines()[0]})"
        ) from error


def _register_configs_of_sglang() -> bool:
    """SGLang knows models that this Transformers does not, such as Kimi-K2.5; False where it is not installed."""
    try:
        import sglang.srt.utils.hf_transformers.common  # noqa: F401 (importing it registers them)
    except ImportError:
        return False
    return True


def _resolve_dtype(model: str, dtype: str, config: "PretrainedConfig", text: "PretrainedConfig") -> str:
    if dtype == "auto":
        stored = getattr(text, "dtype", None) or getattr(config, "dtype", None) or "bfloat16"
        dtype = _dtype_name(stored)
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} of model {model!r} is not one of {', '.join(DTYPE_BYTES)}; pass dtype=")
    return dtype


def _config_digest(config: "PretrainedConfig") -> str:
    # Where the model lies and which Transformers wrote or read it do not change what it computes.
    fields = config.to_dict()
    for name in ("_name_or_path", "transformers_version", "_commit_hash"):
        fields.pop(name, None)
    return _sha256_json(_with_dtype_names(fields))


def _dtype_name(dtype: Any) -> str:
    """PyTorch's own name of a dtype, for which a config may say another; Transformers has it only if PyTorch is there."""
    name = str(dtype).removeprefix("torch.")
    return DTYPE_ALIASES.get(name, name)


def _with_dtype_names(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_with_dtype_names(item) for item in value]
    if not isinstance(value, dict):
        return value
    names = {"dtype", "torch_dtype"}
    return {
        key: _dtype_name(item) if key in names and isinstance(item, str) else _with_dtype_names(item)
        for key, item in value.items()
    }


def _weights_digest(model: str, config: "PretrainedConfig") -> str:
    """The commit of a hub model; of a folder, each weight file's name, length and sampled blocks.

    Fine-tunes of one model share its config, so the config's digest alone would let one resume the other's dataset.
    Whole files are not read, since a checkpoint of a terabyte would take minutes each time: a safetensors file is sampled
    in the middle of each of its tensors, any other file at `SAMPLES` places.
    """
    folder = Path(model)
    if not folder.is_dir():
        return f"commit:{getattr(config, '_commit_hash', None)}"
    digest = hashlib.sha256()
    files = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".gguf")]
    for path in sorted(files):
        num_bytes = path.stat().st_size
        digest.update(f"{path.name}:{num_bytes}:".encode())
        with path.open("rb") as file:
            for offset in _sample_offsets(path, num_bytes):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return f"sampled-sha256:{digest.hexdigest()}"


def _sample_offsets(path: Path, num_bytes: int) -> list[int]:
    last = max(0, num_bytes - SAMPLE_BYTES)
    if path.suffix != ".safetensors":
        return [last * step // (SAMPLES - 1) for step in range(SAMPLES)]
    # https://huggingface.co/docs/safetensors: eight bytes of header length, the header as JSON, then the tensors' bytes.
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > num_bytes - 8 or not header_bytes:
            raise ValueError(f"{path} is no whole safetensors file: a header of {header_bytes} bytes in {num_bytes}")
        header = json.loads(file.read(header_bytes))
    ranges = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
    middles = [8 + header_bytes + (start + end - SAMPLE_BYTES) // 2 for start, end in ranges]
    return [8, last, *(min(max(0, middle), last) for middle in sorted(middles))]


def _sha256_json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
