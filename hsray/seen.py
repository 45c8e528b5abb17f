"""What a plan remembers of every prompt, in a few bytes each: where it came from, and whether its like came before."""

from bisect import bisect_right
from collections.abc import Hashable, Sequence

import numpy as np
import pyarrow as pa


class Sources:
    """Where each prompt came from, by its number, in little memory: names of neighbours differ in a digit or two."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: list[pa.Buffer] = []
        self._num_prompts = 0

    def __len__(self) -> int:
        return self._num_prompts

    @property
    def first_of_last(self) -> int:
        """The number of the last block's first prompt."""
        return self._starts[-1]

    def add(self, sources: pa.ChunkedArray) -> None:
        """The next block's."""
        names = [name or f"row {self._num_prompts + place}" for place, name in enumerate(sources.to_pylist())]
        sink = pa.BufferOutputStream()
        batch = pa.record_batch([pa.array(names, pa.string())], names=["source"])
        with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_batch(batch)
        self._starts.append(self._num_prompts)
        self._blocks.append(sink.getvalue())
        self._num_prompts += len(names)

    def last(self) -> pa.ChunkedArray:
        """The last block's."""
        return self._block(len(self._blocks) - 1)

    def name(self, number: int) -> str:
        """Of one prompt."""
        block = bisect_right(self._starts, number) - 1
        return self._block(block)[number - self._starts[block]].as_py()

    def _block(self, block: int) -> pa.ChunkedArray:
        return pa.ipc.open_stream(self._blocks[block]).read_all()["source"]


class FirstSeen:
    """Which of ever more keys came before, in 16 bytes a key: sorted runs of their hashes, merged as they grow.

    A hash has 64 bits and another seed in each process: among ten million keys two differing ones pass for the same with a
    chance of 3 in a million, and the build that then fails, or drops one too many, would not do so again.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []  # hashes, ascending, and the number of each

    def find(self, keys: Sequence[Hashable], numbers: np.ndarray) -> np.ndarray:
        """The number under which each key came first, -1 for one that is new; `numbers` are the keys' own, ascending."""
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
        unique, places, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        first, new = numbers[places], np.full(len(unique), True)
        for run, run_numbers in self._runs:
            at = np.searchsorted(run, unique)
            at[at == len(run)] = 0
            known = run[at] == unique
            first[known], new[known] = run_numbers[at[known]], False
        if new.any():
            self._add(unique[new], first[new])
        return np.where(first[inverse] == numbers, -1, first[inverse])

    def _add(self, hashes: np.ndarray, numbers: np.ndarray) -> None:
        while self._runs and len(self._runs[-1][0]) < 2 * len(hashes):
            run, run_numbers = self._runs.pop()
            hashes, numbers = np.concatenate([run, hashes]), np.concatenate([run_numbers, numbers])
            order = np.argsort(hashes, kind="stable")
            hashes, numbers = hashes[order], numbers[order]
        self._runs.append((hashes, numbers))
