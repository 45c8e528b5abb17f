"""What a build is asked for, checked before anything starts."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsray.chat import ChatOptions, check_template_kwargs
from hsray.describe import describe
from hsray.engine import MAX_REQUESTS_IN_FLIGHT, EngineName, check_engine_args
from hsray.float8 import FLOAT8
from hsray.layers import LayersSpec, resolve_layers
from hsray.manifest import Identity
from hsray.model import STORED_BYTES, ModelDescription
from hsray.plan import PlanOptions
from hsray.prompts import PromptOptions
from hsray.shapes import check_columns
from hsray.shard import codec

#: What each keyword of a choice may be.
CHOICES = {
    "train_on": ("all", "last"),
    "rewritten_history": ("error", "split"),
    "untrained": ("error", "drop", "keep"),
    "too_long": ("error", "drop", "truncate"),
    "duplicates": ("keep", "drop"),
    "sort": ("input", "length"),
    "on_failure": ("stop", "skip"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A build's keywords, settled."""

    identity: Identity
    """Without the digests of its prompts and its plan."""
    model: ModelDescription
    prompts: PromptOptions
    engines: int | tuple[int, int] | None
    max_attempts: int
    on_failure: str
    request_timeout_s: float

    @property
    def bytes_per_token(self) -> int:
        """Of one token's states, all layers."""
        return len(self.identity.layers) * self.value_bytes_per_token

    @property
    def value_bytes_per_token(self) -> int:
        """Of one token's state of one layer."""
        scale_bytes = 4 * (self.identity.stored_dtype == FLOAT8)
        return self.identity.hidden_size * STORED_BYTES[self.identity.stored_dtype] + scale_bytes

    @property
    def plan_options(self) -> PlanOptions:
        """How its prompts are cut into shards."""
        return PlanOptions(
            bytes_per_token=self.bytes_per_token,
            value_bytes_per_token=self.value_bytes_per_token,
            shard_bytes=self.identity.shard_bytes,
            duplicates=self.identity.prompt_options["duplicates"],
        )


def settle(
    *,
    model: str,
    layers: LayersSpec,
    engine: EngineName,
    engine_args: Mapping[str, Any] | None,
    tensor_parallel: int,
    engines: int | tuple[int, int] | None,
    requests_in_flight: int,
    prefill_tokens: int,
    dtype: str,
    columns: Mapping[str, str] | None,
    chat_template: str | Path | None,
    template_kwargs: Mapping[str, Any] | None,
    train_on: str,
    rewritten_history: str,
    untrained: str,
    max_tokens: int | None,
    too_long: str,
    duplicates: str,
    sort: str,
    shard_bytes: int,
    file_format: str,
    compression: str,
    request_timeout_s: float,
    max_attempts: int,
    on_failure: str,
    trust_remote_code: bool,
) -> Request:
    """Checks the keywords of `hsray.build`, reading the model's config and tokenizer, and no weights.

    Raises:
        ValueError: a keyword is not what it may be; it is named, with what it may be.
        FileNotFoundError: the model, or the chat template's file, is not there.
    """
    chosen = {
        "train_on": train_on,
        "rewritten_history": rewritten_history,
        "untrained": untrained,
        "too_long": too_long,
        "duplicates": duplicates,
        "sort": sort,
        "on_failure": on_failure,
    }
    for name, value in chosen.items():
        if value not in CHOICES[name]:
            raise ValueError(f"{name}={value!r}; wanted {' or '.join(map(repr, CHOICES[name]))}")
    del chosen["on_failure"]  # a dataset is the same one, whatever would have become of a prompt that failed
    check_engine_args(engine, engine_args or {})
    codec(compression, file_format)
    requests_in_flight = _count("requests_in_flight", requests_in_flight)
    prefill_tokens = _count("prefill_tokens", prefill_tokens)
    is_number = isinstance(request_timeout_s, int | float) and not isinstance(request_timeout_s, bool)
    if not is_number or not request_timeout_s > 0:
        raise ValueError(f"request_timeout_s={request_timeout_s!r}; give a number of seconds above 0")
    if requests_in_flight > MAX_REQUESTS_IN_FLIGHT:
        raise ValueError(f"requests_in_flight={requests_in_flight}; give 1 up to {MAX_REQUESTS_IN_FLIGHT}")
    engines = _engines(engines)
    max_attempts = _count("max_attempts", max_attempts)
    tensor_parallel = _count("tensor_parallel", tensor_parallel)
    for name, value in (("tensor_parallel", tensor_parallel), ("requests_in_flight", requests_in_flight)):
        if engine == "transformers" and value != 1:
            raise ValueError(f"{name}={value} is for engine='sglang'; engine='transformers' takes one GPU, one prompt")
    shard_bytes = _count("shard_bytes", shard_bytes)
    columns, template_kwargs = dict(columns or {}), dict(template_kwargs or {})
    check_columns(columns)
    template = None if chat_template is None else _read_template(chat_template)
    found = describe(
        model,
        dtype="auto" if dtype == FLOAT8 else dtype,
        trust_remote_code=trust_remote_code,
        chat_template=template,
    )
    description = found.model
    max_tokens = description.max_tokens if max_tokens is None else _count("max_tokens", max_tokens)
    if max_tokens > description.max_tokens:
        raise ValueError(f"max_tokens={max_tokens}; the model's context is {description.max_tokens}: give 1 up to that")
    prompts = PromptOptions(
        model=description.model,
        trust_remote_code=trust_remote_code,
        chat_template=template,
        columns=columns,
        chat=ChatOptions(template_kwargs=template_kwargs, train_on=train_on, rewritten_history=rewritten_history),
        vocab_size=description.vocab_size,
        max_tokens=max_tokens,
        too_long=too_long,
        untrained=untrained,
        sort=sort,
    )
    if not found.has_tokenizer and chat_template is not None:
        raise ValueError(f"chat_template={str(chat_template)!r}: the model's folder has no tokenizer; leave it out")
    check_template_kwargs(found.chat_template, template_kwargs)
    identity = Identity(
        model=description.model,
        config_digest=description.config_digest,
        weights_digest=description.weights_digest,
        tokenizer_digest=found.tokenizer_digest,
        num_layers=description.num_layers,
        hidden_size=description.hidden_size,
        layers=resolve_layers(layers, num_layers=description.num_layers),
        dtype=description.dtype,
        stored_dtype=FLOAT8 if dtype == FLOAT8 else description.dtype,
        engine=engine,
        engine_args=dict(engine_args or {}),
        tensor_parallel=tensor_parallel,
        requests_in_flight=requests_in_flight,
        prefill_tokens=prefill_tokens,
        shard_bytes=shard_bytes,
        file_format=file_format,
        compression=compression,
        max_tokens=max_tokens,
        too_long=chosen.pop("too_long"),
        prompt_options={"columns": columns, "template_kwargs": template_kwargs, **chosen},
        prompts_digest=None,
        plan_digest=None,
    )
    return Request(
        identity=identity,
        model=description,
        prompts=prompts,
        engines=engines,
        max_attempts=max_attempts,
        on_failure=on_failure,
        request_timeout_s=request_timeout_s,
    )


def _read_template(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise FileNotFoundError(
            f"chat_template={str(path)!r} cannot be read ({error}); give a file with a Jinja template"
        ) from error


def _engines(value: Any) -> int | tuple[int, int] | None:
    """How many engines, or between how many."""
    if value is None:
        return None
    if isinstance(value, tuple | list):
        counts = tuple(_count("engines", number) for number in value)
        if len(counts) != 2 or counts[0] > counts[1]:
            raise ValueError(f"engines={value!r}; give a number, or the fewest and the most, as in (2, 16)")
        return counts
    return _count("engines", value)


def _count(name: str, value: Any) -> int:
    """A keyword that counts, as an int (numpy's are taken too)."""
    if value is None:
        raise ValueError(f"{name}=None; leave it out, or give a number")
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 1:
        raise ValueError(f"{name}={value!r}; give a whole number from 1 up")
    return operator.index(value)
