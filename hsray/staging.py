"""How a state gets from the model's device to its place in a shard's memory, beside the computation.

On a GPU a copy to the host would hold up the kernels behind it, so rows are first gathered in a small ring of device
memory, one kernel at the device's own speed, and leave from there on a stream of their own. The ring is all the
device memory that the capture takes. Of a short pass, whose kernels wait to be launched, the kernel that would gather the rows
writes them to the host itself, which is one launch in place of six calls. Without a GPU the rows are written straight
to their place.

Copies of a state on its way to the file: the sum of its addends (into the ring), to the host (into the shard's
memory, at the final offset; of a short pass these two are one), into Parquet's page, into the file.

Shapes: B tokens of a batch, S tokens of a shard, D hidden size.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Of the ring. One slot takes 0.3 ms to leave at 55 GB/s; the next is filled meanwhile.
SLOT_BYTES, NUM_SLOTS = 16 << 20, 4

#: A layer's rows in one pass, up to which its kernels wait to be launched (512 tokens of 4,096 bfloat16 numbers on an H200).
DIRECT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """One layer's part of a shard's memory, [S, D]."""

    host_SD: "torch.Tensor"
    device_SD: "torch.Tensor"
    """The same, as the model's device addresses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where some rows of a batch go."""

    batch_row: int
    num_rows: int
    memory: LayerMemory
    row: int
    """The first, in `memory`."""


class HostStaging:
    """Writes rows to their places at once: the model computes on the host."""

    def expose(self, memory: "torch.Tensor") -> "torch.Tensor":
        """A shard's memory as the model's device addresses it, which is as the host does."""
        return memory

    def send(self, addends: "Sequence[torch.Tensor]", places: Sequence[Place]) -> None:
        """Writes the sum of one or two tensors, [B, D] each, to the places of its rows."""
        for place in places:
            _write(addends, place)

    def finish(self) -> None:
        """Returns once everything sent has arrived."""


class DeviceStaging:
    """Sends rows to the host beside the computation: see the module's first words."""

    def __init__(self, device: "torch.device"):
        import torch

        self._stream = torch.cuda.Stream(device)
        self._slots = [torch.empty(SLOT_BYTES, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        self._filled, self._left = ([torch.cuda.Event() for _ in self._slots] for _ in range(2))
        self._sent = 0

    def expose(self, memory: "torch.Tensor") -> "torch.Tensor":
        """A shard's memory, flat uint8, as the device addresses it; it is pinned, so copies run at full speed."""
        import torch

        status: Any = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister of {memory.numel()} bytes failed: {status}")
        return torch.as_tensor(_HostPages(memory))

    def send(self, addends: "Sequence[torch.Tensor]", places: Sequence[Place]) -> None:
        """Starts to write the sum of one or two tensors, [B, D] each, to the places of its rows.

        The tensors may be overwritten as soon as this returns, by work of the current stream.
        """
        row_bytes = addends[0].shape[1] * addends[0].element_size()
        num_rows = max(place.batch_row + place.num_rows for place in places)
        if num_rows * row_bytes <= DIRECT_BYTES:
            for place in places:
                _write(addends, place)
            return
        slot_rows = SLOT_BYTES // row_bytes
        for start in range(0, num_rows, slot_rows):
            self._send_slot([addend[start : min(start + slot_rows, num_rows)] for addend in addends], start, places)

    def _send_slot(self, addends: "list[torch.Tensor]", start: int, places: Sequence[Place]) -> None:
        import torch

        index = self._sent % NUM_SLOTS
        num_rows, hidden_size = addends[0].shape
        current = torch.cuda.current_stream()
        if self._sent >= NUM_SLOTS:  # the first slots of a pass are free, since `finish` waited for all
            current.wait_event(self._left[index])
        slot_BD = self._slots[index].view(addends[0].dtype)[: num_rows * hidden_size].view(num_rows, hidden_size)
        _sum(addends, out=slot_BD)
        self._filled[index].record(current)
        self._stream.wait_event(self._filled[index])
        with torch.cuda.stream(self._stream):
            for place in places:
                begin = max(place.batch_row, start)
                end = min(place.batch_row + place.num_rows, start + num_rows)
                if begin < end:
                    first = place.row + begin - place.batch_row
                    target_SD = place.memory.host_SD[first : first + end - begin]
                    target_SD.copy_(slot_BD[begin - start : end - start], non_blocking=True)
        self._left[index].record(self._stream)
        self._sent += 1

    def finish(self) -> None:
        """Returns once everything sent has arrived."""
        import torch

        torch.cuda.current_stream().synchronize()
        self._stream.synchronize()
        self._sent = 0


class _HostPages:
    """Pinned host memory, said to be the device's, as by unified addressing it is."""

    def __init__(self, memory: "torch.Tensor"):
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def _write(addends: "Sequence[torch.Tensor]", place: Place) -> None:
    """Has the model's device write a place's rows."""
    rows = slice(place.batch_row, place.batch_row + place.num_rows)
    _sum([addend[rows] for addend in addends], out=place.memory.device_SD[place.row : place.row + place.num_rows])


def _sum(addends: "Sequence[torch.Tensor]", *, out: "torch.Tensor") -> None:
    import torch

    if len(addends) == 1:
        out.copy_(addends[0])
    else:
        torch.add(*addends, out=out)


def map_memory(path: str | Path) -> "torch.Tensor":
    """Maps a shared-memory file as a flat uint8 tensor."""
    import torch

    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
