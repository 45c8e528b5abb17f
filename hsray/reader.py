"""`read`: a finished, or growing, dataset as a map-style PyTorch dataset, as streams, as Ray Data or Arrow.

Shapes: T tokens of a prompt, D hidden size.
"""

import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hsray.layers import Layer
from hsray.manifest import ManifestError, check_inventory, load_manifest, published_shards
from hsray.model import DTYPE_BYTES
from hsray.shard import state_columns
from hsray.shard_file import ShardFile
from hsray.store import Store

if TYPE_CHECKING:
    import ray.data

    from hsray.row_group import RowGroup
    from hsray.stream import PackedStream, TokenStream

#: Shards whose footers stay parsed.
OPEN_SHARDS = 8


def read(
    out: str | os.PathLike[str],
    *,
    layers: "Layer | Sequence[Layer] | None" = None,
    dtype: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> "HiddenStates":
    """Opens a dataset that `hsray.build` made.

    Args:
        out: The dataset's folder.
        layers: The layers wanted, as they are named in the dataset; others are not read. By default all.
        dtype: Of the states given: ``"bfloat16"``, ``"float16"`` or ``"float32"``. By default as they are stored, which copies
            nothing, and bfloat16 where that is float8_e4m3.
        storage_options: For the filesystem of `out`.

    Raises:
        ManifestError: `out` holds no dataset, or one whose plan is not yet written.
        KeyError: a layer that the dataset does not have.
    """
    if dtype not in (None, *DTYPE_BYTES):
        raise ValueError(f"dtype={dtype!r}; wanted {', '.join(map(repr, DTYPE_BYTES))}, or none for what is stored")
    wanted = [layers] if isinstance(layers, str | int | float) else layers
    return HiddenStates(Store(out, storage_options), wanted, dtype)


class HiddenStates:
    """Prompts with their hidden states, in input order; a map-style PyTorch dataset, for any number of threads.

    Of a dataset still being built it holds the shards that were published when it was opened. A shard that turns out not
    to be this dataset's, or damaged, is a `ShardError` when it is first read.
    """

    def __init__(self, store: Store, layers: "Sequence[Layer] | None", dtype: str | None = None):
        manifest = load_manifest(store)
        if manifest is None or manifest.plan is None:
            raise ManifestError(f"{store.url!r} holds no dataset that can be read yet; build it first")
        present = manifest.identity.layers
        missing = [layer for layer in layers or () if layer not in present]
        if missing:
            raise KeyError(f"layers {missing} are not in {store.url!r}, which has {list(present)}")
        self.layers: tuple[Layer, ...] = tuple(layers) if layers is not None else present
        self.complete = manifest.state == "complete"
        self._store, self._dtype = store, dtype
        published = published_shards(store, manifest.identity.file_format)
        check_inventory(manifest, published, store)
        self.shards: tuple[int, ...] = tuple(sorted(set(published).intersection(range(manifest.plan.num_shards))))
        """Those that were there, by number."""
        self._manifest = manifest
        prompts = [manifest.plan.shard_prompts[shard] for shard in self.shards]
        self._starts = np.cumsum([0, *prompts])
        self._forget_files()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        tokens = sum(self._manifest.plan.shard_tokens[shard] for shard in self.shards)
        dtype = self._dtype or self._manifest.identity.stored_dtype
        so_far = "" if self.complete else " so far"
        return f"<{self._store.url}: {len(self):,} prompts, {tokens:,} tokens{so_far}; layers {list(self.layers)}, {dtype}>"

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One prompt: ``prompt_id``, ``input_ids`` int64 [T], ``loss_mask`` bool [T], ``hidden_states`` layer -> [T, D].

        States given as they are stored are views of the Arrow memory that was read: the prompt's row group.
        """
        shard, group, row = self._find(index)
        return self._group_at_hand(shard, group).prompt(row)

    def to_arrow(self, index: int) -> pa.Table:
        """One prompt as a table of one row, with the shard's columns: those of the layers wanted."""
        shard, group, row = self._find(index)
        table = self.open_shard(shard).read(group, self._columns)
        return table.select(["prompt_id", "num_tokens", *self._columns[1:]]).slice(row, 1)

    def to_ray(self) -> "ray.data.Dataset":
        """A Ray dataset, one row a prompt: ``prompt_id``, ``num_tokens``, and Ray tensor columns for the others.

        States in bfloat16, which numpy has not, come as float32; nothing of a tensor's value is lost.
        """
        from hsray.ray_view import to_ray

        return to_ray(self)

    def stream(
        self, *, batch_tokens: int, shuffle: bool = False, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> "PackedStream":
        """Packed batches of `batch_tokens` tokens, for training a drafter; a PyTorch ``IterableDataset``.

        Ranks, and a ``DataLoader``'s workers (use ``batch_size=None``), share the prompts without overlap or loss: a pass has
        some batches more for one than for another, so where ranks must keep step, end it with the first that has none. Its
        ``state_dict`` and ``load_state_dict`` continue exactly. Of workers that end with each pass every pass is the first:
        ``persistent_workers=True`` keeps them.

        Args:
            batch_tokens: Tokens of a batch.
            shuffle: Takes shards, row groups within some shards, and prompts within a row group in a random order, another
                for each pass.
            seed: Of that order; equal for all ranks.
            rank: This process's number.
            world_size: How many processes share the dataset.
        """
        from hsray.stream import PackedStream, Share

        share = Share(dataset=self, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)
        return PackedStream(share, batch_tokens=batch_tokens)

    def tokens(
        self,
        layer: Layer,
        *,
        batch_size: int,
        shuffle_buffer: int = 65_536,
        only_loss_mask: bool = False,
        skip_first: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> "TokenStream":
        """Single tokens' states of a layer, [batch_size, D], shuffled across prompts, for training an autoencoder.

        As with `stream`, ranks and workers share the tokens, and ``state_dict`` and ``load_state_dict`` continue exactly.

        Args:
            layer: One of `layers`; others are not read.
            batch_size: States of a batch.
            shuffle_buffer: States held to choose from, in memory.
            only_loss_mask: Leaves out tokens that the loss mask does not mark.
            skip_first: Leaves out so many first tokens of each prompt, whose states are often far larger.
            seed: Of the order; equal for all ranks.
            rank: This process's number.
            world_size: How many processes share the dataset.

        Raises:
            KeyError: the layer is not one of `layers`.
        """
        from hsray.stream import Share, TokenStream

        if layer not in self.layers:
            raise KeyError(f"layer {layer!r} is not among those opened, {list(self.layers)}")
        share = Share(
            dataset=HiddenStates._with_layers(self, [layer]), shuffle=True, seed=seed, rank=rank, world_size=world_size
        )
        return TokenStream(
            share,
            layer,
            batch_size=batch_size,
            shuffle_buffer=shuffle_buffer,
            only_loss_mask=only_loss_mask,
            skip_first=skip_first,
        )

    def open_shard(self, shard: int) -> ShardFile:
        """One of `shards`, open; the last few stay so."""
        if (
            self._process != os.getpid()
        ):  # a forked worker would share the files' positions, and the lock, with its parent
            self._forget_files()
        with self._lock:
            if shard not in self._files:
                while len(self._files) >= OPEN_SHARDS:
                    self._files.popitem(last=False)  # closed once no thread reads it
                self._files[shard] = ShardFile(self._store, self._manifest.expected(shard))
            self._files.move_to_end(shard)
            return self._files[shard]

    def read_group(self, shard: int, group: int) -> "RowGroup":
        """The prompts of a shard's row group, with the layers wanted."""
        from hsray.row_group import RowGroup

        return RowGroup(self.open_shard(shard).read(group, self._columns), self.layers, self._dtype)

    def _group_at_hand(self, shard: int, group: int) -> "RowGroup":
        """The row group, which stays at hand until another is asked for."""
        place, rows = self._last
        if place != (shard, group):
            rows = self.read_group(shard, group)
            self._last = (shard, group), rows
        return rows

    def first_prompt(self, shard: int) -> int:
        """The index of a shard's first prompt."""
        return int(self._starts[self.shards.index(shard)])

    @property
    def file_format(self) -> str:
        """Of its shards: ``"parquet"`` or ``"arrow"``."""
        return self._manifest.identity.file_format

    @property
    def _columns(self) -> list[str]:
        stored = self._manifest.identity.stored_dtype
        states = [name for layer in self.layers for name in state_columns(layer, stored)]
        return ["prompt_id", "input_ids", "loss_mask", *states]

    def _with_layers(self, layers: Sequence[Layer]) -> "HiddenStates":
        """The same snapshot with other layers."""
        other = object.__new__(HiddenStates)
        other.__setstate__({**self.__getstate__(), "layers": tuple(layers)})
        return other

    def _find(self, index: int) -> tuple[int, int, int]:
        """The shard, row group and row of a prompt."""
        try:
            index = operator.index(index)
        except TypeError:
            raise TypeError(f"a prompt is asked for by its number, a whole one; found {index!r:.80}") from None
        if not -len(self) <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        index %= len(self)
        position = int(np.searchsorted(self._starts, index, side="right")) - 1
        shard = self.shards[position]
        return shard, *self.open_shard(shard).find(index - int(self._starts[position]))

    def _forget_files(self) -> None:
        self._files: OrderedDict[int, ShardFile] = OrderedDict()
        self._lock, self._process = threading.Lock(), os.getpid()
        self._last: tuple[tuple[int, int] | None, Any] = (None, None)

    def __getstate__(self) -> dict[str, Any]:
        # Open files do not travel to DataLoader workers.
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_files", "_lock", "_process", "_last")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_files()
