"""How a state gets from the model's device to its place in a shard's memory, beside the computation.

On a GPU a copy to the host would hold up the kernels behind it, so rows are first gathered in a small ring of device
memory, one kernel at the device's own speed, and leave from there on a stream of their own. The ring is all the
device memory that the capture takes. Without a GPU the rows are written straight to their place.

Copies of a state on its way to the file: the sum of its addends (into the ring), to the host (into the shard's
memory, at the final offset), into Parquet's page, into the file.

Shapes: B tokens of a batch, S tokens of a shard, D hidden size.
"""

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Of the ring. One slot takes 0.3 ms to leave at 55 GB/s; the next is filled meanwhile.
SLOT_BYTES, NUM_SLOTS = 16 << 20, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where some rows of a batch go."""

    batch_row: int
    rows_SD: "torch.Tensor"
    """As many rows of a shard's memory as are to be copied."""


class HostStaging:
    """Writes rows to their places at once: the model computes on the host."""

    def send(self, addends: "Sequence[torch.Tensor]", places: Iterable[Place]) -> None:
        """Writes the sum of one or two tensors, [B, D] each, to the places of its rows."""
        for place in places:
            rows = slice(place.batch_row, place.batch_row + len(place.rows_SD))
            _sum([addend[rows] for addend in addends], out=place.rows_SD)

    def finish(self) -> None:
        """Returns once everything sent has arrived."""


class DeviceStaging:
    """Sends rows through a ring of device memory, on a stream of its own."""

    def __init__(self, device: "torch.device"):
        import torch

        self._stream = torch.cuda.Stream(device)
        self._slots = [torch.empty(SLOT_BYTES, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        self._filled, self._left = ([torch.cuda.Event() for _ in self._slots] for _ in range(2))
        self._sent = 0

    def send(self, addends: "Sequence[torch.Tensor]", places: Iterable[Place]) -> None:
        """Starts to write the sum of one or two tensors, [B, D] each, to the places of its rows.

        The tensors may be overwritten as soon as this returns, by work of the current stream.
        """
        first = addends[0]
        slot_rows = SLOT_BYTES // (first.shape[1] * first.element_size())
        places = list(places)
        num_rows = max(place.batch_row + len(place.rows_SD) for place in places)
        for start in range(0, num_rows, slot_rows):
            self._send_slot([addend[start : min(start + slot_rows, num_rows)] for addend in addends], start, places)

    def _send_slot(self, addends: "list[torch.Tensor]", start: int, places: list[Place]) -> None:
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
                end = min(place.batch_row + len(place.rows_SD), start + num_rows)
                if begin < end:
                    target_SD = place.rows_SD[begin - place.batch_row : end - place.batch_row]
                    target_SD.copy_(slot_BD[begin - start : end - start], non_blocking=True)
        self._left[index].record(self._stream)
        self._sent += 1

    def finish(self) -> None:
        """Returns once everything sent has arrived."""
        self._stream.synchronize()
        self._sent = 0


def _sum(addends: "Sequence[torch.Tensor]", *, out: "torch.Tensor") -> None:
    import torch

    if len(addends) == 1:
        out.copy_(addends[0])
    else:
        torch.add(*addends, out=out)


def map_memory(path: str | Path, *, register: bool) -> "torch.Tensor":
    """Maps a shared-memory file as a flat uint8 tensor; `register` pins it for CUDA, so copies run at full speed."""
    import torch

    with open(path, "r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    if register:
        status: Any = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister of {memory.numel()} bytes at {path} failed: {status}")
    return memory
