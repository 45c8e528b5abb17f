"""Prompts to a fixed list of shards, decided before any engine starts.

One row of ``plan/*.parquet`` is one shard: its number, and its prompts' ids, tokens and masks, in input order. The
shard is the unit of work, of commit, of retry and of resume; nothing later changes what is in it.

Shapes: T tokens of a prompt.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hsray.seen import FirstSeen, Sources
from hsray.sources import PromptError
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

#: Lists the prompts that an explicit policy left out, each with its reason.
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
    duplicates: Literal["keep", "drop"]
    """Of prompts with the tokens and mask of an earlier one."""
    prompts_digest: str | None = None
    """Over the dataset's rows in its own order, where the prompts come in another."""
    on_shape: Callable[[str, str], None] | None = None
    """Told the rows' shape, and the place of the first, as soon as it is known."""


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
    num_truncated: int
    """Prompts cut to `max_tokens`."""
    length_histogram: tuple[int, ...]
    """Prompts of up to 2^i tokens, but more than 2^(i-1), for each i."""
    prompts_digest: str
    """Over the dataset's rows, in order."""

    @property
    def digest(self) -> str:
        """SHA-256 over the files' digests."""
        return hashlib.sha256("\n".join(file.digest for file in self.files).encode()).hexdigest()

    @property
    def num_shards(self) -> int:
        return len(self.shard_tokens)


def shard_name(shard: int, file_format: str = "parquet") -> str:
    """The object that holds a shard: ``shards/000012.parquet``, or ``.arrow``."""
    return f"shards/{shard_stem(shard)}.{file_format}"


def shard_stem(shard: int) -> str:
    """What a shard's number is in the name of its file."""
    return f"{shard:06d}"


def shard_number(name: str, file_format: str = "parquet") -> int | None:
    """The shard that a file of ``shards/`` holds; None for a file of another name."""
    stem, _, _ = name.partition(".")
    if not stem.isdecimal() or shard_name(int(stem), file_format) != f"shards/{name}":
        return None
    return int(stem)


def write_plan(blocks: Iterable[pa.Table], store: Store | None, options: PlanOptions) -> Plan:
    """Cuts prompts (tables of `hsray.prompts.PROMPTS_SCHEMA`, in order) into shards and publishes ``plan/``.

    A shard takes prompts while their states fit `shard_bytes`; a prompt larger than that is a shard of its own. What is
    left out is listed in `DROPPED_NAME`. Without a store the plan is made, and nothing is written.

    Raises:
        PromptError: the first row that cannot be used or is of another shape than those before it, or two rows with one id,
            named by file and line.
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


def list_dropped(store: Store, rows: Sequence[tuple[str, str, int, str]]) -> None:
    """Adds rows of `DROPPED_SCHEMA` to the list of what was left out, in place of those of the same sources, if any."""
    listed = pa.Table.from_pylist([dict(zip(DROPPED_SCHEMA.names, row, strict=True)) for row in rows], DROPPED_SCHEMA)
    if store.exists(DROPPED_NAME):
        before = pq.read_table(pa.BufferReader(store.read(DROPPED_NAME)), schema=DROPPED_SCHEMA)
        others = pc.invert(pc.is_in(before["source"], listed["source"].combine_chunks()))
        listed = pa.concat_tables([before.filter(others), listed])
    with store.staged(DROPPED_NAME) as sink:
        pq.write_table(listed, sink)


class ShardCutter:
    """Where one shard ends and the next begins."""

    def __init__(self, options: "PlanOptions"):
        self._options = options
        self._tokens_each = options.shard_bytes // options.bytes_per_token
        self.shard_prompts: list[int] = []
        self.shard_tokens: list[int] = []
        self.longest_prompt = 0
        self.length_histogram = [0] * 32
        self._prompts = self._tokens = 0

    def add(self, lengths: Sequence[int]) -> list[int]:
        """Takes the next prompts, by their tokens; gives those, by their place among them, before which a shard ended."""
        ends = []
        prompts, tokens, most = self._prompts, self._tokens, self._tokens_each
        for place, num_tokens in enumerate(lengths):
            if tokens + num_tokens > most and prompts:
                self._prompts, self._tokens = prompts, tokens
                self.close()
                ends.append(place)
                prompts = tokens = 0
            prompts += 1
            tokens += num_tokens
            self.length_histogram[(num_tokens - 1).bit_length()] += 1
        self._prompts, self._tokens = prompts, tokens
        self.longest_prompt = max(self.longest_prompt, max(lengths, default=0))
        return ends

    def close(self) -> None:
        """Ends the open shard, if it holds a prompt."""
        if self._prompts:
            self.shard_prompts.append(self._prompts)
            self.shard_tokens.append(self._tokens)
            self._prompts = self._tokens = 0


class _PlanWriter:
    """The shards and the file being filled."""

    def __init__(self, store: Store | None, options: PlanOptions):
        self._store, self._options = store, options
        self._cutter = ShardCutter(options)
        self._rows = hashlib.sha256()
        self._ids, self._contents = FirstSeen(), FirstSeen()
        self._sources = Sources()
        self._repeats: dict[str, int] = {}
        self._shape: tuple[str, str] | None = None  # and the place of the first row that has it
        self._dropped: list[pa.Table] = []
        self._num_truncated = 0
        self._tables: list[pa.Table] = []  # of the open file
        self._file_prompts = self._file_tokens = 0
        self._cuts: list[int] = []  # of the open file: prompts before the end of each closed shard
        self._files: list[PlanFile] = []

    def add(self, block: pa.Table) -> None:
        _update_digest(self._rows, block)
        self._sources.add(block["source"])
        self._check_rows(block)
        block = block.set_column(0, "source", self._sources.last())
        dropped = block.filter(block["dropped"].is_valid())
        self._drop(dropped, dropped["dropped"])
        numbers = np.flatnonzero(block["dropped"].is_null().to_numpy()) + self._sources.first_of_last
        block = block.filter(block["dropped"].is_null())
        if self._options.duplicates == "drop":
            block, numbers = self._drop_repeated(block, numbers)
        ids = pa.array(self._unique_ids(block["prompt_id"].to_pylist(), numbers), pa.string())
        self._num_truncated += pc.sum(block["truncated"]).as_py() or 0
        lengths = pc.list_value_length(block["input_ids"]).to_pylist()
        if lengths and max(lengths) * self._options.value_bytes_per_token > MAX_VALUE_BYTES:
            self._refuse_size(ids[int(np.argmax(lengths))].as_py(), max(lengths))
        self._fill(block.select(["input_ids", "loss_mask"]).add_column(0, "prompt_id", ids), lengths)

    def finish(self) -> Plan:
        self._cutter.close()
        num_dropped = sum(map(len, self._dropped))
        if not self._cutter.shard_tokens:
            raise PromptError(
                f"the dataset has no prompt to build from ({len(self._sources)} rows, {num_dropped} dropped)"
            )
        self._cuts.append(self._file_prompts)
        self._close_file()
        if self._dropped and self._store:
            with self._store.staged(DROPPED_NAME) as sink:
                pq.write_table(pa.concat_tables(self._dropped), sink)
        return Plan(
            files=tuple(self._files),
            shard_prompts=tuple(self._cutter.shard_prompts),
            shard_tokens=tuple(self._cutter.shard_tokens),
            longest_prompt=self._cutter.longest_prompt,
            num_dropped=num_dropped,
            num_truncated=self._num_truncated,
            length_histogram=tuple(self._cutter.length_histogram[: (self._cutter.longest_prompt - 1).bit_length() + 1]),
            prompts_digest=self._options.prompts_digest or self._rows.hexdigest(),
        )

    def _check_rows(self, block: pa.Table) -> None:
        """Raises PromptError for the first row with an error, or of another shape than the rows before it."""
        shapes = pc.unique(block["shape"]).drop_null().to_pylist()
        if block["error"].null_count == len(block) and len({*shapes, *(self._shape or ())[:1]}) <= 1 and self._shape:
            return
        columns = self._sources.last(), block["shape"], block["error"]
        for source, shape, error in zip(*(column.to_pylist() for column in columns), strict=True):
            if error:
                raise PromptError(f"{source}: {error}")
            if self._shape is None:
                self._shape = shape, source
                if self._options.on_shape:
                    self._options.on_shape(shape, source)
            if shape != self._shape[0]:
                raise PromptError(
                    f"{source}: a row of shape {shape!r}, where {self._shape[1]} has shape {self._shape[0]!r}; give rows of "
                    "one shape, or name its columns with columns="
                )

    def _drop(self, block: pa.Table, reasons: "pa.ChunkedArray | pa.Array") -> None:
        if len(block):
            columns = [block["source"], block["prompt_id"], pc.list_value_length(block["input_ids"]), reasons]
            self._dropped.append(pa.table(columns, schema=DROPPED_SCHEMA))

    def _drop_repeated(self, block: pa.Table, numbers: np.ndarray) -> tuple[pa.Table, np.ndarray]:
        """Leaves out the prompts whose tokens and mask came before."""
        earlier = self._contents.find(block["content_digest"].to_pylist(), numbers)
        repeated = earlier >= 0
        reasons = [f"the tokens and mask of {self._sources.name(number)}" for number in earlier[repeated].tolist()]
        self._drop(block.filter(pa.array(repeated)), pa.array(reasons, pa.string()))
        return block.filter(pa.array(~repeated)), numbers[~repeated]

    def _unique_ids(self, ids: list[str], numbers: np.ndarray) -> list[str]:
        """The prompts' final ids: content that comes again, without an id of its own, is kept under another."""
        earlier = self._ids.find(ids, numbers)
        for place in np.flatnonzero(earlier >= 0).tolist():
            prompt_id = ids[place]
            if not prompt_id.startswith("#"):
                raise PromptError(
                    f"{self._sources.name(int(numbers[place]))}: its id {prompt_id!r} is that of "
                    f"{self._sources.name(int(earlier[place]))} too; ids must differ, or be left out"
                )
            self._repeats[prompt_id] = self._repeats.get(prompt_id, 1) + 1
            ids[place] = f"{prompt_id}-{self._repeats[prompt_id]}"
        return ids

    def _refuse_size(self, prompt_id: str, num_tokens: int) -> None:
        num_bytes = num_tokens * self._options.value_bytes_per_token
        raise PromptError(
            f"prompt {prompt_id!r} has {num_tokens} tokens, {num_bytes} bytes a layer; Parquet holds no value of 2 GiB: "
            f"split it, or pass max_tokens={MAX_VALUE_BYTES // self._options.value_bytes_per_token} with too_long='drop' or "
            "'truncate'"
        )

    def _fill(self, table: pa.Table, lengths: list[int]) -> None:
        """Adds prompts to the open file, and closes it where it is full."""
        start = 0
        for end in self._cutter.add(lengths):
            self._file_tokens += sum(lengths[start:end])
            self._keep(table.slice(start, end - start))
            self._cuts.append(self._file_prompts)
            start = end
            if len(self._cuts) >= FILE_SHARDS or self._file_tokens >= FILE_TOKENS:
                self._close_file()
        self._file_tokens += sum(lengths[start:])
        self._keep(table.slice(start))

    def _keep(self, table: pa.Table) -> None:
        self._file_prompts += len(table)
        if self._store:
            self._tables.append(table)

    def _close_file(self) -> None:
        num_shards, cuts, tables = len(self._cuts), self._cuts, self._tables
        self._tables, self._cuts = [], []
        self._file_prompts = self._file_tokens = 0
        if self._store is None:
            return
        first_shard = sum(file.num_shards for file in self._files)
        prompts = pa.concat_tables(tables).combine_chunks()
        offsets = pa.array([0, *cuts], pa.int32())
        lists = [pa.ListArray.from_arrays(offsets, _one_chunk(prompts[name])) for name in PLAN_SCHEMA.names[1:]]
        shards = pa.array(range(first_shard, first_shard + num_shards), pa.int32())
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
        self._files.append(PlanFile(name=name, digest=digest, first_shard=first_shard, num_shards=num_shards))


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined


def _update_digest(digest: "hashlib._Hash", block: pa.Table) -> None:
    digest.update(b"".join(block["row_digest"].drop_null().to_pylist()))
