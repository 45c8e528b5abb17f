"""States in eight bits: float8_e4m3 numbers, each token's scaled so that its largest is the type's largest, 448.

Shapes: S tokens of a shard, D hidden size.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FLOAT8 = "float8_e4m3"
LARGEST = 448.0

#: Rows scaled at a time, which bounds what is held besides.
CHUNK_ROWS = 1024


@dataclass(slots=True, kw_only=True)
class Rounding:
    """How far tokens are from what they were: the norm of the difference over a token's own."""

    num_tokens: int = 0
    sum_of_errors: float = 0.0
    worst: float = 0.0

    @property
    def mean(self) -> float:
        """Of the tokens."""
        return self.sum_of_errors / max(1, self.num_tokens)

    def add(self, other: "Rounding") -> None:
        """Counts other tokens in."""
        self.num_tokens += other.num_tokens
        self.sum_of_errors += other.sum_of_errors
        self.worst = max(self.worst, other.worst)


def to_float8(hidden_SD: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor, Rounding]":
    """The numbers in eight bits, uint8 [S, D], each token's scale, float32 [S], and what the rounding did."""
    import torch

    values_SD = torch.empty(hidden_SD.shape, dtype=torch.uint8)
    scale_S = torch.empty(len(hidden_SD), dtype=torch.float32)
    rounding, smallest = Rounding(num_tokens=len(hidden_SD)), torch.finfo(torch.float32).tiny
    for start in range(0, len(hidden_SD), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        numbers = hidden_SD[rows].float()
        scale_S[rows] = (numbers.abs().amax(dim=1) / LARGEST).clamp_min(smallest)
        numbers = numbers / scale_S[rows, None]  # another tensor: float32 states are `numbers` themselves
        stored = numbers.to(torch.float8_e4m3fn)
        values_SD[rows] = stored.view(torch.uint8)
        errors = (stored.float() - numbers).norm(dim=1) / numbers.norm(dim=1).clamp_min(smallest)
        rounding.sum_of_errors += float(errors.sum(dtype=torch.float64))
        rounding.worst = max(rounding.worst, float(errors.max()))
    return values_SD, scale_S, rounding


def from_float8(stored_SD: "torch.Tensor", scale_S: "torch.Tensor", dtype: "torch.dtype") -> "torch.Tensor":
    """The numbers that eight bits and a scale stand for."""
    import torch

    hidden_SD = torch.empty(stored_SD.shape, dtype=dtype)
    for start in range(0, len(stored_SD), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        hidden_SD[rows] = (stored_SD[rows].float() * scale_S[rows, None]).to(dtype)
    return hidden_SD
