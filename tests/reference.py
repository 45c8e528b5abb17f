"""The truth to compare engines with: Hugging Face's own module outputs, by forward hooks, independent of hsray's.

Shapes: T tokens of a prompt, D hidden size.
"""

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hsray.engine import EngineOptions
from hsray.layers import Layer, resolve_layers
from hsray.model import describe_model

#: The longest prompt that the tests' engines are opened for.
MAX_TOKENS = 1024


def options_for(model: Path, **changes: object) -> EngineOptions:
    """Every layer of a model in float32."""
    description = describe_model(str(model), dtype="float32")
    names = ["embed", *range(description.num_layers), "final"]
    defaults = {
        "model": description,
        "layers": resolve_layers(names, num_layers=description.num_layers),
        "max_tokens": MAX_TOKENS,
        "buffer_tokens": 2 * MAX_TOKENS,
    }
    return EngineOptions(**(defaults | changes))


@functools.lru_cache(maxsize=2)
def load_model(model: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def hugging_face_states(model: str, input_ids: Sequence[int]) -> dict[Layer, torch.Tensor]:
    """Every layer of a prompt in float32, layer -> [T, D]: what the embedding, each block and the final norm return."""
    states = module_outputs(load_model(model).model, input_ids=torch.tensor([list(input_ids)]), use_cache=False)
    return {layer: hidden_1TD[0] for layer, hidden_1TD in states.items()}


def module_outputs(decoder: torch.nn.Module, **inputs: object) -> dict[Layer, torch.Tensor]:
    """What the embedding, each block and the final norm of a decoder return for some inputs, layer -> [prompts, T, D]."""
    states: dict[Layer, torch.Tensor] = {}
    modules = {"embed": decoder.embed_tokens, **dict(enumerate(decoder.layers)), "final": decoder.norm}
    hooks = [module.register_forward_hook(functools.partial(_keep, states, layer)) for layer, module in modules.items()]
    try:
        with torch.inference_mode():
            decoder(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def counted_calls(run: Callable[[], object], *, within: str = "") -> int:
    """How many calls Python makes in this thread while `run` runs, from code whose file's path contains `within`."""
    count = 0

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        caller = frame if event == "c_call" else frame.f_back
        if event in ("call", "c_call") and caller is not None and within in caller.f_code.co_filename:
            count += 1

    gc.disable()  # what it ends on its way may be Python's code too
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def relative_error(found_TD: torch.Tensor, truth_TD: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the truth."""
    return float((found_TD.double() - truth_TD.double()).norm() / truth_TD.double().norm())


def _keep(states: dict, layer: Layer, _module: torch.nn.Module, _args: tuple, output: object) -> None:
    states[layer] = (output[0] if isinstance(output, tuple) else output).clone()
