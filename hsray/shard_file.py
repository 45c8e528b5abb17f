"""A published shard, open for reading and held against what it must be; nothing in it is believed before.

A dataset may come from anywhere. What a file says of itself is compared with the manifest when it is opened, before
memory is taken for its columns; every value's length is compared with its prompt's tokens when it is read. No code comes
out of a file: its columns have the plain types of the format, or it is refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hsray.containers import open_container
from hsray.layers import column_name
from hsray.model import STORED_BYTES
from hsray.plan import shard_name
from hsray.shard import ShardError, shard_schema
from hsray.store import Store

#: A file that claims to hold more than so many times its bytes is refused; states compress to about 0.7.
MAX_RATIO = 1000

REMEDY = "remove it, and build again to restore it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedShard:
    """What a shard must be, as its dataset's manifest says."""

    shard: int
    identity_digest: str
    layers: tuple[int | str, ...]
    hidden_size: int
    dtype: str
    file_format: str
    num_prompts: int
    num_tokens: int
    digest: str | None = None
    """None where no inventory says it yet."""

    @property
    def name(self) -> str:
        """Of its object."""
        return shard_name(self.shard, self.file_format)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's state of one layer."""
        return self.hidden_size * STORED_BYTES[self.dtype]


class ShardFile:
    """One published shard of a dataset, open; threads may share it.

    Raises:
        ShardError: the file is damaged, or another dataset's or shard's.
        FileNotFoundError: it is not there.
    """

    def __init__(self, store: Store, expected: ExpectedShard):
        self.expected = expected
        self.url = f"{store.url}/{expected.name}"
        self._source = store.open(expected.name)
        try:
            with _damage_named(self.url):
                self._file = open_container(store, expected.name, self._source, expected.file_format)
                self.schema: pa.Schema = self._file.schema
                self._check_labels()
                self._check_schema()
                self._check_claims(self._source.size())
        except BaseException:
            self._source.close()
            raise
        self.group_starts = np.cumsum([0, *self._file.group_rows])
        """The row at which each row group begins, and the number of rows: int64 [groups + 1]."""

    @property
    def num_groups(self) -> int:
        """Row groups, each of which is read as a whole."""
        return len(self.group_starts) - 1

    @property
    def digest(self) -> str:
        """Of what the shard holds, as the file says."""
        return _text(self.schema.metadata, "digest")

    def find(self, row: int) -> tuple[int, int]:
        """The row group of a shard's row, and the row in it."""
        group = int(np.searchsorted(self.group_starts, row, side="right")) - 1
        return group, row - int(self.group_starts[group])

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Some columns of a row group, and ``num_tokens``; each column is one chunk, each value as long as its prompt.

        Raises:
            ShardError: they are damaged.
        """
        names = ["num_tokens", *(name for name in columns if name != "num_tokens")]
        with _damage_named(self.url):
            table = self._file.read(group, names)
            if "prompt_id" in names:
                table["prompt_id"].validate(full=True)  # its bytes are UTF-8
        self._check_lengths(table)
        return table

    def column(self, name: str) -> pa.ChunkedArray:
        """A whole column, each of its values as long as its prompt."""
        chunks = [self.read(group, [name])[name] for group in range(self.num_groups)]
        return pa.chunked_array([chunk for column in chunks for chunk in column.chunks], self.schema.field(name).type)

    def close(self) -> None:
        """Closes the file; tables that were read stay valid."""
        self._source.close()

    def _check_labels(self) -> None:
        expected = self.expected
        for name, wanted in (
            ("identity_digest", expected.identity_digest),
            ("shard", str(expected.shard)),
            ("digest", expected.digest),
        ):
            found = _text(self.schema.metadata, name)
            if wanted is not None and found != wanted:
                raise ShardError(
                    f"{self.url} is not of this dataset: its {name} is {found!r}; {wanted!r} wanted: {REMEDY}"
                )
        num_rows = sum(self._file.group_rows)
        if num_rows != expected.num_prompts:
            raise ShardError(f"{self.url} holds {num_rows} prompts; the plan says {expected.num_prompts}: {REMEDY}")

    def _check_schema(self) -> None:
        expected = self.expected
        wanted = shard_schema(expected.layers, hidden_size=expected.hidden_size, dtype=expected.dtype)
        if self.schema.names != wanted.names:
            raise ShardError(f"{self.url} has the columns {self.schema.names}; {wanted.names} wanted: {REMEDY}")
        for field in wanted:
            found = self.schema.field(field.name)
            about = {key: (found.metadata or {}).get(key) for key in field.metadata or {}}
            if not found.equals(field) or about != (field.metadata or {}):
                raise ShardError(
                    f"{self.url}, column {field.name!r}: {found.type} {about}; {field.type} {field.metadata or ''} wanted: "
                    f"{REMEDY}"
                )

    def _check_claims(self, file_bytes: int) -> None:
        """Before anything is allocated for them: the sizes that the file claims are the plan's."""
        expected = self.expected
        state_bytes = expected.num_tokens * expected.row_bytes
        slack = 1024 * (expected.num_prompts + len(self._file.group_rows))
        limits = {column_name(layer): state_bytes + slack for layer in expected.layers}
        for name, num_bytes in self._file.claims().items():
            if num_bytes > limits.get(name, MAX_RATIO * file_bytes):
                raise ShardError(
                    f"{self.url}, column {name!r}: it claims {num_bytes} bytes, more than it can have; {REMEDY}"
                )
        if state_bytes * len(expected.layers) > MAX_RATIO * file_bytes:
            raise ShardError(
                f"{self.url} of {file_bytes} bytes claims {expected.num_prompts} prompts, {expected.num_tokens} tokens of "
                f"{expected.row_bytes} bytes: {REMEDY}"
            )

    def _check_lengths(self, table: pa.Table) -> None:
        num_tokens = table["num_tokens"]
        for name in table.column_names[1:]:
            if name == "prompt_id":
                continue
            is_layer = name.startswith("layer_")
            lengths = (pc.binary_length if is_layer else pc.list_value_length)(table[name])
            wanted = pc.multiply(num_tokens.cast(pa.int64()), self.expected.row_bytes if is_layer else 1)
            wrong = pc.index(pc.equal(lengths, wanted), False).as_py()
            if wrong >= 0:
                unit = "bytes" if is_layer else "values"
                raise ShardError(
                    f"{self.url}, column {name!r}: {lengths[wrong]} {unit}; {wanted[wrong]} are a prompt's of "
                    f"{num_tokens[wrong]} tokens: {REMEDY}"
                )


def check_shard(store: Store, expected: ExpectedShard) -> str:
    """A published shard's digest, as it says; raises as `ShardFile` does, and keeps nothing open."""
    file = ShardFile(store, expected)
    try:
        return file.digest
    finally:
        file.close()


@contextmanager
def _damage_named(url: str) -> Iterator[None]:
    """Raises ShardError for what Arrow says of a file's content; a filesystem's own errors pass."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        # Arrow's word for a bad file is a bare OSError; one from the system or the network has a number or a type.
        of_the_system = isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None)
        if of_the_system or isinstance(error, MemoryError):
            raise
        raise ShardError(f"{url} is damaged: {error}; {REMEDY}") from error


def _text(metadata: dict[bytes, bytes] | None, name: str) -> str:
    return (metadata or {}).get(f"hsray.{name}".encode(), b"none").decode(errors="replace")
