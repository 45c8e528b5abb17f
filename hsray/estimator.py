"""What a build will make and cost, and what its prompts look like, before a GPU is touched: no weights are read.

The prompts go the whole way of a build's, through the same code, up to the plan, which is made and not written.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from hsray.describe import load_chat_tokenizer
from hsray.engine import EngineOptions
from hsray.pipeline import build, make_plan
from hsray.plan import FILE_TOKENS, Plan
from hsray.prompts import tokenize_rows
from hsray.raydata import blocks_of, ray_data
from hsray.request import Request, settle
from hsray.rounds import GPU_WRITERS
from hsray.shard import ROW_GROUP_BYTES
from hsray.sources import PromptError, read_rows

if TYPE_CHECKING:
    from rich.text import Text

#: Bytes of a token in the plan, and in a shard beside its states: its id and a bit of the mask, with Parquet's levels.
TOKEN_BYTES = 4.14

#: Parquet's own bytes in a shard: for each row, row group and file, and for each layer's column of those. Fitted to files
#: of 1 to 200 prompts and 1 to 4 layers, each within 7 %.
ROW_BYTES, GROUP_BYTES, FILE_BYTES = (37.4, 3.7), (760, 126), (1442, 227)

#: Stored bytes over raw ones under zstd, at most: 0.79 for states that look like noise, real ones came to 0.72.
ZSTD_RATIO = {"bfloat16": 0.79}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a build will make and cost."""

    prompts: int
    tokens: int
    longest_prompt: int
    """In tokens."""
    length_histogram: dict[int, int]
    """Prompts of up to so many tokens, but more than the number before."""
    dropped: int
    truncated: int
    shards: int
    raw_bytes: int
    """Of the shards on the target, uncompressed."""
    stored_bytes: int
    """Of the shards on the target, as they will be compressed."""
    plan_bytes: int
    """Of the plan on the target, at most."""
    host_bytes: int
    """Memory that each engine's host needs for the states in flight."""
    object_store_bytes: int
    """Of Ray's object store, for each engine."""
    gpu_hours: float | None = None
    gpu_price: float | None = None
    """In the currency of the price given."""
    storage_price_per_month: float | None = None

    def __str__(self) -> str:
        bounds = [0, *self.length_histogram]
        widest = max(self.length_histogram.values())
        lines = [
            f"{self.prompts:,} prompts, {self.tokens:,} tokens, the longest {self.longest_prompt:,}; "
            f"{self.dropped:,} dropped, {self.truncated:,} truncated",
            *(
                f"  {low + 1:>9,} to {high:>9,} tokens  {count:>12,}  {'#' * -(-40 * count // widest)}"
                for low, (high, count) in zip(bounds, self.length_histogram.items(), strict=False)
            ),
            f"{self.shards:,} shards, {_bytes(self.raw_bytes)}, {_bytes(self.stored_bytes)} as stored; "
            f"plan {_bytes(self.plan_bytes)}",
            f"each engine: {_bytes(self.host_bytes)} of memory, {_bytes(self.object_store_bytes)} of object store",
        ]
        if self.gpu_hours is not None:
            price = "" if self.gpu_price is None else f", {self.gpu_price:,.2f} to compute"
            lines.append(f"{self.gpu_hours:,.2f} GPU-hours{price}")
        if self.storage_price_per_month is not None:
            lines.append(f"{self.storage_price_per_month:,.2f} a month to store")
        return "\n".join(lines)


def estimate(
    dataset: Any,
    *,
    tokens_per_s: float | None = None,
    gpu_hour_price: float | None = None,
    gb_month_price: float | None = None,
    ratio: float | None = None,
    **keywords: Any,
) -> Estimate:
    """What `hsray.build(dataset, **keywords)` would make and cost.

    Args:
        dataset: As for a build.
        tokens_per_s: Of one engine, from a measurement; for GPU-hours.
        gpu_hour_price: Of one GPU for one hour.
        gb_month_price: Of 10^9 bytes on the target for a month.
        ratio: Stored bytes over raw ones; by default 0.79 for bfloat16 under zstd, which is measured, and else 1.
        keywords: A build's own; `out` may be left out.

    Raises as a build does for a row that cannot be used or a keyword that is not what it may be.
    """
    for name, value in (("tokens_per_s", tokens_per_s), ("ratio", ratio)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value!r}; give a number above 0")
    if gpu_hour_price is not None and tokens_per_s is None:
        raise ValueError("gpu_hour_price= needs tokens_per_s=, which says how many hours there will be")
    request, storage_options = _request(dataset, keywords)
    with ray_data():
        plan = make_plan(read_rows(dataset, storage_options=storage_options), request, None, on_shape=None)
    identity, tokens = request.identity, sum(plan.shard_tokens)
    raw_bytes = tokens * request.bytes_per_token + _overhead(plan, request)
    if ratio is None:
        ratio = ZSTD_RATIO.get(identity.stored_dtype, 1.0) if identity.compression != "none" else 1.0
    stored_bytes = int(raw_bytes * ratio)
    options = EngineOptions(
        model=request.model,
        layers=identity.layers,
        max_tokens=plan.longest_prompt,
        buffer_tokens=max(plan.shard_tokens),
        requests_in_flight=identity.requests_in_flight,
    )
    num_buffers = options.shards_in_capture + GPU_WRITERS
    rows_in_flight = num_buffers + 3  # as the graph of `hsray.pipeline` hands them out
    gpu_hours = None if tokens_per_s is None else tokens / tokens_per_s / 3600 * identity.tensor_parallel
    return Estimate(
        prompts=sum(plan.shard_prompts),
        tokens=tokens,
        longest_prompt=plan.longest_prompt,
        length_histogram={
            min(2**power, plan.longest_prompt): count for power, count in enumerate(plan.length_histogram) if count
        },
        dropped=plan.num_dropped,
        truncated=plan.num_truncated,
        shards=plan.num_shards,
        raw_bytes=raw_bytes,
        stored_bytes=stored_bytes,
        plan_bytes=int(tokens * TOKEN_BYTES),
        host_bytes=num_buffers * options.buffer_tokens * options.bytes_per_token,
        object_store_bytes=int((rows_in_flight * options.buffer_tokens + min(tokens, FILE_TOKENS)) * TOKEN_BYTES),
        gpu_hours=gpu_hours,
        gpu_price=None if gpu_hour_price is None else gpu_hours * gpu_hour_price,
        storage_price_per_month=None if gb_month_price is None else stored_bytes / 1e9 * gb_month_price,
    )


def preview(dataset: Any, *, count: int = 3, **keywords: Any) -> "list[Text]":
    """The first prompts that `hsray.build(dataset, **keywords)` would make, to be printed with rich.

    What is trained on is green; special tokens stand out, and line ends are shown. `layers` and `out` may be left out.

    Raises:
        PromptError: one of them cannot be used.
    """
    import transformers  # noqa: F401 (it shows the tokens here; so no other process need load it to read the model)

    request, storage_options = _request(dataset, {"layers": ["final"], **keywords})
    tokenizer = load_chat_tokenizer(
        request.prompts.model,
        trust_remote_code=request.prompts.trust_remote_code,
        chat_template=request.prompts.chat_template,
    )
    shown = []
    with ray_data():
        rows = read_rows(dataset, storage_options=storage_options).limit(count)
        prompts = (prompt for block in blocks_of(tokenize_rows(rows, request.prompts)) for prompt in block.to_pylist())
        for prompt in islice(prompts, count):
            if prompt["error"]:
                raise PromptError(f"{prompt['source']}: {prompt['error']}")
            shown.append(shown_prompt(prompt, tokenizer))
    return shown


def _request(dataset: Any, keywords: Mapping[str, Any]) -> tuple[Request, Mapping[str, Any] | None]:
    """A build's keywords, settled as a build settles them, and its storage options."""
    bound = inspect.signature(build).bind(dataset, **{"out": "", **keywords})
    bound.apply_defaults()
    wanted = inspect.signature(settle).parameters
    request = settle(**{name: bound.arguments[name] for name in wanted})
    return request, bound.arguments["storage_options"]


def _overhead(plan: Plan, request: Request) -> int:
    """Bytes of the shards' files beside the states."""
    num_layers = len(request.identity.layers)
    rows, tokens = sum(plan.shard_prompts), sum(plan.shard_tokens)
    groups = sum(
        min(prompts, -(-shard_tokens * request.bytes_per_token // ROW_GROUP_BYTES))
        for prompts, shard_tokens in zip(plan.shard_prompts, plan.shard_tokens, strict=True)
    )
    counts = {ROW_BYTES: rows, GROUP_BYTES: groups, FILE_BYTES: plan.num_shards}
    return int(
        tokens * TOKEN_BYTES + sum(count * (each + num_layers * column) for (each, column), count in counts.items())
    )


def _bytes(number: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:,.1f} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"


def shown_prompt(prompt: Mapping[str, Any], tokenizer: Any) -> "Text":
    """A prompt to be printed; without a tokenizer its ids are."""
    from rich.text import Text

    num_trained = sum(prompt["loss_mask"])
    text = Text(f"{prompt['source']}  {prompt['prompt_id']}  ", style="bold")
    text.append(f"{len(prompt['input_ids'])} tokens, {num_trained} trained on", style="bold")
    if prompt["dropped"]:
        text.append(f"  dropped: {prompt['dropped']}", style="bold red")
    text.append("\n")
    if tokenizer is None:
        pairs = zip(prompt["loss_mask"], prompt["input_ids"], strict=True)
        runs = [
            (on, False, " ".join(str(token) for _, token in run) + " ") for on, run in groupby(pairs, lambda p: p[0])
        ]
    else:
        special = set(tokenizer.all_special_ids)
        tagged = [
            (on, token in special, token) for on, token in zip(prompt["loss_mask"], prompt["input_ids"], strict=True)
        ]
        runs = [
            (on, is_special, tokenizer.decode([token for *_, token in run]))
            for (on, is_special), run in groupby(tagged, lambda item: item[:2])
        ]
    for trained, is_special, part in runs:
        style = ("green" if trained else "default") + (" reverse" if is_special else "")
        text.append(part.replace("\n", "↵\n"), style=style)
    return text
