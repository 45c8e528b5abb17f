"""The format: a schema, tensors to bytes and back, one shard to one Parquet or Arrow IPC file.

One row is one prompt. A layer's column holds the prompt's states as one ``large_binary`` value: T x D numbers,
row-major, little-endian, in the dtype that the field's metadata names; T is the column ``num_tokens``. Arrow and
Parquet have no bfloat16, and every other type for these numbers is slower, larger or read wrongly by some reader.

    prompt_id: string   num_tokens: int32   input_ids: list<int32>   loss_mask: list<bool>   layer_<i>: large_binary

States in ``float8_e4m3`` are to be multiplied by their token's scale, in a column ``scale_<i>: list<float32>`` beside each layer's.

Field metadata of a layer: ``hsray.layer``, ``hsray.dtype``, ``hsray.hidden_size``. File metadata: ``hsray.*``, of which
``hsray.identity_digest`` and ``hsray.shard`` say which shard of which dataset it is, whatever the file is called, and
``hsray.digest`` what its columns hold (`hsray.digest`); ``hsray.rounding``, of each layer in ``float8_e4m3``, what that did.

Shapes: T tokens of a prompt, S tokens of a shard, D hidden size.
"""

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, TYPE_CHECKING, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hsray.digest import content_digest
from hsray.float8 import FLOAT8, to_float8
from hsray.layers import Layer, column_name
from hsray.model import STORED_BYTES

if TYPE_CHECKING:
    import torch

#: Short prompts share a row group up to this; a longer prompt has one alone, so that reading a prompt reads its own.
ROW_GROUP_BYTES = 16 << 20

MAX_ZSTD_LEVEL = 22

FileFormat = Literal["parquet", "arrow"]


class ShardError(ValueError):
    """A shard's content is not what it must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPrompts:
    """The prompts of one shard, as the plan lists them; one value of each array is one prompt."""

    shard: int
    prompt_ids: pa.StringArray
    input_ids: pa.ListArray
    """Of int32."""
    loss_masks: pa.ListArray
    """Of bool."""

    @classmethod
    def from_plan(cls, plan: pa.Table, row: int) -> "ShardPrompts":
        """One row of a plan (`hsray.plan.PLAN_SCHEMA`), without a copy."""
        return cls(
            shard=plan["shard"][row].as_py(),
            prompt_ids=plan["prompt_id"][row].values,
            input_ids=plan["input_ids"][row].values,
            loss_masks=plan["loss_mask"][row].values,
        )

    def without(self, places: Sequence[int]) -> "ShardPrompts":
        """The others, in their order."""
        if not places:
            return self
        kept = pa.array(np.delete(np.arange(len(self.prompt_ids)), list(places)))
        columns = {name: getattr(self, name).take(kept) for name in ("prompt_ids", "input_ids", "loss_masks")}
        return replace(self, **columns)

    def alone(self, place: int) -> "ShardPrompts":
        """One of them."""
        return self.without([other for other in range(len(self.prompt_ids)) if other != place])

    @property
    def ends(self) -> np.ndarray:
        """The row after each prompt's last, and 0 before the first: int64 [prompts + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each prompt, int32."""
        return self.input_ids.value_lengths().to_numpy()

    @property
    def tokens(self) -> list[np.ndarray]:
        """Each prompt's token ids, int32 [T]: views."""
        return np.split(self.input_ids.flatten().to_numpy(), self.ends[1:-1])


def shard_schema(
    layers: Sequence[Layer], *, hidden_size: int, dtype: str, metadata: Mapping[str, str] | None = None
) -> pa.Schema:
    """The Arrow schema of a shard; `metadata` is added to the file's, each name under ``hsray.``."""
    fields = [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
    ]
    for layer in layers:
        about = {"hsray.layer": str(layer), "hsray.dtype": dtype, "hsray.hidden_size": str(hidden_size)}
        fields.append(pa.field(column_name(layer), pa.large_binary(), nullable=False, metadata=about))
        for name in state_columns(layer, dtype)[1:]:
            fields.append(pa.field(name, pa.list_(pa.float32()), nullable=False))
    named = {f"hsray.{name}": value for name, value in (metadata or {}).items()}
    return pa.schema(fields, metadata=named)


def state_columns(layer: Layer, dtype: str) -> list[str]:
    """The columns of a layer's states: the numbers, and the scales of those that have them."""
    numbers = column_name(layer)
    return [numbers, numbers.replace("layer_", "scale_", 1)] if dtype == FLOAT8 else [numbers]


def shard_table(prompts: ShardPrompts, states: "Mapping[Layer, torch.Tensor]", schema: pa.Schema) -> pa.Table:
    """A shard as an Arrow table whose layer columns are views of `states` (layer -> [S, D], contiguous), or made of them where
    the schema says ``float8_e4m3``.

    Its metadata is the schema's, with the digest of what it holds.

    Raises:
        ShardError: a layer's shape is not [S, D], or a number is not finite; it names the prompt.
    """
    ends, roundings = prompts.ends, {}
    columns = [prompts.prompt_ids, pa.array(prompts.lengths), prompts.input_ids, prompts.loss_masks]
    for layer, name in layer_columns(schema).items():
        hidden_SD, field = states[layer], schema.field(name)
        check_states(hidden_SD, layer, prompts, ends)
        dtype, scales = field.metadata[b"hsray.dtype"].decode(), []
        if dtype == FLOAT8:
            hidden_SD, scale_S, roundings[str(layer)] = to_float8(hidden_SD)
            scales = [pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(scale_S.numpy()))]
        stored = (FLOAT8 if scales else str(hidden_SD.dtype).removeprefix("torch."), hidden_SD.shape[1])
        wanted = (dtype, int(field.metadata[b"hsray.hidden_size"]))
        if stored != wanted:
            raise ShardError(
                f"layer {layer!r} of shard {prompts.shard}: {stored[0]} of width {stored[1]}; {wanted} wanted"
            )
        row_bytes = hidden_SD.shape[1] * hidden_SD.element_size()
        offsets = pa.py_buffer((ends * row_bytes).astype(np.int64))
        values = pa.py_buffer(_bytes_of(hidden_SD))
        numbers = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(ends) - 1, [None, offsets, values])
        columns += [numbers, *scales]
    if roundings:
        text = json.dumps({layer: asdict(rounding) for layer, rounding in roundings.items()})
        schema = schema.with_metadata({**(schema.metadata or {}), b"hsray.rounding": text.encode()})
    return digested(pa.table(columns, schema=schema))


def digested(table: pa.Table) -> pa.Table:
    """A shard's table with the digest of what it holds in its metadata."""
    digest = content_digest(zip(table.column_names, table.columns, strict=True))
    return table.replace_schema_metadata({**(table.schema.metadata or {}), b"hsray.digest": digest.encode()})


def check_states(hidden_SD: "torch.Tensor", layer: Layer, prompts: ShardPrompts, ends: np.ndarray) -> None:
    """Raises ShardError unless a layer has a row for each token and every number is finite."""
    import torch

    if hidden_SD.dim() != 2 or hidden_SD.shape[0] != ends[-1] or not hidden_SD.is_contiguous():
        raise ShardError(
            f"layer {layer!r} of shard {prompts.shard}: shape {list(hidden_SD.shape)}, {ends[-1]} rows wanted"
        )
    if all_finite(_bytes_of(hidden_SD), str(hidden_SD.dtype).removeprefix("torch.")):
        return
    bad = (~torch.isfinite(hidden_SD)).any(dim=1).nonzero()[:, 0].tolist()
    named = sorted({prompts.prompt_ids[int(np.searchsorted(ends, row, side="right")) - 1].as_py() for row in bad})
    raise ShardError(
        f"layer {layer!r} of shard {prompts.shard} has NaN or infinite numbers in {len(bad)} rows of the prompts "
        f"{', '.join(map(repr, named[:8]))}; the model overflows in this dtype: try dtype='bfloat16' or 'float32'"
    )


def all_finite(values: np.ndarray, dtype: str) -> bool:
    """Whether floating-point numbers, given as their bytes, hold no NaN and no infinity.

    Infinity and the NaNs are the largest bit patterns of either sign, so two integer maxima tell: one pass each at
    memory speed, where `torch.isfinite` makes two temporaries (0.2 against 6 GB/s on one core, bfloat16).
    """
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000, FLOAT8: 0x7F}[dtype]  # float8: NaN alone
    bits = 8 * STORED_BYTES[dtype]
    signed, unsigned = values.view(f"i{bits // 8}"), values.view(f"u{bits // 8}")
    return not len(signed) or bool(signed.max() < infinity and unsigned.max() < infinity + (1 << (bits - 1)))


def write_table(
    table: pa.Table, sink: IO[bytes], *, compression: str = "none", file_format: FileFormat = "parquet"
) -> None:
    """Writes a shard's table as a file: Parquet, one row group a prompt or up to `ROW_GROUP_BYTES`, or Arrow IPC, one record
    batch a prompt.

    `compression` is ``"none"`` or ``"zstd:LEVEL"``, see `codec`.
    """
    name, level = codec(compression, file_format)
    if file_format == "arrow":
        with pa.ipc.new_file(sink, table.schema) as writer:
            for batch in table.to_batches(max_chunksize=1):
                writer.write_batch(batch)
        return
    writer = pq.ParquetWriter(
        sink,
        table.schema,
        compression=name,
        compression_level=level,
        # A page of several values may not pass 2 GiB; states neither repeat nor sort.
        write_batch_size=1,
        use_dictionary=False,
        write_statistics=["prompt_id", "num_tokens"],
    )
    with writer:
        for start, stop in row_groups(table):
            writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)


def codec(compression: str, file_format: str) -> tuple[str, int | None]:
    """Parquet's codec and level for ``"none"`` or ``"zstd:LEVEL"``.

    Raises:
        ValueError: it is neither, or the file's format is not known or takes no compression.
    """
    if file_format not in get_args(FileFormat):
        raise ValueError(f"file_format={file_format!r}; wanted {' or '.join(map(repr, get_args(FileFormat)))}")
    if file_format == "arrow" and compression != "none":
        raise ValueError(
            f"compression={compression!r} with file_format='arrow', which is there to be mapped as it is: leave one of them out"
        )
    levels = {"none": ("none", None)} | {f"zstd:{level}": ("zstd", level) for level in range(1, MAX_ZSTD_LEVEL + 1)}
    if compression not in levels:
        raise ValueError(f"compression={compression!r}; wanted 'none' or 'zstd:1' to 'zstd:{MAX_ZSTD_LEVEL}'")
    return levels[compression]


def row_groups(table: pa.Table) -> Iterator[tuple[int, int]]:
    """The row ranges that share a row group."""
    layers = [table.schema.field(name).metadata for name in table.column_names if name.startswith("layer_")]
    row_bytes = sum(int(about[b"hsray.hidden_size"]) * STORED_BYTES[about[b"hsray.dtype"].decode()] for about in layers)
    start = num_bytes = 0
    for row, num_tokens in enumerate(table["num_tokens"].to_pylist()):
        if row > start and num_bytes + num_tokens * row_bytes > ROW_GROUP_BYTES:
            yield start, row
            start, num_bytes = row, 0
        num_bytes += num_tokens * row_bytes
    if len(table):
        yield start, len(table)


def stamped(schema: pa.Schema, *, shard: int, identity_digest: str) -> pa.Schema:
    """The schema of one shard of a dataset."""
    stamp = {b"hsray.identity_digest": identity_digest.encode(), b"hsray.shard": str(shard).encode()}
    return schema.with_metadata({**(schema.metadata or {}), **stamp})


def layer_columns(schema: pa.Schema) -> dict[Layer, str]:
    """The layers of a shard: layer -> column name, in depth order."""
    layers = {}
    for field in schema:
        if field.name.startswith("layer_"):
            layer = field.name.removeprefix("layer_")
            layers[int(layer) if layer.isdecimal() else layer] = field.name
    return layers


def to_tensor(column: pa.Array, field: pa.Field, num_tokens: int) -> "torch.Tensor":
    """The states of all of a column's prompts, [S, D], as a view of the Arrow buffer, which it keeps alive.

    Raises:
        ShardError: the values' bytes are not S x D numbers.
    """
    import torch

    dtype, hidden_size = field.metadata[b"hsray.dtype"].decode(), int(field.metadata[b"hsray.hidden_size"])
    _, offsets_buffer, values_buffer = column.buffers()
    start, stop = np.frombuffer(offsets_buffer, np.int64)[[column.offset, column.offset + len(column)]].tolist()
    wanted = num_tokens * hidden_size * STORED_BYTES[dtype]
    if stop - start != wanted or not 0 <= start <= stop <= values_buffer.size:
        raise ShardError(
            f"column {field.name!r}: {stop - start} bytes; {wanted} are {num_tokens} x {hidden_size} {dtype}"
        )
    memory = (ctypes.c_char * wanted).from_address(values_buffer.address + start)
    memory.owner = values_buffer  # ctypes holds an address, not its owner
    kind = torch.float8_e4m3fn if dtype == FLOAT8 else getattr(torch, dtype)
    return torch.frombuffer(memory, dtype=kind).view(num_tokens, hidden_size)


def _bytes_of(tensor: "torch.Tensor") -> np.ndarray:
    """A contiguous CPU tensor's memory as bytes, without a copy."""
    import torch

    return tensor.view(torch.uint8).view(-1).numpy()
