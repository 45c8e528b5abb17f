"""Rows to prompts: token ids, a loss mask and an id each, in the order given.

A row that cannot be used comes back with its error, and a prompt that an explicit policy leaves out with its reason; what
is neither is exactly what the row says.

Shapes: T tokens of a prompt.
"""

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hsray.chat import ChatOptions
from hsray.describe import load_chat_tokenizer
from hsray.shapes import GivenTokens, find_shape, own_id, read_row
from hsray.strict_json import load_json
from hsray.tasks import map_batches
from hsray.tokens import Rendered, tokenize

if TYPE_CHECKING:
    import ray.data
    from transformers import PreTrainedTokenizerBase

TOKENIZE_BATCH_ROWS = 256

#: Of rows, in one block.
BLOCK_BYTES = 8 << 20

PROMPTS_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("row_digest", pa.binary(16)),  # null for what follows the first prompt of a row
        ("shape", pa.string()),
        ("prompt_id", pa.string()),
        ("content_digest", pa.binary(12)),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("error", pa.string()),
        ("dropped", pa.string()),
        ("truncated", pa.bool_()),
    ]
)

#: How `sort="length"` orders prompts: the longest first, those with an error before all.
SORT_COLUMN = "sort_key"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How rows become prompts."""

    model: str
    trust_remote_code: bool
    chat_template: str | None
    """Jinja, in place of the tokenizer's own."""
    columns: Mapping[str, str]
    """See `hsray.shapes.find_shape`."""
    chat: ChatOptions
    vocab_size: int
    max_tokens: int
    too_long: Literal["error", "drop", "truncate"]
    untrained: Literal["error", "drop", "keep"]
    """Of a prompt of which no token is trained on."""
    sort: Literal["input", "length"]


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """One row of `PROMPTS_SCHEMA`."""

    source: str | None
    row_digest: bytes | None
    shape: str | None = None
    prompt_id: str | None = None
    content_digest: bytes | None = None
    input_ids: np.ndarray | None = None
    """int32 [T]."""
    loss_mask: np.ndarray | None = None
    """bool [T]."""
    error: str | None = None
    dropped: str | None = None
    truncated: bool = False
    own_id: str | None = None
    """As the row says."""

    def fail(self, error: str) -> None:
        """Says why it cannot be used, and nothing else."""
        self.error = error
        self.prompt_id = self.content_digest = self.input_ids = self.loss_mask = None


def tokenize_rows(rows: "ray.data.Dataset", options: PromptOptions) -> "ray.data.Dataset":
    """Prompts of `PROMPTS_SCHEMA`, in the order of their rows or by length.

    A row makes one prompt, or several where its conversation had to be split; one that cannot be used makes one that has
    its `error` set.
    """
    # A file would be one block of 128 MB, or one task; and between two tasks of a core Ray leaves it idle for 0.1 s or so.
    rows.context.target_max_block_size = BLOCK_BYTES
    prompts = map_batches(rows, tokenize_batch, fn_kwargs={"options": options}, batch_size=TOKENIZE_BATCH_ROWS)
    if options.sort == "length":
        prompts = map_batches(prompts, _add_sort_column)
        prompts = prompts.sort(SORT_COLUMN).drop_columns([SORT_COLUMN])
    return prompts


def digest_rows(rows: "ray.data.Dataset") -> "ray.data.Dataset":
    """Each row's digest, in order, as `tokenize_rows` gives it, without tokenising."""
    return map_batches(rows, _digest_batch)


def _digest_batch(batch: pa.Table) -> pa.Table:
    return pa.table({"row_digest": pa.array(map(_row_digest, batch["row"].to_pylist()), pa.binary(16))})


def _row_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _add_sort_column(batch: pa.Table) -> pa.Table:
    """A text whose order is that of the prompts: total, and a function of the prompts alone, not of how they arrived."""
    columns = pc.list_value_length(batch["input_ids"]), batch["prompt_id"], batch["source"]
    keys = [
        f"1{2**31 - num_tokens:010d}{prompt_id}" if num_tokens is not None else f"0{source}"
        for num_tokens, prompt_id, source in zip(*(column.to_pylist() for column in columns), strict=True)
    ]
    return batch.append_column(SORT_COLUMN, pa.array(keys, pa.string()))


@functools.lru_cache(maxsize=2)  # a Ray worker serves many tasks, and loading takes seconds
def _tokenizer(model: str, *, trust_remote_code: bool, chat_template: str | None) -> "PreTrainedTokenizerBase | None":
    # A task has one core; threads for each of the machine's would only be in one another's way.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return load_chat_tokenizer(model, trust_remote_code=trust_remote_code, chat_template=chat_template)


def tokenize_batch(batch: pa.Table, *, options: PromptOptions) -> pa.Table:
    """The prompts of rows of `hsray.sources.ROWS_SCHEMA`, in their order."""
    tokenizer = _tokenizer(
        options.model, trust_remote_code=options.trust_remote_code, chat_template=options.chat_template
    )
    prompts: list[_Prompt] = []
    texts: list[tuple[_Prompt, Rendered]] = []
    for source, text, unreadable in zip(*batch.to_pydict().values(), strict=True):
        first = _Prompt(source=source, row_digest=_row_digest(text), error=unreadable)
        pieces = [] if unreadable else _read(text, first, tokenizer, options)
        prompts.append(first)
        for piece in pieces:
            prompt = first
            if piece is not pieces[0]:
                prompt = _Prompt(source=source, row_digest=None, shape=first.shape, own_id=first.own_id)
                prompts.append(prompt)
            texts.append((prompt, piece))
    results = tokenize(tokenizer, [piece for _, piece in texts])
    for (prompt, piece), result in zip(texts, results, strict=True):
        if isinstance(result, ValueError):
            prompt.fail(str(result))
            continue
        prompt.input_ids, prompt.loss_mask = result
        if piece.turn is not None and prompt.own_id is not None:
            prompt.own_id = f"{prompt.own_id}@{piece.turn}"
    whole = [prompt for prompt in prompts if prompt.error is None]
    for prompt, is_known in zip(whole, _are_known([prompt.input_ids for prompt in whole], options), strict=True):
        _finish(prompt, options, is_known=is_known)
    columns = ([getattr(prompt, name) for prompt in prompts] for name in PROMPTS_SCHEMA.names)
    return pa.table(
        [
            _list_array(values, field.type.value_type) if pa.types.is_list(field.type) else values
            for field, values in zip(PROMPTS_SCHEMA, columns, strict=True)
        ],
        schema=PROMPTS_SCHEMA,
    )


def _list_array(values: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.ListArray:
    """Arrays as one column of lists, without an object for each number; None is null."""
    parts = [np.empty(0) if value is None else value for value in values]
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    flat = np.concatenate([part for part in parts if len(part)] or [np.empty(0, kind.to_pandas_dtype())])
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(flat, kind), mask=pa.array([value is None for value in values], pa.bool_())
    )


def _read(
    text: str, prompt: _Prompt, tokenizer: "PreTrainedTokenizerBase | None", options: PromptOptions
) -> Sequence[Rendered]:
    """The texts that a row's JSON stands for; tokens that it gives go straight into `prompt`, as does an error."""
    try:
        row = load_json(text)
        if not isinstance(row, dict):
            raise ValueError(f"a row must be a JSON object; found {text:.80}")
        shape = find_shape(row, options.columns)
        prompt.shape, prompt.own_id = shape.name, own_id(row, options.columns)
        content = read_row(row, shape, options.columns, tokenizer, options.chat)
    except (json.JSONDecodeError, RecursionError) as error:
        prompt.fail(f"not JSON: {error}; each line must be one JSON object")
        return []
    except ValueError as error:
        prompt.fail(str(error))
        return []
    if isinstance(content, GivenTokens):
        # As objects: they may be any integers, until `_finish` has looked at them.
        prompt.input_ids, prompt.loss_mask = np.array(content.input_ids, object), np.array(content.loss_mask, bool)
        return []
    return content


def _are_known(ids: Sequence[np.ndarray], options: PromptOptions) -> list[bool]:
    """Whether each prompt's tokens are all of the model's vocabulary; a look at all prompts' first, which is one for most."""
    flat = np.concatenate(ids) if ids else np.empty(0, np.int32)
    if flat.dtype == np.int32 and (not len(flat) or 0 <= flat.min() <= flat.max() < options.vocab_size):
        return [True] * len(ids)
    return [not len(ids_T) or (ids_T.min() >= 0 and ids_T.max() < options.vocab_size) for ids_T in ids]


def _finish(prompt: _Prompt, options: PromptOptions, *, is_known: bool) -> None:
    """Checks a prompt's tokens, applies the policies, and gives it its id."""
    input_ids, loss_mask = prompt.input_ids, prompt.loss_mask
    num_tokens, max_tokens = len(input_ids), options.max_tokens
    if not num_tokens:
        return prompt.fail("an empty prompt: it has no tokens; remove the row")
    if not is_known:
        bad = next(token for token in input_ids.tolist() if not 0 <= token < options.vocab_size)
        return prompt.fail(
            f"token id {bad} is outside the model's vocabulary 0..{options.vocab_size - 1}; was it made with another "
            "model's tokenizer?"
        )
    input_ids = input_ids.astype(np.int32, copy=False)
    if not loss_mask.any():
        if options.untrained == "error":
            return prompt.fail(
                f"no token of it is trained on: all {num_tokens} of its loss mask are 0; pass untrained='drop' or 'keep'"
            )
        if options.untrained == "drop":
            prompt.dropped = "no token of it is trained on"
    if num_tokens > max_tokens and prompt.dropped is None:
        if options.too_long == "error":
            return prompt.fail(
                f"{num_tokens} tokens, over max_tokens={max_tokens}; shorten it, or pass too_long='drop' or 'truncate'"
            )
        if options.too_long == "drop":
            prompt.dropped = f"{num_tokens} tokens, over max_tokens={max_tokens}"
        elif loss_mask.any() and not loss_mask[:max_tokens].any():
            prompt.dropped = f"{num_tokens} tokens, of which none of the first max_tokens={max_tokens} is trained on"
        else:
            prompt.truncated = True
            input_ids, loss_mask = input_ids[:max_tokens], loss_mask[:max_tokens]
    digest = hashlib.blake2b(input_ids, digest_size=12)
    digest.update(np.packbits(loss_mask))
    prompt.input_ids, prompt.loss_mask, prompt.content_digest = input_ids, loss_mask, digest.digest()
    prompt.prompt_id = prompt.own_id if prompt.own_id is not None else f"#{digest.hexdigest()}"
