"""Anything a user calls a dataset, to prompts: token ids, a loss mask and an id each, in the order given.

A row travels as JSON text with the place it came from, so rows of any shape share one schema, and a row that cannot
be used comes back as an error that names its file and line.

Shapes: T tokens of a prompt.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from hsray.chat import check_unicode, tokenize_chat, tokenize_text
from hsray.model import load_tokenizer

if TYPE_CHECKING:
    import ray.data
    from transformers import PreTrainedTokenizerBase

Dataset = "str | Path | Sequence[str | Path] | Sequence[Mapping[str, Any]] | ray.data.Dataset"

#: Where a row came from, its JSON text, and why it cannot be read, if it cannot.
Row = tuple[str | None, str, str | None]

READ_BATCH_ROWS = 1024
TOKENIZE_BATCH_ROWS = 256

ROWS_SCHEMA = pa.schema([("source", pa.string()), ("row", pa.large_string()), ("error", pa.string())])
PROMPTS_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("row_digest", pa.binary(16)),
        ("prompt_id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("error", pa.string()),
        ("too_long", pa.bool_()),
    ]
)


class PromptError(ValueError):
    """A row of the dataset cannot be used as a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How rows become prompts."""

    model: str
    trust_remote_code: bool
    vocab_size: int
    max_tokens: int
    too_long: Literal["error", "drop"]


def read_rows(dataset: Any, *, storage_options: Mapping[str, Any] | None = None) -> "ray.data.Dataset":
    """The dataset's rows as a Ray dataset of (source, JSON text), in order.

    Raises:
        FileNotFoundError: a path or a glob that names no file.
        ValueError: a file type, or a kind of dataset, that is not known.
    """
    import ray.data

    if isinstance(dataset, ray.data.Dataset):
        rows = dataset.map_batches(_dataset_rows, batch_format="pyarrow", zero_copy_batch=True)
        # The dataset brings its own settings, which may drop a block that fails, and rows in any order.
        rows.context.execution_options.preserve_order = True
        rows.context.max_errored_blocks = 0
        return rows
    if isinstance(dataset, (str, Path)):
        return _file_rows([str(dataset)], storage_options)
    if isinstance(dataset, Sequence) and dataset and all(isinstance(item, (str, Path)) for item in dataset):
        return _file_rows([str(item) for item in dataset], storage_options)
    if isinstance(dataset, Sequence) and all(isinstance(item, Mapping) for item in dataset):
        return ray.data.from_arrow(_list_rows(dataset))
    raise ValueError(
        f"a dataset of type {type(dataset).__name__} is not known; wanted JSONL or Parquet paths or globs, a list of "
        "dicts, or a ray.data.Dataset"
    )


def tokenize_rows(rows: "ray.data.Dataset", options: PromptOptions) -> "ray.data.Dataset":
    """Prompts of `PROMPTS_SCHEMA`, one for each row, in order; a row that cannot be used has its `error` set."""
    return rows.repartition(target_num_rows_per_block=READ_BATCH_ROWS, strict=True).map_batches(
        _tokenize_batch,
        fn_kwargs={"options": options},
        batch_size=TOKENIZE_BATCH_ROWS,
        batch_format="pyarrow",
        zero_copy_batch=True,
    )


def digest_rows(rows: "ray.data.Dataset") -> "ray.data.Dataset":
    """Each row's digest, in order, as `tokenize_rows` gives it, without tokenising."""
    return rows.map_batches(_digest_batch, batch_format="pyarrow", zero_copy_batch=True)


def _file_rows(patterns: list[str], storage_options: Mapping[str, Any] | None) -> "ray.data.Dataset":
    import ray.data

    files = [file for pattern in patterns for file in _expand(pattern, storage_options)]
    repeated = sorted({file for file in files if files.count(file) > 1}) if len(set(files)) < len(files) else []
    if repeated:
        raise ValueError(f"the dataset names {repeated[0]!r} twice; its prompts would be doubled: name each file once")
    items = ray.data.from_items([{"path": path} for path in files], override_num_blocks=len(files))
    return items.map_batches(
        _read_files, fn_kwargs={"storage_options": storage_options}, batch_size=1, batch_format="pyarrow"
    )


def _expand(pattern: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(pattern, **(storage_options or {}))
    found = [path] if fs.isfile(path) else sorted(name for name in fs.glob(path) if fs.isfile(name))
    if not found:
        raise FileNotFoundError(f"dataset {pattern!r} names no file; give a JSONL or Parquet file, or a glob of them")
    for name in found:
        if not name.endswith((".jsonl", ".json", ".parquet")):
            raise ValueError(f"dataset file {name!r} is of an unknown type; wanted .jsonl, .json (lines) or .parquet")
    return [fs.unstrip_protocol(name) for name in found]


def _read_files(batch: pa.Table, *, storage_options: Mapping[str, Any] | None) -> Iterator[pa.Table]:
    for url in batch["path"].to_pylist():
        read = _read_parquet if url.endswith(".parquet") else _read_lines
        yield from _batched(read(url, storage_options))


def _batched(rows: Iterator[Row]) -> Iterator[pa.Table]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == READ_BATCH_ROWS:
            yield _rows_table(batch)
            batch = []
    yield _rows_table(batch)


def _rows_table(rows: Sequence[Row]) -> pa.Table:
    return pa.table([list(column) for column in zip(*rows, strict=True)] or [[], [], []], schema=ROWS_SCHEMA)


def _read_lines(url: str, storage_options: Mapping[str, Any] | None) -> Iterator[Row]:
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(url, **(storage_options or {}))
    with fs.open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield f"{path}:{number}", line.decode().strip(), None
                except UnicodeDecodeError as error:
                    yield f"{path}:{number}", line.decode(errors="replace"), f"not UTF-8 text: {error}"


def _read_parquet(url: str, storage_options: Mapping[str, Any] | None) -> Iterator[Row]:
    import pyarrow.parquet as pq
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(url, **(storage_options or {}))
    number = 0
    with fs.open(path, "rb") as file:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=READ_BATCH_ROWS):
            for row in batch.to_pylist():
                yield f"{path}: row {number}", _to_json(row), None
                number += 1


def _list_rows(dataset: Sequence[Mapping[str, Any]]) -> list[pa.Table]:
    tables = []
    for start in range(0, len(dataset), READ_BATCH_ROWS):
        chunk = dataset[start : start + READ_BATCH_ROWS]
        tables.append(_rows_table([(f"dataset[{start + at}]", _to_json(row), None) for at, row in enumerate(chunk)]))
    return tables or [ROWS_SCHEMA.empty_table()]


def _dataset_rows(batch: pa.Table) -> pa.Table:
    return _rows_table([(None, _to_json(row), None) for row in batch.to_pylist()])


def _to_json(row: Mapping[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False, sort_keys=True, default=_jsonable)
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _jsonable(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return {type(value).__name__: repr(value)}  # not text: a prompt made of it is refused, any other column passes


def _digest_batch(batch: pa.Table) -> pa.Table:
    return pa.table({"row_digest": pa.array(map(_row_digest, batch["row"].to_pylist()), pa.binary(16))})


def _row_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _tokenize_batch(batch: pa.Table, *, options: PromptOptions) -> pa.Table:
    tokenizer = _tokenizer(options.model, options.trust_remote_code)
    rows = zip(batch["row"].to_pylist(), batch["error"].to_pylist(), strict=True)
    prompts = [_to_prompt(text, error, tokenizer, options) for text, error in rows]
    columns = [batch["source"].to_pylist(), [_row_digest(text) for text in batch["row"].to_pylist()]]
    columns += [[prompt[name] for prompt in prompts] for name in PROMPTS_SCHEMA.names[2:]]
    return pa.table(columns, schema=PROMPTS_SCHEMA)


@functools.lru_cache(maxsize=2)
def _tokenizer(model: str, trust_remote_code: bool) -> "PreTrainedTokenizerBase | None":
    # A Ray worker serves many tasks; loading takes seconds.
    return load_tokenizer(model, trust_remote_code=trust_remote_code)


def _to_prompt(
    text: str, unreadable: str | None, tokenizer: "PreTrainedTokenizerBase | None", options: PromptOptions
) -> dict[str, Any]:
    prompt: dict[str, Any] = dict.fromkeys(PROMPTS_SCHEMA.names[2:], None) | {"error": unreadable}
    if unreadable:
        return prompt
    try:
        row = json.loads(text)
        if not isinstance(row, dict):
            raise PromptError(f"a row must be a JSON object; found {text:.80}")
        input_ids, loss_mask = _tokenize_row(row, tokenizer)
        _check_tokens(input_ids, loss_mask, options)
        prompt["too_long"] = len(input_ids) > options.max_tokens
        if prompt["too_long"] and options.too_long == "error":
            raise PromptError(
                f"{len(input_ids)} tokens, over max_tokens={options.max_tokens}; shorten it, or pass too_long='drop'"
            )
        prompt.update(prompt_id=_prompt_id(row, input_ids, loss_mask), input_ids=input_ids, loss_mask=loss_mask)
    except json.JSONDecodeError as error:
        prompt["error"] = f"not JSON: {error}; each line must be one JSON object"
    except ValueError as error:
        prompt["error"] = str(error)
    return prompt


def _tokenize_row(row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase | None") -> tuple[list[int], list[bool]]:
    """Tokens and mask of a row: of its 'input_ids' if it has them, else its 'messages', else its 'text'."""
    if row.get("input_ids") is not None:
        return _given_tokens(row)
    if tokenizer is None and (row.get("messages") is not None or row.get("text") is not None):
        raise PromptError("the model's folder has no tokenizer; give 'input_ids', or a model with one")
    if row.get("messages") is not None:
        return tokenize_chat(tokenizer, row["messages"])
    if row.get("text") is not None:
        if not isinstance(row["text"], str):
            raise PromptError(f"'text' must be a text; found {type(row['text']).__name__}")
        return tokenize_text(tokenizer, row["text"])
    raise PromptError(f"has none of the columns 'input_ids', 'messages', 'text'; found {sorted(row)}: rename one")


def _given_tokens(row: dict[str, Any]) -> tuple[list[int], list[bool]]:
    input_ids = row["input_ids"]
    loss_mask = row.get("loss_mask")
    if not isinstance(input_ids, list) or any(type(token) is not int for token in input_ids):
        raise PromptError("'input_ids' must be a list of integers")
    if loss_mask is None:
        return input_ids, [True] * len(input_ids)
    if not isinstance(loss_mask, list) or len(loss_mask) != len(input_ids) or any(m not in (0, 1) for m in loss_mask):
        raise PromptError(f"'loss_mask' must be {len(input_ids)} values of 0 or 1, one for each of 'input_ids'")
    return input_ids, [bool(value) for value in loss_mask]


def _check_tokens(input_ids: list[int], loss_mask: list[bool], options: PromptOptions) -> None:
    if not input_ids:
        raise PromptError("an empty prompt: it has no tokens; remove the row")
    if min(input_ids) < 0 or max(input_ids) >= options.vocab_size:
        bad = next(token for token in input_ids if not 0 <= token < options.vocab_size)
        raise PromptError(
            f"token id {bad} is outside the model's vocabulary 0..{options.vocab_size - 1}; was it made with another "
            "model's tokenizer?"
        )


def _prompt_id(row: dict[str, Any], input_ids: list[int], loss_mask: list[bool]) -> str:
    """The row's own 'prompt_id' or 'id', else a digest of its tokens and mask."""
    for name in ("prompt_id", "id"):
        if row.get(name) is not None:
            if type(row[name]) not in (str, int) or row[name] == "":
                raise PromptError(f"its {name} {row[name]!r} must be a text or an integer; give it another, or none")
            own_id = check_unicode(str(row[name]))
            if own_id.startswith("#"):
                raise PromptError(f"its id {own_id!r} begins with '#', as do ids made of content; give it another")
            return own_id
    digest = hashlib.blake2b(np.asarray(input_ids, np.int32).tobytes(), digest_size=12)
    digest.update(np.packbits(loss_mask).tobytes())
    return f"#{digest.hexdigest()}"
