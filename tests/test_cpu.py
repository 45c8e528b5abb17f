"""A CPU gives the same bits in each process."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hsray.cpu import VECTOR_MATH
from hsray.engine import open_engine
from tests.reference import options_for


class Calls(TorchDispatchMode):
    """Keeps on how many numbers each function was called, in order."""

    def __init__(self):
        super().__init__()
        self.numbers: dict[str, list[int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            self.numbers.setdefault(function.overloadpacket.__name__, []).append(args[0].numel())
        return function(*args, **(kwargs or {}))


def test_no_function_of_vector_math_is_first_called_by_several_threads(tiny_llama):
    with Calls() as calls, open_engine("transformers", options_for(tiny_llama)) as engine:
        engine.capture_alone(range(1, 100))
    assert calls.numbers["cos"][-1] > 1, "the model has not run"
    assert {name: calls.numbers[name][0] for name in VECTOR_MATH} == dict.fromkeys(VECTOR_MATH, 1)
