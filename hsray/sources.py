"""Anything a user calls a dataset, to rows: JSON text and the place each came from, in the order given.

A row travels as JSON text, so that rows of any shape share one schema, and one that cannot be read comes back as an error
that names its file and line. Files are read in Ray's tasks, a file a task, and never held whole: JSON lines, JSON arrays,
Parquet, Arrow, and what `datasets.Dataset.save_to_disk` leaves; JSON may be compressed.
"""

import codecs
import copy
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hsray.store import client_errors
from hsray.tasks import map_batches

if TYPE_CHECKING:
    import fsspec
    import ray.data

#: What `read_rows` takes, in words.
WANTED = "JSONL, JSON, Parquet or Arrow files (paths, globs, lists of them), a folder of datasets.save_to_disk, a list of dicts, "
WANTED += "a datasets.Dataset, or a ray.data.Dataset"

#: Where a row came from, its JSON text, and why it cannot be read, if it cannot.
Row = tuple[str | None, str, str | None]

BATCH_ROWS = 1024

#: Files that are read at one time.
MIN_READERS, CORES_A_READER = 2, 8

ROWS_SCHEMA = pa.schema([("source", pa.string()), ("row", pa.large_string()), ("error", pa.string())])

#: Characters of a JSON array read at a time.
ARRAY_CHARS = 1 << 20

#: A file name's last suffix -> Arrow's codec.
CODECS = {".gz": "gzip", ".zst": "zstd"}

FILE_TYPES = ".jsonl, .ndjson or .json (lines, or one array; .gz and .zst too), .parquet or .arrow"

#: The column that numbers a `datasets.Dataset`'s rows on their way through Ray.
NUMBER_COLUMN = "hsray.row"


class PromptError(ValueError):
    """A row of the dataset cannot be used as a prompt."""


def read_rows(dataset: Any, *, storage_options: Mapping[str, Any] | None = None) -> "ray.data.Dataset":
    """The dataset's rows as a Ray dataset of `ROWS_SCHEMA`, in order.

    Raises:
        FileNotFoundError: a path or a glob that names no file.
        ValueError: a file type, or a kind of dataset, that is not known.
    """
    import ray.data

    if isinstance(dataset, ray.data.Dataset):
        rows = map_batches(dataset, _dataset_rows)
        # Of its own, or the settings would be the dataset's from then on; Ray has no public way.
        rows._context = rows._logical_plan.context = copy.deepcopy(rows.context)
        # The dataset brings its own settings, which may drop a block that fails, and rows in any order.
        rows.context.execution_options.preserve_order = True
        rows.context.max_errored_blocks = 0
        return rows
    if isinstance(dataset, (str, Path)):
        return _file_rows([str(dataset)], storage_options)
    if _is_hugging_face(dataset):
        tables = list(_numbered_tables(dataset)) or [pa.table({NUMBER_COLUMN: pa.array([], pa.int64())})]
        return map_batches(ray.data.from_arrow(tables), _dataset_rows)
    if isinstance(dataset, Sequence) and dataset and all(isinstance(item, (str, Path)) for item in dataset):
        return _file_rows([str(item) for item in dataset], storage_options)
    if isinstance(dataset, Sequence) and all(isinstance(item, Mapping) for item in dataset):
        return ray.data.from_arrow(list_rows(dataset))
    raise ValueError(f"a dataset of type {type(dataset).__name__} is not known; wanted {WANTED}")


def _is_hugging_face(dataset: Any) -> bool:
    """Whether it is a `datasets.Dataset`, without importing that package: whoever has one has imported it."""
    return type(dataset).__name__ == "Dataset" and type(dataset).__module__.split(".")[0] == "datasets"


def _numbered_tables(dataset: Any) -> Iterator[pa.Table]:
    arrow = dataset.with_format("arrow")
    for start in range(0, len(dataset), BATCH_ROWS):
        table = arrow[start : start + BATCH_ROWS].replace_schema_metadata(None)
        yield table.append_column(NUMBER_COLUMN, pa.array(range(start, start + len(table)), pa.int64()))


def _file_rows(patterns: list[str], storage_options: Mapping[str, Any] | None) -> "ray.data.Dataset":
    import ray
    import ray.data

    files = [file for pattern in patterns for file in expand(pattern, storage_options)]
    seen: set[str] = set()
    for file in files:
        same = file if "://" in file else os.path.realpath(file)
        if same in seen:
            raise ValueError(f"the dataset names {file!r} twice; its prompts would be doubled: name each file once")
        seen.add(same)
    items = ray.data.from_items([{"path": path} for path in files], override_num_blocks=len(files))
    # Beside the tokenizers, which take 15 times as long and need every core: a large file's reader lives as long as they do.
    num_readers = max(MIN_READERS, int(ray.cluster_resources().get("CPU", 0)) // CORES_A_READER)
    return map_batches(
        items,
        _read_files,
        fn_kwargs={"storage_options": storage_options},
        batch_size=1,
        num_cpus=0,
        compute=ray.data.TaskPoolStrategy(size=min(num_readers, len(files))),
    )


def expand(pattern: str, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """The files that a path or a glob names, in order of their names."""
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(pattern, **(storage_options or {}))
    with client_errors(pattern):
        is_file, is_folder = fs.isfile(path), bool(path.strip("/")) and fs.isdir(path)
    if is_file:
        found = [path]
    elif is_folder:
        found = _saved_files(fs, path.rstrip("/"))
    else:
        found = sorted(name for name in fs.glob(path) if fs.isfile(name))
    if not found:
        raise FileNotFoundError(f"dataset {pattern!r} names no file; give a JSONL or Parquet file, or a glob of them")
    for name in found:
        _reader_of(name)
    return [fs.unstrip_protocol(name) for name in found]


def _saved_files(fs: "fsspec.AbstractFileSystem", folder: str) -> list[str]:
    """The files of a folder that `datasets.Dataset.save_to_disk` made, in the dataset's order."""
    if fs.isfile(f"{folder}/dataset_dict.json"):
        splits = json.loads(fs.cat_file(f"{folder}/dataset_dict.json"))["splits"]
        raise ValueError(
            f"dataset {folder!r} has the splits {', '.join(splits)}; give one of them, {folder}/{splits[0]}"
        )
    if not fs.isfile(f"{folder}/state.json"):
        raise ValueError(
            f"dataset {folder!r} is a folder, but none of datasets.save_to_disk; give a glob, {folder}/*.parquet"
        )
    state = json.loads(fs.cat_file(f"{folder}/state.json"))
    return [f"{folder}/{file['filename']}" for file in state["_data_files"]]


Reader = Callable[[str, IO[bytes]], Iterator[Row]]


def _reader_of(name: str) -> tuple[Reader, str | None]:
    """How a file of this name is read, and Arrow's codec for it, if it is compressed."""
    stem, codec = name, None
    for suffix, compression in CODECS.items():
        if name.endswith(suffix):
            stem, codec = name.removesuffix(suffix), compression
    if stem.endswith((".jsonl", ".ndjson")):
        return _read_lines, codec
    if stem.endswith(".json"):
        return _read_json, codec
    if codec is None and stem.endswith(".parquet"):
        return _read_parquet, None
    if codec is None and stem.endswith(".arrow"):
        return _read_arrow, None
    raise ValueError(f"dataset file {name!r} is of an unknown type; wanted {FILE_TYPES}")


def _read_files(batch: pa.Table, *, storage_options: Mapping[str, Any] | None) -> Iterator[pa.Table]:
    for url in batch["path"].to_pylist():
        yield from in_tables(read_file(url, storage_options))


def read_file(url: str, storage_options: Mapping[str, Any] | None) -> Iterator[Row]:
    """The rows of one file, without Ray.

    Raises:
        PromptError: the file is damaged.
    """
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(url, **(storage_options or {}))
    read, codec = _reader_of(path)
    try:
        with fs.open(path, "rb") as file, _decompressed(file, codec) as content:
            yield from read(path, content)
    except (OSError, EOFError, UnicodeDecodeError, pa.ArrowInvalid) as error:
        raise PromptError(f"{path} cannot be read: {error}; is it whole?") from error


@contextmanager
def _decompressed(file: IO[bytes], codec: str | None) -> Iterator[IO[bytes]]:
    if codec is None:
        yield file
        return
    with pa.CompressedInputStream(file, codec) as stream:
        yield io.BufferedReader(stream)


def in_tables(rows: Iterator[Row]) -> Iterator[pa.Table]:
    """Rows as tables of `ROWS_SCHEMA`, the last of which may be empty."""
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH_ROWS:
            yield _rows_table(batch)
            batch = []
    yield _rows_table(batch)


def _rows_table(rows: Sequence[Row]) -> pa.Table:
    return pa.table([list(column) for column in zip(*rows, strict=True)] or [[], [], []], schema=ROWS_SCHEMA)


def _read_json(path: str, file: IO[bytes]) -> Iterator[Row]:
    """A .json file holds an object a line, or one array of them."""
    content = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)
    if content.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
        content.read(len(codecs.BOM_UTF8))
    while (start := content.peek(1)[:1]) and start.isspace():
        content.read(1)
    return (_read_array if start == b"[" else _read_lines)(path, content)


def _read_lines(path: str, file: IO[bytes]) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if line.strip():
            try:
                yield f"{path}:{number}", line.decode().strip(), None
            except UnicodeDecodeError as error:
                yield f"{path}:{number}", line.decode(errors="replace"), f"not UTF-8 text: {error}"


def _read_array(path: str, file: IO[bytes]) -> Iterator[Row]:
    """The items of one JSON array; a part of the file is in memory at a time."""
    reader = io.TextIOWrapper(file, encoding="utf-8")
    decode, skip_space = json.JSONDecoder().raw_decode, re.compile(r"\s*").match
    number, at, text = 0, 1, reader.read(ARRAY_CHARS)
    while True:
        at = skip_space(text, at).end()
        if number == 0 and text[at : at + 1] == "]":
            yield from _after_array(path, text[at + 1 :], reader)
            return
        fault = "the file ends within it"
        try:
            _, end = decode(text, at)
            after = skip_space(text, end).end()
        except json.JSONDecodeError as error:
            after = len(text)
            if error.pos < len(text):
                fault = f"{error.msg} at character {error.pos - at} of it"
        if after == len(text):  # what is read so far may end within the item
            more = reader.read(max(ARRAY_CHARS, len(text) - at))
            if not more:
                yield f"{path}: item {number}", text[at:], f"not JSON: {fault}; the file must hold one array of objects"
                return
            text, at = text[at:] + more, 0
            continue
        yield f"{path}: item {number}", text[at:end], None
        number, at = number + 1, after + 1
        if text[after] == "]":
            yield from _after_array(path, text[after + 1 :], reader)
            return
        if text[after] != ",":
            fault = f"{text[after]!r} follows item {number - 1}, where ',' or ']' must"
            yield f"{path}: item {number}", text[after:], f"not JSON: {fault}"
            return


def _after_array(path: str, text: str, reader: io.TextIOWrapper) -> Iterator[Row]:
    """An error where more than spaces follows an array."""
    while text and not text.strip():
        text = reader.read(ARRAY_CHARS)
    if text:
        yield (
            f"{path}: after the array",
            text,
            f"{text.strip():.40} follows it; the file must hold one array of objects",
        )


def _read_parquet(path: str, file: IO[bytes]) -> Iterator[Row]:
    import pyarrow.parquet as pq

    return _read_batches(path, pq.ParquetFile(file).iter_batches(batch_size=BATCH_ROWS))


def _read_arrow(path: str, file: IO[bytes]) -> Iterator[Row]:
    """Arrow's file format, or its stream, which `datasets` writes."""
    magic = file.read(6)
    file.seek(0)
    if magic != b"ARROW1":
        return _read_batches(path, pa.ipc.open_stream(file))
    reader = pa.ipc.open_file(file)
    return _read_batches(path, map(reader.get_batch, range(reader.num_record_batches)))


def _read_batches(path: str, batches: Iterator[pa.RecordBatch]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for start in range(0, len(batch), BATCH_ROWS):
            for row in batch.slice(start, BATCH_ROWS).to_pylist():
                yield f"{path}: row {number}", _to_json(row), None
                number += 1


def list_rows(dataset: Sequence[Mapping[str, Any]]) -> list[pa.Table]:
    """The rows of a list, as tables of `ROWS_SCHEMA`."""
    tables = []
    for start in range(0, len(dataset), BATCH_ROWS):
        chunk = dataset[start : start + BATCH_ROWS]
        tables.append(_rows_table([(f"dataset[{start + at}]", _to_json(row), None) for at, row in enumerate(chunk)]))
    return tables or [ROWS_SCHEMA.empty_table()]


def _dataset_rows(batch: pa.Table) -> pa.Table:
    sources: list[str | None] = [None] * len(batch)
    if NUMBER_COLUMN in batch.column_names:
        sources = [f"dataset[{number}]" for number in batch[NUMBER_COLUMN].to_pylist()]
        batch = batch.drop_columns([NUMBER_COLUMN])
    return _rows_table([(source, _to_json(row), None) for source, row in zip(sources, batch.to_pylist(), strict=True)])


def _to_json(row: Mapping[str, Any]) -> str:
    row = {str(name): value for name, value in row.items()}  # as JSON has it; names of several types have no order
    text = json.dumps(row, ensure_ascii=False, sort_keys=True, default=_jsonable)
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _jsonable(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return {type(value).__name__: repr(value)}  # not text: a prompt made of it is refused, any other column passes
