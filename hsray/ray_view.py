"""A dataset as Ray Data: one row a prompt, its states as Ray tensors.

Shapes: T tokens of a prompt, D hidden size.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hsray.layers import column_name
from hsray.tasks import map_batches

if TYPE_CHECKING:
    import ray.data

    from hsray.reader import HiddenStates


def to_ray(dataset: "HiddenStates") -> "ray.data.Dataset":
    """See `hsray.reader.HiddenStates.to_ray`. A task reads a row group at a time of one shard."""
    import ray.data

    shards = ray.data.from_items(
        [{"shard": shard} for shard in dataset.shards], override_num_blocks=len(dataset.shards)
    )
    return map_batches(shards, _read_shard, fn_kwargs={"dataset": dataset}, batch_size=1, batch_format="numpy")


def _read_shard(batch: dict[str, np.ndarray], *, dataset: "HiddenStates") -> Iterator[dict[str, np.ndarray]]:
    """The columns of each row group of a shard."""
    for shard in batch["shard"].tolist():
        for group in range(dataset.open_shard(shard).num_groups):
            rows = dataset.read_group(shard, group)
            prompts = [rows.prompt(row) for row in range(len(rows))]
            columns = {
                "prompt_id": np.array([prompt["prompt_id"] for prompt in prompts], dtype=object),
                "num_tokens": np.diff(rows.ends),
                "input_ids": _ragged([prompt["input_ids"].numpy() for prompt in prompts]),
                "loss_mask": _ragged([prompt["loss_mask"].numpy() for prompt in prompts]),
            }
            for layer in dataset.layers:
                states = [prompt["hidden_states"][layer] for prompt in prompts]
                values = [
                    (s.float() if s.dtype.itemsize == 2 and "bfloat" in str(s.dtype) else s).numpy() for s in states
                ]
                columns[column_name(layer)] = _ragged(values)
            yield columns


def _ragged(values: list[np.ndarray]) -> np.ndarray:
    """Arrays of several lengths as one column, which Ray keeps as tensors."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
