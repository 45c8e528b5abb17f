"""Streams of a dataset's tokens for training: packed batches in prompt order, and single vectors shuffled across prompts.

Both go through the dataset's row groups. Shards are taken in blocks of `BLOCK_SHARDS`; the row groups of a block, in a
shuffled order if asked, are dealt to ranks and workers in turn. A block's order depends on the seed, the epoch and its own
footers alone, so a position is found again without reading what comes before it.

Shapes: B tokens of a batch, S tokens of a row group, D hidden size.
"""

import mmap
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import IterableDataset, get_worker_info

from hsray.batch_memory import ALIGNMENT, Memories, SharedBatch, SharedMemory
from hsray.layers import Layer
from hsray.row_group import RowGroup

if TYPE_CHECKING:
    from hsray.reader import HiddenStates

#: Shards whose row groups are shuffled together.
BLOCK_SHARDS = 4

#: Of a packed batch, beside the states.
COLUMNS = ("input_ids", "loss_mask", "document_ids", "position_ids")

#: Row groups read ahead of the one in use, and threads that read them. More of them are in memory at one time then, and Arrow's
#: pool takes fresh pages for each instead of those that were given back: two cores read 4 GB/s with 3, and 7 with 2.
PREFETCHED_GROUPS, READERS = 2, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a stream of one rank and worker stands: at the token that it gives next."""

    epoch: int = 0
    block: int = 0
    unit: int = 0
    """Which of the rank and worker's row groups in the block."""
    prompt: int = 0
    """Which of the row group's prompts, in the order they are given."""
    token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A row group in a stream."""

    position: Position
    group: RowGroup
    first_prompt: int
    """The dataset's index of its first."""
    order: np.ndarray
    """Of its prompts."""

    def runs_on(self, prompt: int, token: int, num_tokens: int) -> bool:
        """Whether so many tokens, from a prompt's token on, lie one after another in the row group's memory."""
        row = int(self.order[prompt])
        stop = int(self.group.ends[row]) + token + num_tokens
        last = int(np.searchsorted(self.group.ends, stop)) - 1  # the row that has the last of them
        followers = self.order[prompt : prompt + last - row + 1]
        return last < len(self.group) and np.array_equal(followers, np.arange(row, last + 1))

    def after(self, prompt: int, token: int, num_tokens: int) -> tuple[int, int]:
        """The prompt and its token that come so many tokens, which lie one after another, after one."""
        ends, row = self.group.ends, int(self.order[prompt])
        stop = int(ends[row]) + token + num_tokens
        there = int(np.searchsorted(ends, stop, "right")) - 1
        return prompt + there - row, stop - int(ends[there])

    def cut(self, prompt: int, token: int, num_tokens: int) -> dict[str, Any]:
        """A batch of tokens that lie one after another: its states are views of the row group's."""
        ends = self.group.ends
        start = int(ends[self.order[prompt]]) + token
        where = slice(start, start + num_tokens)
        places_B = np.arange(start, start + num_tokens)
        rows_B = np.searchsorted(ends, places_B, "right") - 1
        return {
            "input_ids": self.group.input_ids[None, where],
            "loss_mask": self.group.loss_mask[None, where],
            "document_ids": torch.from_numpy(self.first_prompt + rows_B)[None],
            "position_ids": torch.from_numpy(places_B - ends[rows_B])[None],
            "hidden_states": {layer: states_SD[None, where] for layer, states_SD in self.group.states.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The row groups of a dataset that one rank, and one worker of it, reads, and their order."""

    dataset: "HiddenStates"
    shuffle: bool
    seed: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}, world_size={self.world_size}; give a rank from 0 to world_size - 1")

    def units(self, start: Position) -> Iterator[_Unit]:
        """The row groups from a position's on, to the epoch's end; some are read ahead."""
        reader = ThreadPoolExecutor(READERS)
        ahead: deque = deque()
        try:
            for place in self._places(start):
                ahead.append(reader.submit(self._read, *place))
                if len(ahead) > PREFETCHED_GROUPS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            reader.shutdown(cancel_futures=True)

    def _places(self, start: Position) -> Iterator[tuple[Position, int, int]]:
        """The position, shard and row group of each unit."""
        worker = get_worker_info()
        num_workers, worker_id = (worker.num_workers, worker.id) if worker else (1, 0)
        consumers, consumer = self.world_size * num_workers, self.rank * num_workers + worker_id
        shards = self._ordered(self.dataset.shards, start.epoch)
        for block in range(start.block, -(-len(shards) // BLOCK_SHARDS)):
            places = [
                (shard, group)
                for shard in shards[block * BLOCK_SHARDS : (block + 1) * BLOCK_SHARDS]
                for group in range(self.dataset.open_shard(shard).num_groups)
            ]
            # Another consumer's turn comes first in each block, or the first would have more than the others.
            mine = self._ordered(places, start.epoch, block)[(consumer - block) % consumers :: consumers]
            for unit in range(start.unit if block == start.block else 0, len(mine)):
                yield Position(epoch=start.epoch, block=block, unit=unit), *mine[unit]

    def _read(self, position: Position, shard: int, group: int) -> _Unit:
        rows = self.dataset.read_group(shard, group)
        if self.dataset.file_format == "arrow":
            _touch(rows)
        first_prompt = self.dataset.first_prompt(shard) + int(self.dataset.open_shard(shard).group_starts[group])
        order = np.array(self._ordered(range(len(rows)), position.epoch, shard, group))
        return _Unit(position=position, group=rows, first_prompt=first_prompt, order=order)

    def _ordered(self, items: Any, *where: int) -> list:
        if not self.shuffle:
            return list(items)
        return [items[index] for index in np.random.default_rng([self.seed, *where]).permutation(len(items))]


def _touch(group: RowGroup) -> None:
    """Has the pages of a mapped file read here, ahead, and not where they are copied: a byte of each is looked at."""
    for states_SD in group.states.values():
        states_SD.view(torch.uint8).numpy().reshape(-1)[:: mmap.PAGESIZE].max(initial=0)


class PackedStream(IterableDataset):
    """Batches of `batch_tokens` tokens, prompt after prompt; one pass over the dataset for each iteration.

    A batch is a dict: ``input_ids`` int64, ``loss_mask`` bool, ``document_ids`` int64 (which prompt of the dataset a token
    is of) and ``position_ids`` int64 (where in it), each [1, B], and ``hidden_states``, layer -> [1, B, D]. A prompt that
    reaches over a batch's end goes on in the next; nothing is padded, and the last batch of a pass may be shorter. A batch of
    tokens that lie side by side in a row group is a view of its memory, and keeps that.
    """

    def __init__(self, share: Share, *, batch_tokens: int):
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens={batch_tokens}; give a whole number from 1 up")
        self._share, self._batch_tokens = share, batch_tokens
        self._next = Position()
        self._memories = Memories()
        """Of this process, where it is a ``DataLoader``'s worker."""

    def state_dict(self) -> dict[str, int]:
        """Where the stream stands: after the batch that it gave last, in this process."""
        return asdict(self._next)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where a stream of the same dataset, options, rank and workers stood."""
        self._next = Position(**state)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start = self._next
        memories = self._memories if get_worker_info() else None  # a worker's batches go where its consumer finds them
        # What was read for this pass alone may be given away; an Arrow file's pages are all passes'.
        is_own = memories is None and self._share.dataset.file_format == "parquet"
        batch = _Batch(self._batch_tokens, memories)
        for unit in self._share.units(start):
            prompt = token = 0
            if (unit.position.block, unit.position.unit) == (start.block, start.unit):
                prompt, token = start.prompt, start.token
            while prompt < len(unit.order):
                if is_own and not batch.num_tokens and unit.runs_on(prompt, token, self._batch_tokens):
                    given = unit.cut(prompt, token, self._batch_tokens)
                    prompt, token = unit.after(prompt, token, self._batch_tokens)
                else:
                    prompt, token = unit.after(prompt, token, batch.add(unit, prompt, token))
                    given = batch.take() if batch.is_full else None
                if given is not None:
                    self._next = replace(unit.position, prompt=prompt, token=token)
                    yield given
        self._next = Position(epoch=start.epoch + 1)
        if batch.num_tokens:
            yield batch.take()


class _Batch:
    """A batch being filled: its columns, and its layers, in one memory."""

    def __init__(self, batch_tokens: int, memories: Memories | None):
        self._batch_tokens, self._memories = batch_tokens, memories
        self._shared: SharedMemory | None = None
        self._rows: dict[Layer, torch.Tensor] = {}
        self.num_tokens = 0

    @property
    def is_full(self) -> bool:
        return self.num_tokens == self._batch_tokens

    def add(self, unit: _Unit, prompt: int, token: int) -> int:
        """Copies a prompt's tokens from one of them on, as many as fit; how many they were."""
        group, row = unit.group, int(unit.order[prompt])
        if not self.num_tokens:
            self._begin(group)
        at = int(group.ends[row]) + token
        count = min(int(group.ends[row + 1]) - at, self._batch_tokens - self.num_tokens)
        here, there = slice(self.num_tokens, self.num_tokens + count), slice(at, at + count)
        self._rows["document_ids"][here] = unit.first_prompt + row
        self._rows["position_ids"][here] = torch.arange(token, token + count)
        for name, values_S in {"input_ids": group.input_ids, "loss_mask": group.loss_mask, **group.states}.items():
            self._rows[name][here] = values_S[there]
        self.num_tokens += count
        return count

    def take(self) -> dict[str, Any]:
        """The batch, as it is; the next begins empty."""
        states = {name: values[None, : self.num_tokens] for name, values in self._rows.items()}
        self.num_tokens = 0
        content: dict[str, Any] = {name: states.pop(name) for name in COLUMNS}
        content["hidden_states"] = states
        return content if self._shared is None else SharedBatch(content, self._shared)

    def _begin(self, group: RowGroup) -> None:
        """Other memory: what was given is the user's."""
        ids_S = group.input_ids
        likes = dict(zip(COLUMNS, (ids_S, group.loss_mask, ids_S, ids_S), strict=True)) | group.states
        sizes = [self._batch_tokens * like[:1].nbytes for like in likes.values()]
        starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        if self._memories is None:
            # From Arrow's pool, which keeps what is given back: a core fills fresh pages at 1 GB/s here, used ones at 8.
            memory = torch.frombuffer(pa.allocate_buffer(starts[-1], resizable=False), dtype=torch.uint8)
        else:
            self._shared = self._memories.free(starts[-1])
            memory = self._shared.take()
        for (name, like), start, size in zip(likes.items(), starts, sizes, strict=False):
            values = memory[start : start + size].view(like.dtype)
            self._rows[name] = values.view(self._batch_tokens, *like.shape[1:])


class TokenStream(IterableDataset):
    """Batches of single tokens' states of one layer, [batch_size, D], shuffled across prompts; the last may be smaller.

    A buffer of up to `shuffle_buffer` states, whole batches, is filled from row groups in a shuffled order, and given in a
    random one; so a place in the stream is where the buffer began, and how much of it was given. Each iteration is a pass
    over the dataset, in another order.
    """

    def __init__(
        self, share: Share, layer: Layer, *, batch_size: int, shuffle_buffer: int, only_loss_mask: bool, skip_first: int
    ):
        if not 1 <= batch_size <= shuffle_buffer or skip_first < 0:
            raise ValueError(
                f"batch_size={batch_size}, shuffle_buffer={shuffle_buffer}, skip_first={skip_first}; give a batch of 1 up to "
                "the buffer, and 0 or more to skip"
            )
        self._share, self._layer = share, layer
        self._batch_size, self._buffer_tokens = batch_size, shuffle_buffer // batch_size * batch_size
        self._only_loss_mask, self._skip_first = only_loss_mask, skip_first
        self._begun, self._given = Position(), 0
        """Where the buffer begins, `Position.token` counting the wanted ones of its row group; batches of it given."""
        self.num_tokens = 0
        """Given so far, in this process and before its state; `mean` and `mean_norm` are over these."""
        self._sum_D: torch.Tensor | None = None
        self._sum_of_norms = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: after the batch that it gave last, in this process; and what `mean` is made of."""
        sums = {"num_tokens": self.num_tokens, "sum": self._sum_D, "sum_of_norms": self._sum_of_norms}
        return {"begun": asdict(self._begun), "given": self._given, **sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a stream of the same dataset, options, rank and workers stood; it fills the buffer again first."""
        self._begun, self._given = Position(**state["begun"]), state["given"]
        self.num_tokens, self._sum_D, self._sum_of_norms = state["num_tokens"], state["sum"], state["sum_of_norms"]

    @property
    def mean(self) -> torch.Tensor:
        """The mean of the states given so far, float64 [D]."""
        return self._sum_D / self.num_tokens

    @property
    def mean_norm(self) -> float:
        """The mean Euclidean norm of the states given so far."""
        return self._sum_of_norms / self.num_tokens

    def __iter__(self) -> Iterator[torch.Tensor]:
        start, buffer_ND, filled = self._begun, None, 0
        for unit in self._share.units(start):
            states_SD = self._wanted(unit.group)
            if buffer_ND is None:
                buffer_ND = states_SD.new_empty(self._buffer_tokens, states_SD.shape[1])
            at = start.token if (unit.position.block, unit.position.unit) == (start.block, start.unit) else 0
            while at < len(states_SD):
                taken_ND = states_SD[at : at + self._buffer_tokens - filled]
                buffer_ND[filled : filled + len(taken_ND)] = taken_ND
                filled, at = filled + len(taken_ND), at + len(taken_ND)
                if filled == self._buffer_tokens:
                    yield from self._batches(buffer_ND)
                    self._begun, self._given, filled = replace(unit.position, token=at), 0, 0
        if filled:
            yield from self._batches(buffer_ND[:filled])
        self._begun, self._given = Position(epoch=start.epoch + 1), 0

    def _wanted(self, group: RowGroup) -> torch.Tensor:
        keep_S = group.loss_mask.clone() if self._only_loss_mask else torch.ones_like(group.loss_mask)
        for begin, end in zip(group.ends[:-1].tolist(), group.ends[1:].tolist(), strict=True):
            keep_S[begin : min(end, begin + self._skip_first)] = False
        return group.states[self._layer][keep_S]

    def _batches(self, buffer_ND: torch.Tensor) -> Iterator[torch.Tensor]:
        """Those of the buffer that were not given yet."""
        order = np.random.default_rng([self._share.seed, *astuple(self._begun)]).permutation(len(buffer_ND))
        for rows in torch.from_numpy(order).split(self._batch_size)[self._given :]:
            states_BD = buffer_ND[rows]
            numbers_BD = states_BD.float()
            sum_D = numbers_BD.sum(dim=0, dtype=torch.float64)
            self._sum_D = sum_D if self._sum_D is None else self._sum_D + sum_D
            self._sum_of_norms += float(numbers_BD.norm(dim=1).sum(dtype=torch.float64))
            self.num_tokens += len(rows)
            self._given += 1
            yield states_BD
