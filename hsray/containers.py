"""The containers that a shard comes in: Parquet, and Arrow IPC files that a reader maps instead of reading.

Both hold the same columns, and their prompts in groups that are read as a whole: Parquet's row groups, Arrow's record batches of
one prompt each. What a file claims is known before memory is taken for it: Parquet's footer says sizes, and Arrow's record
batches are views of the file, since compressed ones are refused.
"""

import base64
import io
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from hsray.store import Store

#: What is read of a file's end at first.
TAIL_BYTES = 64 << 10

#: Arrow's message about a record batch has some 100 bytes a column.
MAX_MESSAGE_BYTES = 1 << 20

EXTENSION = b"ARROW:extension"


class Container(ABC):
    """A shard's file, open; threads may share it. What is wrong with it is an ArrowException."""

    schema: pa.Schema
    group_rows: list[int]
    """Rows of each group, as the file claims."""

    @abstractmethod
    def claims(self) -> dict[str, int]:
        """Bytes of memory that reading each column will take, where it takes any."""

    @abstractmethod
    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Some columns of a group, each one chunk."""


class ParquetContainer(Container):
    """A Parquet file; of its row groups' columns only those that are asked for are read."""

    def __init__(self, source: pa.NativeFile):
        _refuse_extensions(_decoded(_parquet_footer(source)))
        self._source = source
        file = pq.ParquetFile(source, pre_buffer=True)
        self._metadata, self.schema = file.metadata, file.schema_arrow
        self._groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
        self.group_rows = [group.num_rows for group in self._groups]
        _check_chunks(self._metadata, source.size())
        self._idle = [file]

    def claims(self) -> dict[str, int]:
        """See `Container`: what the footer says of the column chunks."""
        claimed = dict.fromkeys(self.schema.names, 0)
        for group in self._groups:
            # Each column, lists too, is one in the file, in the schema's order.
            for name, chunk in zip(self.schema.names, map(group.column, range(group.num_columns)), strict=True):
                claimed[name] += chunk.total_uncompressed_size
                if min(group.num_rows, chunk.total_uncompressed_size, chunk.total_compressed_size) < 0:
                    raise pa.ArrowInvalid("it claims a negative number of rows or bytes")
        return claimed

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """See `Container`: copies out of the file."""
        try:
            file = self._idle.pop()
        except IndexError:  # others are reading; a reader of Arrow's is for one thread
            file = pq.ParquetFile(self._source, metadata=self._metadata, pre_buffer=True)
        table = file.read_row_group(group, columns=list(columns), use_threads=False).combine_chunks()
        self._idle.append(file)
        return table


class ArrowContainer(Container):
    """An Arrow IPC file; locally its record batches are views of private pages, elsewhere the columns asked for are read."""

    def __init__(self, source: pa.NativeFile, map_file: Callable[[], pa.NativeFile] | None):
        footer = _arrow_footer(source)
        _refuse_extensions([footer])
        self._source, self._map, self._blocks = source, map_file, _blocks(footer)
        file = pa.ipc.open_file(source)
        self.schema = file.schema
        self.group_rows = [1] * file.num_record_batches
        if len(self._blocks) != file.num_record_batches:
            raise pa.ArrowInvalid("its footer is not understood")

    def claims(self) -> dict[str, int]:
        """See `Container`: nothing but what is in the file."""
        return {}

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """See `Container`: views of pages that are mapped for this call, where the file is local."""
        self._refuse_compression(group)
        if self._map is not None:
            file = pa.ipc.open_file(self._map())
        else:  # with fields to choose from Arrow reads, and copies, those alone
            fields = sorted(map(self.schema.get_field_index, columns))
            options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            file = pa.ipc.open_file(self._source, options=options)
        batch = file.get_batch(group).select(list(columns))
        if batch.num_rows != 1:
            raise pa.ArrowInvalid(f"record batch {group} holds {batch.num_rows} prompts; 1 wanted")
        batch.validate(full=True)  # as views of the file its offsets are a stranger's
        return pa.Table.from_batches([batch])

    def _refuse_compression(self, group: int) -> None:
        """Raises for a record batch whose buffers would be unpacked into as much memory as they claim to need."""
        start, num_bytes = self._blocks[group]
        if not 8 < num_bytes <= MAX_MESSAGE_BYTES:
            raise pa.ArrowInvalid(f"record batch {group} has a message of {num_bytes} bytes")
        message = self._source.read_at(num_bytes, start)[8:]
        batch = _pointed(message, _field(message, _root(message), 2))
        if _field(message, batch, 3) is not None:
            raise pa.ArrowInvalid(f"record batch {group} is compressed, which no shard's is")


def open_container(store: Store, name: str, source: pa.NativeFile, file_format: str) -> Container:
    """A shard's file, of which `source` was opened."""
    if file_format == "parquet":
        return ParquetContainer(source)
    return ArrowContainer(source, partial(store.open_private, name) if store.is_local else None)


def _refuse_extensions(texts: Sequence[bytes]) -> None:
    """Raises for a schema with extension types, before Arrow asks who registered them to read their metadata.

    Ray before 2.55, for one, unpickled what it found there.
    """
    if any(EXTENSION in text for text in texts):
        raise pa.ArrowInvalid("it has columns of an extension type, which no shard has")


class _NothingRead(Exception):
    """Arrow has begun to read."""


class _Unread(io.RawIOBase):
    """A file of so many bytes, none of which can be had."""

    def __init__(self, num_bytes: int):
        self._num_bytes, self._place = num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._num_bytes}[whence] + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        raise _NothingRead


def _check_chunks(metadata: pq.FileMetaData, file_bytes: int) -> None:
    """Raises for a footer whose column chunks Arrow refuses; asked for one of them by itself, PyArrow 26 ends the process.

    Before Arrow reads row groups it looks at all of their chunks, and raises what it finds; here it gets no further.
    """
    file = pq.ParquetFile(pa.PythonFile(_Unread(file_bytes), "r"), metadata=metadata, pre_buffer=True)
    with suppress(_NothingRead):
        file.read_row_groups(range(metadata.num_row_groups), use_threads=False)


def _parquet_footer(source: pa.NativeFile) -> bytes:
    """A Parquet file's footer: before its length and the file's last magic bytes."""
    file_bytes = source.size()
    tail = source.read_at(min(TAIL_BYTES, file_bytes), max(0, file_bytes - TAIL_BYTES))
    footer_bytes = int.from_bytes(tail[-8:-4], "little")
    if len(tail) < footer_bytes + 8 <= file_bytes:
        tail = source.read_at(footer_bytes + 8, file_bytes - footer_bytes - 8)
    return tail[-8 - footer_bytes :]


def _decoded(footer: bytes) -> list[bytes]:
    """What a Parquet footer holds as base64: Arrow's schema is there, wherever it begins among letters and digits."""
    texts = re.findall(rb"[A-Za-z0-9+/]{40,}", footer)
    return [
        base64.b64decode(text[start : start + (len(text) - start) // 4 * 4]) for text in texts for start in range(4)
    ]


def _arrow_footer(source: pa.NativeFile) -> bytes:
    """An Arrow file's footer: a flatbuffer, before its length and the file's last magic bytes."""
    file_bytes = source.size()
    tail = source.read_at(min(TAIL_BYTES, file_bytes), max(0, file_bytes - TAIL_BYTES))
    footer_bytes = int.from_bytes(tail[-10:-6], "little")
    if tail[-6:] != b"ARROW1" or not footer_bytes + 10 <= file_bytes:
        raise pa.ArrowInvalid("it is no Arrow file, or has lost its end")
    if len(tail) < footer_bytes + 10:
        tail = source.read_at(footer_bytes + 10, file_bytes - footer_bytes - 10)
    return tail[-10 - footer_bytes : -10]


def _blocks(footer: bytes) -> list[tuple[int, int]]:
    """Where the message of each record batch begins, and its bytes."""
    vector = _field(footer, _root(footer), 3)
    if vector is None:
        return []
    start = _pointed(footer, vector)
    count = _number(footer, "<I", start)
    if start + 4 + 24 * count > len(footer):
        raise pa.ArrowInvalid("its footer overruns its end")
    return [block[:2] for block in struct.iter_unpack("<qi4xq", footer[start + 4 : start + 4 + 24 * count])]


# Flatbuffers, as much as is needed of them: a table begins with the way back to a list of where its fields stand.


def _root(data: bytes) -> int:
    return _pointed(data, 0)


def _pointed(data: bytes, place: int | None) -> int:
    if place is None:
        raise pa.ArrowInvalid("its messages are not understood")
    return place + _number(data, "<I", place)


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where a table's field stands; None where it has none."""
    places = table - _number(data, "<i", table)
    if 4 + 2 * number >= _number(data, "<H", places):
        return None
    return table + distance if (distance := _number(data, "<H", places + 4 + 2 * number)) else None


def _number(data: bytes, kind: str, place: int) -> int:
    if not 0 <= place <= len(data) - struct.calcsize(kind):
        raise pa.ArrowInvalid("its messages are not understood")
    return struct.unpack_from(kind, data, place)[0]
