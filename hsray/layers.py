"""What "layer i" means, and how a user names layers.

Integer ``i`` in ``0..N-1`` is the residual stream after decoder block ``i``, before any final norm.
``"embed"`` is what enters block 0; ``"final"`` is what the LM head reads, after the final norm.
In Hugging Face terms ``hidden_states[0]`` is ``"embed"``, ``hidden_states[i + 1]`` is layer ``i`` for ``i < N-1``,
and the last entry is ``"final"``: Hugging Face never returns layer ``N-1``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

Layer = int | Literal["embed", "final"]
LayersSpec = str | int | Sequence[int | str]

#: Presets: the number of blocks N -> layers.
#: ``eagle3``: the inputs of blocks 2, N//2 and N-3, which SGLang and vLLM feed an EAGLE-3 drafter by default.
#: ``speculators-v1``: the outputs of blocks 2, N//2 and N-3 (vllm-project/speculators up to v0.4).
PRESETS: Mapping[str, Callable[[int], list[Layer]]] = {
    "eagle3": lambda num_layers: [1, num_layers // 2 - 1, num_layers - 4, "final"],
    "speculators-v1": lambda num_layers: [2, num_layers // 2, num_layers - 3, "final"],
}


def resolve_layers(spec: LayersSpec, *, num_layers: int) -> tuple[Layer, ...]:
    """Turns what a user wrote into layers, in depth order: embed, 0, 1, .., N-1, final.

    Args:
        spec: A preset's name, one layer, or several. A layer is an integer (negative counts from the end),
            ``"embed"``, ``"final"``, or an integer as text, as a command line gives it.
        num_layers: The model's number of decoder blocks, N.

    Raises:
        ValueError: An unknown name, a layer out of range, one named twice, or none at all.
    """
    names: Sequence[int | str] = [spec] if isinstance(spec, (int, str)) else list(spec)
    if len(names) == 1 and names[0] in PRESETS:
        preset = names[0]
        names = PRESETS[preset](num_layers)
        blocks = [name for name in names if isinstance(name, int)]
        if blocks != sorted(set(blocks)) or blocks[0] < 0:
            raise ValueError(
                f"layers={preset!r} needs a deeper model: {num_layers} blocks make it {names}; name layers"
            )
    layers = [_resolve_one(name, num_layers) for name in names]
    if not layers:
        raise ValueError("layers is empty; name at least one, for example layers=[9, 'final']")
    for layer in layers:
        if layers.count(layer) > 1:
            raise ValueError(f"layer {layer!r} is named twice in {list(names)} (N={num_layers}); name each layer once")
    return tuple(sorted(layers, key=lambda layer: _depth(layer, num_layers)))


def boundary(layer: Layer, *, num_layers: int) -> int | None:
    """The block that ``layer``'s state enters: 0 for embed, i + 1 for layer i (N: the final norm), None for final."""
    if layer == "final":
        return None
    return 0 if layer == "embed" else layer + 1


def column_name(layer: Layer) -> str:
    """The Parquet column of a layer: ``layer_9``, ``layer_embed``, ``layer_final``."""
    return f"layer_{layer}"


def _resolve_one(name: int | str, num_layers: int) -> Layer:
    if name in ("embed", "final"):
        return name
    try:
        index = name if type(name) is int else int(str(name))
    except ValueError:
        wanted = ", ".join(repr(preset) for preset in PRESETS)
        raise ValueError(
            f"layer {name!r} is not known; wanted 0..{num_layers - 1}, 'embed', 'final', or alone one of {wanted}"
        ) from None
    if not -num_layers <= index < num_layers:
        raise ValueError(
            f"layer {index} is out of range: the model has {num_layers} blocks, so 0..{num_layers - 1} "
            f"(or -{num_layers}..-1); the state after the final norm is 'final'"
        )
    return index % num_layers


def _depth(layer: Layer, num_layers: int) -> int:
    return {"embed": -1, "final": num_layers}.get(layer, layer)
