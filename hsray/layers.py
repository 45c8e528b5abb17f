"""What "layer i" means, and how a user names layers.

Integer ``i`` in ``0..N-1`` is the residual stream after decoder block ``i``, before any final norm.
``"embed"`` is what enters block 0; ``"final"`` is what the LM head reads, after the final norm.
In Hugging Face terms ``hidden_states[0]`` is ``"embed"``, ``hidden_states[i + 1]`` is layer ``i`` for ``i < N-1``,
and the last entry is ``"final"``: Hugging Face never returns layer ``N-1``. `explain` shows other systems' numbers.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

Layer = int | Literal["embed", "final"]
LayersSpec = str | int | Sequence[int | str]

#: Other systems' number (or name) of a layer's state, from the layer and N; None where they have none for it.
SYSTEMS: Mapping[str, Callable[[Layer, int], int | str | None]] = {
    "hsray": lambda layer, num_layers: layer,
    "Hugging Face: hidden_states[..]": lambda layer, num_layers: (
        num_layers if layer == "final" else None if layer == num_layers - 1 else _entered(layer)
    ),
    "EAGLE: block entered": lambda layer, num_layers: None if layer == num_layers - 1 else _entered(layer),
    "vLLM: eagle_aux_hidden_state_layer_ids": lambda layer, num_layers: _entered(layer),
    "speculators from v0.5: target_layer_ids": lambda layer, num_layers: _entered(layer),
    "speculators to v0.4: layer_ids": lambda layer, num_layers: _left(layer),
    # It captures what enters a block, so the last block's output never (Gemma 3 and 4 apart).
    "SGLang: set_eagle3_layers_to_capture": lambda layer, num_layers: None if layer == num_layers - 1 else _left(layer),
    "SGLang: set_dflash_layers_to_capture": lambda layer, num_layers: None if layer == num_layers - 1 else _left(layer),
    "SpecForge, TorchSpec: aux layer ids": lambda layer, num_layers: _left(layer),
    "Model-Optimizer, HF dump: --aux-layers": lambda layer, num_layers: _left(layer),
    "Model-Optimizer, vLLM dump: --aux-layers": lambda layer, num_layers: _entered(layer),
    "DFlash: target_layer_ids": lambda layer, num_layers: _left(layer),
    "DeepSpec: target_layer_ids": lambda layer, num_layers: -1 if layer == "embed" else _left(layer),
    "SAELens, TransformerLens: blocks.(i).hook_resid_post": lambda layer, num_layers: {
        "embed": "blocks.0.hook_resid_pre",
        "final": "ln_final.hook_normalized",
    }.get(layer, layer),
    "nnsight, vllm-lens: output of model.layers[i]": lambda layer, num_layers: _left(layer),
}

#: Presets: the number of blocks N -> layers. Beside them there is ``dflash:n``, see `dflash_layers`.
#: ``eagle3``: the inputs of blocks 2, N//2 and N-3, which SGLang and vLLM feed an EAGLE-3 drafter by default.
#: ``speculators-v1``: the outputs of blocks 2, N//2 and N-3 (vllm-project/speculators up to v0.4).
#: ``all``: every state there is.
PRESETS: Mapping[str, Callable[[int], list[Layer]]] = {
    "eagle3": lambda num_layers: [1, num_layers // 2 - 1, num_layers - 4, "final"],
    "speculators-v1": lambda num_layers: [2, num_layers // 2, num_layers - 3, "final"],
    "all": lambda num_layers: ["embed", *range(num_layers), "final"],
}

INTEGER = re.compile(r"-?\d+")
DFLASH = re.compile(r"dflash:(\d+)")
RANGE = re.compile(r"(-?\d+)?:(-?\d+)?(?::(-?\d+)?)?")


def resolve_layers(spec: LayersSpec, *, num_layers: int) -> tuple[Layer, ...]:
    """Turns what a user wrote into layers, in depth order: embed, 0, 1, .., N-1, final.

    Args:
        spec: A preset's name (``"eagle3"``, ``"speculators-v1"``, ``"all"``, ``"dflash:5"``), one layer, or several. A layer
            is an integer (negative counts from the end), ``"embed"``, ``"final"``, an integer as text, as a command
            line gives it, or a range of blocks as Python slices them, ``"0:32:4"``.
        num_layers: The model's number of decoder blocks, N.

    Raises:
        ValueError: An unknown name, a layer out of range, one named twice, or none at all.
    """
    names: Sequence[int | str] = [spec] if spec is None or isinstance(spec, int | str | bytes) else list(spec)
    if len(names) == 1 and isinstance(names[0], str):
        names = _resolve_preset(names[0], num_layers) or names
    layers = [layer for name in names for layer in _resolve_name(name, num_layers)]
    if not layers:
        raise ValueError("layers is empty; name at least one, for example layers=[9, 'final']")
    for layer in layers:
        if layers.count(layer) > 1:
            raise ValueError(f"layer {layer!r} is named twice in {list(names)} (N={num_layers}); name each layer once")
    return tuple(sorted(layers, key=lambda layer: _depth(layer, num_layers)))


def dflash_layers(count: int, *, num_layers: int) -> list[Layer]:
    """What a DFlash drafter that reads `count` layers is trained on: those, spread evenly over 1..N-3, and final.

    The rule is that of z-lab's DFlash, which SpecForge and Model-Optimizer share. Of them SpecForge alone does without
    ``"final"``.
    """
    if count == 1:
        return [num_layers // 2, "final"]
    return [*(round(1 + step * (num_layers - 4) / (count - 1)) for step in range(count)), "final"]


def explain(spec: LayersSpec, *, num_layers: int) -> str:
    """A table, as text: what other systems call the states that `spec` names for a model of `num_layers` blocks.

    A dash stands where a system has no number for a state. What others call "the final state", without a number, is
    ``"final"`` in SGLang, SpecForge, Model-Optimizer's HF dump and DeepSpec; in vLLM, speculators and Model-Optimizer's vLLM
    dump it is layer N-1, before the norm.

    Raises as `resolve_layers` does.
    """
    layers = resolve_layers(spec, num_layers=num_layers)
    rows = {system: [number(layer, num_layers) for layer in layers] for system, number in SYSTEMS.items()}
    cells = {system: ["-" if cell is None else str(cell) for cell in row] for system, row in rows.items()}
    widths = [max(map(len, column)) for column in zip(*cells.values(), strict=True)]
    first = max(map(len, cells))
    lines = [
        "  ".join([system.ljust(first), *(cell.rjust(width) for cell, width in zip(row, widths, strict=True))])
        for system, row in cells.items()
    ]
    return "\n".join([f"layers={spec!r} of {num_layers} blocks", *lines])


def boundary(layer: Layer, *, num_layers: int) -> int | None:
    """The block that ``layer``'s state enters: 0 for embed, i + 1 for layer i (N: the final norm), None for final."""
    if layer == "final":
        return None
    return 0 if layer == "embed" else layer + 1


def column_name(layer: Layer) -> str:
    """The Parquet column of a layer: ``layer_9``, ``layer_embed``, ``layer_final``."""
    return f"layer_{layer}"


def _resolve_preset(name: str, num_layers: int) -> list[Layer] | None:
    """A preset's layers; None for a name that is no preset's."""
    dflash = DFLASH.fullmatch(name)
    if dflash and int(dflash[1]):
        layers = dflash_layers(int(dflash[1]), num_layers=num_layers)
    elif name in PRESETS:
        layers = PRESETS[name](num_layers)
    else:
        return None
    blocks = [layer for layer in layers if isinstance(layer, int)]
    if blocks != sorted(set(blocks)) or blocks[0] < 0:
        raise ValueError(f"layers={name!r} needs a deeper model: {num_layers} blocks make it {layers}; name layers")
    return layers


def _resolve_name(name: int | str, num_layers: int) -> list[Layer]:
    blocks = RANGE.fullmatch(name) if isinstance(name, str) else None
    return _resolve_range(name, blocks, num_layers) if blocks else [_resolve_one(name, num_layers)]


def _resolve_range(name: str, parts: re.Match[str], num_layers: int) -> list[Layer]:
    start, stop, step = (None if part is None else int(part) for part in parts.groups())
    if step is not None and step < 1:
        raise ValueError(f"layers {name!r} go by steps of {step}; give a step of 1 or more, START:STOP:STEP")
    for end in (start, stop):
        if end is not None and not -num_layers <= end <= num_layers:
            raise ValueError(f"layers {name!r} are out of range: the model has {num_layers} blocks, 0:{num_layers}")
    blocks = list(range(num_layers)[start:stop:step])
    if not blocks:
        raise ValueError(f"layers {name!r} are none of the model's {num_layers} blocks; STOP is past the last one")
    return blocks


def _resolve_one(name: int | str, num_layers: int) -> Layer:
    if name in ("embed", "final"):
        return name
    if hasattr(name, "__index__") and not isinstance(name, bool):
        index = operator.index(name)
    elif isinstance(name, str) and INTEGER.fullmatch(name):
        index = int(name)
    else:
        wanted = ", ".join(repr(preset) for preset in PRESETS)
        raise ValueError(
            f"layer {name!r} is not known; wanted 0..{num_layers - 1}, 'embed', 'final', a range such as '0:{num_layers}:4', "
            f"or alone one of {wanted}, 'dflash:5'"
        )
    if not -num_layers <= index < num_layers:
        raise ValueError(
            f"layer {index} is out of range: the model has {num_layers} blocks, so 0..{num_layers - 1} "
            f"(or -{num_layers}..-1); the state after the final norm is 'final'"
        )
    return index % num_layers


def _entered(layer: Layer) -> int | None:
    """The number of the block that a state enters, N for the last block's output."""
    return {"embed": 0, "final": None}[layer] if isinstance(layer, str) else layer + 1


def _left(layer: Layer) -> int | None:
    """The number of the block whose output a state is."""
    return None if isinstance(layer, str) else layer


def _depth(layer: Layer, num_layers: int) -> int:
    return {"embed": -1, "final": num_layers}.get(layer, layer)
