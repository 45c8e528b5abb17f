"""The prompts of one row group as tensors over the memory that Arrow read.

Shapes: S tokens of a row group, T tokens of a prompt, D hidden size.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from hsray.float8 import FLOAT8, from_float8
from hsray.layers import Layer, column_name
from hsray.shard import state_columns, to_tensor


class RowGroup:
    """Some columns of a row group, as `hsray.shard_file.ShardFile.read` gives them: each one chunk, of checked lengths."""

    def __init__(self, table: pa.Table, layers: Sequence[Layer], dtype: str | None = None):
        """Args: dtype: Of the states given; by default as they are stored, and bfloat16 for float8_e4m3."""
        self._table = table
        num_tokens = table["num_tokens"].to_numpy()
        self.ends = np.concatenate([[0], np.cumsum(num_tokens, dtype=np.int64)])
        """The row after each prompt's last, and 0 before the first: int64 [prompts + 1]."""
        self.states: dict[Layer, torch.Tensor] = {
            layer: _states(table, layer, int(self.ends[-1]), dtype) for layer in layers
        }
        """layer -> [S, D]; views, where they are given as they are stored."""
        self.input_ids = torch.from_numpy(_flat(table, "input_ids").astype(np.int64))
        """int64 [S]"""
        self.loss_mask = torch.from_numpy(_flat(table, "loss_mask"))
        """bool [S]"""

    def __len__(self) -> int:
        return len(self.ends) - 1

    def prompt(self, row: int) -> dict[str, Any]:
        """One prompt, as `hsray.reader.HiddenStates` gives it."""
        rows = slice(int(self.ends[row]), int(self.ends[row + 1]))
        return {
            "prompt_id": self._table["prompt_id"][row].as_py(),
            "input_ids": self.input_ids[rows].clone(),
            "loss_mask": self.loss_mask[rows].clone(),
            "hidden_states": {layer: hidden_SD[rows] for layer, hidden_SD in self.states.items()},
        }


def _states(table: pa.Table, layer: Layer, num_tokens: int, dtype: str | None) -> torch.Tensor:
    name = column_name(layer)
    stored_SD = to_tensor(_chunk(table, name), table.schema.field(name), num_tokens)
    if stored_SD.dtype != torch.float8_e4m3fn:
        return stored_SD if dtype is None else stored_SD.to(getattr(torch, dtype))
    scale_S = torch.from_numpy(_flat(table, state_columns(layer, FLOAT8)[1]).copy())
    return from_float8(stored_SD, scale_S, getattr(torch, dtype or "bfloat16"))


def _chunk(table: pa.Table, name: str) -> pa.Array:
    return table[name].chunk(0)


def _flat(table: pa.Table, name: str) -> np.ndarray:
    """A list column's values, one prompt's after another's."""
    return _chunk(table, name).flatten().to_numpy(zero_copy_only=False)
