"""`read`: a finished, or growing, dataset as a map-style PyTorch dataset.

Shapes: T tokens of a prompt, D hidden size.
"""

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hsray.layers import Layer, column_name
from hsray.manifest import ManifestError, check_inventory, load_manifest, published_shards
from hsray.shard import to_tensor
from hsray.shard_file import ShardFile
from hsray.store import Store

if TYPE_CHECKING:
    import torch

#: Shards whose footers stay parsed.
OPEN_SHARDS = 8


def read(
    out: str | os.PathLike[str],
    *,
    layers: "Layer | Sequence[Layer] | None" = None,
    storage_options: Mapping[str, Any] | None = None,
) -> "HiddenStates":
    """Opens a dataset that `hsray.build` made.

    Args:
        out: The dataset's folder.
        layers: The layers wanted, as they are named in the dataset; others are not read. By default all.
        storage_options: For the filesystem of `out`.

    Raises:
        ManifestError: `out` holds no dataset, or one whose plan is not yet written.
        KeyError: a layer that the dataset does not have.
    """
    return HiddenStates(Store(out, storage_options), [layers] if isinstance(layers, (str, int)) else layers)


class HiddenStates:
    """Prompts with their hidden states, in input order; a map-style PyTorch dataset.

    Of a dataset still being built it holds the shards that were published when it was opened. A shard that turns out not
    to be this dataset's, or damaged, is a `ShardError` when it is first read.
    """

    def __init__(self, store: Store, layers: "Sequence[Layer] | None"):
        manifest = load_manifest(store)
        if manifest is None or manifest.plan is None:
            raise ManifestError(f"{store.url!r} holds no dataset that can be read yet; build it first")
        present = manifest.identity.layers
        missing = [layer for layer in layers or () if layer not in present]
        if missing:
            raise KeyError(f"layers {missing} are not in {store.url!r}, which has {list(present)}")
        self.layers: tuple[Layer, ...] = tuple(layers) if layers is not None else present
        self.complete = manifest.state == "complete"
        self._store = store
        published = published_shards(store)
        check_inventory(manifest, published, store)
        self._shards = sorted(set(published).intersection(range(manifest.plan.num_shards)))
        self._manifest = manifest
        prompts = [manifest.plan.shard_prompts[shard] for shard in self._shards]
        self._starts = np.cumsum([0, *prompts])
        self._files: OrderedDict[int, ShardFile] = OrderedDict()
        self._process = os.getpid()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One prompt: ``prompt_id``, ``input_ids`` int64 [T], ``loss_mask`` bool [T], ``hidden_states`` layer -> [T, D].

        The states are in the dtype they were stored in, and views of the Arrow memory that was read.
        """
        import torch

        if not -len(self) <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        index %= len(self)
        position = int(np.searchsorted(self._starts, index, side="right")) - 1
        file = self._open(self._shards[position])
        group, row = file.find(index - int(self._starts[position]))
        table = file.read(group, ["prompt_id", "input_ids", "loss_mask", *map(column_name, self.layers)])
        num_tokens = table["num_tokens"][row].as_py()
        return {
            "prompt_id": table["prompt_id"][row].as_py(),
            "input_ids": torch.tensor(table["input_ids"][row].as_py(), dtype=torch.int64),
            "loss_mask": torch.tensor(table["loss_mask"][row].as_py(), dtype=torch.bool),
            "hidden_states": {layer: self._states(table, layer, row, num_tokens) for layer in self.layers},
        }

    def _states(self, table: Any, layer: Layer, row: int, num_tokens: int) -> "torch.Tensor":
        name = column_name(layer)
        return to_tensor(table[name].chunk(0), row, table.schema.field(name), num_tokens)

    def _open(self, shard: int) -> ShardFile:
        if self._process != os.getpid():  # a forked worker would share the files' positions with its parent
            self._files, self._process = OrderedDict(), os.getpid()
        if shard not in self._files:
            while len(self._files) >= OPEN_SHARDS:
                self._files.popitem(last=False)[1].close()
            self._files[shard] = ShardFile(self._store, self._manifest.expected(shard))
        self._files.move_to_end(shard)
        return self._files[shard]

    def __getstate__(self) -> dict[str, Any]:
        # Open files do not travel to DataLoader workers.
        return {**self.__dict__, "_files": OrderedDict()}
