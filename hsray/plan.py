"""Prompts to a fixed list of shards, decided before any engine starts.

One row of ``plan/*.parquet`` is one shard: its number, and its prompts' ids, tokens and masks, in input order. The
shard is the unit of work, of commit, of retry and of resume; nothing later changes what is in it.

Shapes: T tokens of a prompt.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hsray.prompts import PromptError
from hsray.store import Store

PLAN_SCHEMA = pa.schema(
    [
        ("shard", pa.int32()),
        ("prompt_id", pa.list_(pa.string())),
        ("input_ids", pa.list_(pa.list_(pa.int32()))),
        ("loss_mask", pa.list_(pa.list_(pa.bool_()))),
    ]
)

DROPPED_SCHEMA = pa.schema(
    [("source", pa.string()), ("prompt_id", pa.string()), ("num_tokens", pa.int32()), ("reason", pa.string())]
)

#: Lists the prompts that the length policy left out.
DROPPED_NAME = "dropped.parquet"

#: A plan file is closed at either of these, so that a driver holds one at a time.
FILE_SHARDS = 4096
FILE_TOKENS = 1 << 24

#: Parquet holds no value of 2 GiB.
MAX_VALUE_BYTES = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How prompts are cut into shards."""

    bytes_per_token: int
    """Of all layers together."""
    value_bytes_per_token: int
    """Of one layer: a prompt's states of one layer are one Parquet value."""
    shard_bytes: int
    max_tokens: int
    """Named in the reasons of `DROPPED_NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """One file of the plan."""

    name: str
    digest: str
    """SHA-256 of its bytes."""
    first_shard: int
    num_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan's summary, as the manifest keeps it."""

    files: tuple[PlanFile, ...]
    shard_prompts: tuple[int, ...]
    """Prompts of each shard."""
    shard_tokens: tuple[int, ...]
    """Tokens of each shard."""
    longest_prompt: int
    """In tokens."""
    num_dropped: int
    prompts_digest: str
    """Over the dataset's rows, in order."""

    @property
    def digest(self) -> str:
        """SHA-256 over the files' digests."""
        return hashlib.sha256("\n".join(file.digest for file in self.files).encode()).hexdigest()

    @property
    def num_shards(self) -> int:
        return len(self.shard_tokens)


def shard_name(shard: int) -> str:
    """The object that holds a shard: ``shards/000012.parquet``."""
    return f"shards/{shard:06d}.parquet"


def shard_number(name: str) -> int | None:
    """The shard that a file of ``shards/`` holds; None for a file of another name."""
    stem, _, suffix = name.partition(".")
    if suffix != "parquet" or not stem.isdecimal() or shard_name(int(stem)) != f"shards/{name}":
        return None
    return int(stem)


def write_plan(blocks: Iterable[pa.Table], store: Store, options: PlanOptions) -> Plan:
    """Cuts prompts (tables of `hsray.prompts.PROMPTS_SCHEMA`, in order) into shards and publishes ``plan/``.

    A shard takes prompts while their states fit `shard_bytes`; a prompt larger than that is a shard of its own.

    Raises:
        PromptError: the first row that cannot be used, or two rows with one id, named by file and line.
    """
    writer = _PlanWriter(store, options)
    for block in blocks:
        writer.add(block)
    return writer.finish()


def digest_rows(blocks: Iterable[pa.Table]) -> str:
    """The `prompts_digest` of rows: SHA-256 over their `row_digest` columns, in order."""
    digest = hashlib.sha256()
    for block in blocks:
        _update_digest(digest, block)
    return digest.hexdigest()


def read_plan_file(store: Store, file: PlanFile) -> pa.Table:
    """Reads a file of the plan and checks that its bytes are those that were planned.

    Raises:
        ValueError: the file is missing or changed.
    """
    try:
        data = store.read(file.name)
    except FileNotFoundError:
        data = b""
    if hashlib.sha256(data).hexdigest() != file.digest:
        raise ValueError(
            f"{store.url}/{file.name} is {'changed' if data else 'missing'}: its SHA-256 is not the manifest's. The plan "
            "says what each shard holds, so the dataset cannot be continued: restore the file, or build to another out="
        )
    return pq.read_table(pa.BufferReader(data), schema=PLAN_SCHEMA)


class _PlanWriter:
    """The shards and the file being filled."""

    def __init__(self, store: Store, options: PlanOptions):
        self._store, self._options = store, options
        self._rows = hashlib.sha256()
        self._sources: dict[str, str] = {}
        self._repeats: dict[str, int] = {}
        self._num_rows = 0
        self._tables: list[pa.Table] = []
        self._cuts: list[int] = []  # of the open file: prompts before the end of each closed shard
        self._file_prompts = self._file_tokens = 0
        self._open_prompts = self._open_tokens = 0
        self._files: list[PlanFile] = []
        self._shard_prompts: list[int] = []
        self._shard_tokens: list[int] = []
        self._longest = 0
        self._dropped: list[dict[str, str | int]] = []

    def add(self, block: pa.Table) -> None:
        _update_digest(self._rows, block)
        ids = self._check(block)
        table = block.select(["input_ids", "loss_mask"]).add_column(0, "prompt_id", pa.array(ids, pa.string()))
        table = table.filter(table["prompt_id"].is_valid())
        start = 0
        for index, num_tokens in enumerate(pc.list_value_length(table["input_ids"]).to_pylist()):
            self._check_size(table["prompt_id"][index].as_py(), num_tokens)
            full = (self._open_tokens + num_tokens) * self._options.bytes_per_token > self._options.shard_bytes
            if full and self._open_prompts:
                self._close_shard()
                if len(self._cuts) >= FILE_SHARDS or self._file_tokens >= FILE_TOKENS:
                    self._tables.append(table.slice(start, index - start))
                    start = index
                    self._close_file()
            self._open_prompts += 1
            self._open_tokens += num_tokens
            self._longest = max(self._longest, num_tokens)
        self._tables.append(table.slice(start))

    def finish(self) -> Plan:
        if self._open_prompts:
            self._close_shard()
        if self._cuts:
            self._close_file()
        if not self._files:
            raise PromptError(
                f"the dataset has no prompt to build from ({self._num_rows} rows, {len(self._dropped)} dropped)"
            )
        if self._dropped:
            with self._store.staged(DROPPED_NAME) as sink:
                pq.write_table(pa.Table.from_pylist(self._dropped, schema=DROPPED_SCHEMA), sink)
        return Plan(
            files=tuple(self._files),
            shard_prompts=tuple(self._shard_prompts),
            shard_tokens=tuple(self._shard_tokens),
            longest_prompt=self._longest,
            num_dropped=len(self._dropped),
            prompts_digest=self._rows.hexdigest(),
        )

    def _check(self, block: pa.Table) -> list[str | None]:
        """The prompts' final ids; None for one that is dropped."""
        ids: list[str | None] = []
        columns = block.select(["source", "prompt_id", "error", "too_long"]).to_pydict()
        lengths = pc.list_value_length(block["input_ids"]).to_pylist()
        for source, prompt_id, error, too_long, num_tokens in zip(*columns.values(), lengths, strict=True):
            source = source or f"row {self._num_rows}"
            self._num_rows += 1
            if error:
                raise PromptError(f"{source}: {error}")
            if too_long:
                reason = f"{num_tokens} tokens, over max_tokens={self._options.max_tokens}"
                self._dropped.append(
                    {"source": source, "prompt_id": prompt_id, "num_tokens": num_tokens, "reason": reason}
                )
                ids.append(None)
            else:
                ids.append(self._unique_id(prompt_id, source))
        return ids

    def _unique_id(self, prompt_id: str, source: str) -> str:
        if prompt_id not in self._sources:
            self._sources[prompt_id] = source
            return prompt_id
        if not prompt_id.startswith("#"):
            raise PromptError(
                f"{source}: its id {prompt_id!r} is that of {self._sources[prompt_id]} too; ids must differ, or be left out"
            )
        # The same content twice, without an id of its own: both are kept.
        self._repeats[prompt_id] = self._repeats.get(prompt_id, 1) + 1
        return self._unique_id(f"{prompt_id}-{self._repeats[prompt_id]}", source)

    def _check_size(self, prompt_id: str, num_tokens: int) -> None:
        num_bytes = num_tokens * self._options.value_bytes_per_token
        if num_bytes > MAX_VALUE_BYTES:
            raise PromptError(
                f"prompt {prompt_id!r} has {num_tokens} tokens, {num_bytes} bytes a layer; Parquet holds no value of 2 GiB: "
                f"split it, or pass max_tokens={MAX_VALUE_BYTES // self._options.value_bytes_per_token} with too_long='drop'"
            )

    def _close_shard(self) -> None:
        self._file_prompts += self._open_prompts
        self._file_tokens += self._open_tokens
        self._cuts.append(self._file_prompts)
        self._shard_prompts.append(self._open_prompts)
        self._shard_tokens.append(self._open_tokens)
        self._open_prompts = self._open_tokens = 0

    def _close_file(self) -> None:
        first_shard = len(self._shard_tokens) - len(self._cuts)
        offsets = pa.array([0, *self._cuts], pa.int32())
        prompts = pa.concat_tables(self._tables).combine_chunks()
        lists = [pa.ListArray.from_arrays(offsets, _one_chunk(prompts[name])) for name in PLAN_SCHEMA.names[1:]]
        shards = pa.array(range(first_shard, first_shard + len(self._cuts)), pa.int32())
        sink = pa.BufferOutputStream()
        pq.write_table(
            pa.table([shards, *lists], schema=PLAN_SCHEMA),
            sink,
            row_group_size=64,
            use_dictionary=False,
            write_statistics=["shard"],
        )
        data = sink.getvalue().to_pybytes()
        name = f"plan/{len(self._files):06d}.parquet"
        self._store.publish(name, data)
        digest = hashlib.sha256(data).hexdigest()
        self._files.append(PlanFile(name=name, digest=digest, first_shard=first_shard, num_shards=len(self._cuts)))
        self._tables, self._cuts = [], []
        self._file_prompts = self._file_tokens = 0


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined


def _update_digest(digest: "hashlib._Hash", block: pa.Table) -> None:
    for row_digest in block["row_digest"].to_pylist():
        digest.update(row_digest)
