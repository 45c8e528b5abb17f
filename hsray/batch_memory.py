"""Memory that a `DataLoader`'s worker fills and its consumer maps, again and again, so that batches cross without a copy.

Torch sends a tensor out of a worker in a new shared file, whose pages the kernel has to find and clear first; for batches of
tens of megabytes that takes far longer than reading them. Here the worker fills a file of its own, sends its descriptor, and
fills it again once neither process has a tensor in it.
"""

import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch

#: Of a batch's tensors, in bytes.
ALIGNMENT = 64

#: Before a batch, at the file's beginning; the first byte says whether a consumer has the batch.
HEAD_BYTES = ALIGNMENT

#: Memories that a worker keeps though nobody needs them.
SPARE_MEMORIES = 4


class SharedMemory:
    """An anonymous file in memory, mapped by this process and by those that it is sent to."""

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create("hsray-batch")
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, HEAD_BYTES + num_bytes)
        self._mapping = mmap.mmap(self.descriptor, 0)
        self._in_use: Callable[[], Any] = lambda: None
        self.address = 0
        """Of the memory that `take` gave."""

    @property
    def is_free(self) -> bool:
        """Whether no tensor of either process is in it."""
        return self._in_use() is None and not self._mapping[0]

    def take(self) -> torch.Tensor:
        """The memory as uint8; it is not free until nothing is left of the tensor and its views."""
        values = np.frombuffer(self._mapping, np.uint8, offset=HEAD_BYTES)
        self._in_use, self.address = weakref.ref(values), values.ctypes.data
        return torch.frombuffer(values, dtype=torch.uint8)

    def give(self) -> bool:
        """Marks the memory as a consumer's, if it is no one's yet: one alone can say when it is done."""
        if self._mapping[0]:
            return False
        self._mapping[0] = 1
        return True


class Memories:
    """The memories of one worker."""

    def __init__(self) -> None:
        self._memories: list[SharedMemory] = []

    def free(self, num_bytes: int) -> SharedMemory:
        """One that is free, or a new one."""
        spare = [memory for memory in self._memories if memory.is_free]
        fitting = [memory for memory in spare if memory.num_bytes == num_bytes][:SPARE_MEMORIES]
        self._memories = [memory for memory in self._memories if memory not in spare or memory in fitting]
        if not fitting:
            fitting = [SharedMemory(num_bytes)]
            self._memories += fitting
        return fitting[0]


class SharedBatch(dict):
    """A batch whose tensors are views of a memory; pickled, as a `DataLoader` does, it is the memory and where they lie.

    What is unpickled is a dict. Tensors that are elsewhere, which a ``collate_fn`` may have put in, go torch's own way.
    """

    def __init__(self, content: dict[str, Any], memory: SharedMemory):
        super().__init__(content)
        self._memory = memory

    def __copy__(self) -> "SharedBatch":
        return SharedBatch(self, self._memory)

    def __reduce__(self) -> tuple:
        if not self._memory.give():
            return dict, (dict(self),)
        return _received, (DupFd(self._memory.descriptor), _each(self, self._place))

    def _place(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_contiguous():
            return value
        start = value.data_ptr() - self._memory.address
        if not 0 <= start <= start + value.nbytes <= self._memory.num_bytes:
            return value
        return _Place(start=start, shape=tuple(value.shape), dtype=value.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A tensor in a memory."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        end = self.start + int(np.prod(self.shape)) * self.dtype.itemsize
        return memory[self.start : end].view(self.dtype).view(self.shape)


def _received(sent: DupFd, content: dict[str, Any]) -> dict[str, Any]:
    """A batch in the consumer; the worker has its memory back when the last of its tensors is gone."""
    descriptor = sent.detach()
    mapping = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    values = np.frombuffer(mapping, np.uint8, offset=HEAD_BYTES)
    weakref.finalize(values, _give_back, mapping, os.getpid()).atexit = False
    memory = torch.frombuffer(values, dtype=torch.uint8)
    return _each(content, lambda value: value.view(memory) if isinstance(value, _Place) else value)


def _give_back(mapping: mmap.mmap, process: int) -> None:
    if os.getpid() == process:  # a forked child's copy of a tensor is gone, not its parent's
        mapping[0] = 0


def _each(content: dict[str, Any], act: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: _each(value, act) if isinstance(value, dict) else act(value) for name, value in content.items()}
