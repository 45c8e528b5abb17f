"""Checks, inside the scheduler and once at its start, that each captured layer is what it is called.

No second copy of the model is needed. On one prompt it compares

* each captured block boundary with what the block before it returned, read by another hook than the capture's;
* ``"embed"`` with the embedding module's own output (times a constant, which Gemma applies);
* ``"final"`` with the final norm applied to the last block's state, row by row;
* the LM head's choice on the last row of ``"final"`` with the token that SGLang itself returns;
* under tensor parallelism, what each block returned on every rank: a partial sum or a shard differs from rank to rank.

What differs between SGLang's versions is where the residual stands, and is read here and nowhere else, by what is there and
not by number (`block_input`, `norm_input`, `block_output`):

    state                 up to 0.5.20                                   0.5.23, classes moved to it
    what enters a block   hidden_states, plus the argument `residual`    forward_batch.residual_stream.snapshot(..)
    a block's output      the stream, or (output, residual, ..)          a handle that the same stream completes
    into the final norm   hidden_states, plus `residual`                 the same
    reading it            a local sum                                    may sum over the ranks: all must read

(Without a GPU the platform differs too: `hsray.sglang_cpu`.)

Shapes: T tokens of the canary, D hidden size.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hsray.layers import Layer, boundary

if TYPE_CHECKING:
    import torch

#: Relative errors (Frobenius). A block's output is the next one's input, so the first allows only the rounding of one
#: sum; a norm may be fused with that sum and accumulate in float32.
SAME_STATE = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 2e-3}
SAME_NORM = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
#: SGLang's LM head rounds as its dtype does: scores this close, as a share of the best one's lead over the mean, tie.
NEAR_TIE = 0.03
MAX_TIES = 1000


class Canary:
    """Watches the blocks' outputs for one prompt, then judges the states captured from it."""

    def __init__(self, model: "torch.nn.Module", decoder: "torch.nn.Module"):
        self._model, self._norm, self._num_layers = model, decoder.norm, len(decoder.layers)
        self._outputs: dict[int, torch.Tensor] = {}
        self._embedding: torch.Tensor | None = None
        self._hooks = [
            block.register_forward_hook(self._block_hook(number), with_kwargs=True)
            for number, block in enumerate(decoder.layers, start=1)
        ]
        embedding = getattr(decoder, "embed_tokens", None)
        if embedding is not None:
            self._hooks.append(embedding.register_forward_hook(self._keep_embedding))

    def _block_hook(self, number: int) -> Any:
        def hook(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._outputs[number] = block_output(output, [*args, *kwargs.values()])

        return hook

    def _keep_embedding(self, _module: Any, _args: Any, output: "torch.Tensor") -> None:
        self._embedding = output.detach().clone()

    def release(self) -> None:
        """Watches no more; what was seen stays."""
        for hook in self._hooks:
            hook.remove()

    def compare_ranks(self, dtype: str) -> list[str]:
        """The blocks whose output is not the same on every rank. All ranks must call it."""
        import torch
        from sglang.srt.distributed import get_tp_group

        group = get_tp_group()
        if group.world_size == 1:
            return []
        norms = {number: output_TD.float().norm(dim=1).cpu() for number, output_TD in self._outputs.items()}
        by_rank: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(by_rank, norms, group=group.cpu_group)
        faults = []
        for number, norms_T in by_rank[0].items():
            errors = [float((other[number] - norms_T).norm() / norms_T.norm()) for other in by_rank[1:]]
            if not max(errors) <= SAME_STATE[dtype]:
                faults.append(f"block {number - 1}'s output differs between ranks by {max(errors):.1e} in its norms")
        return faults

    def judge(self, states: "Mapping[Layer, torch.Tensor]", dtype: str) -> list[str]:
        """The faults of the captured states (layer -> [T, D]), each with the layer and by how much."""
        import torch

        device = next(self._model.parameters()).device
        captured = {layer: hidden_TD.to(device) for layer, hidden_TD in states.items()}
        faults = []
        for layer, hidden_TD in captured.items():
            if not torch.isfinite(hidden_TD).all():
                faults.append(f"layer {layer!r} has numbers that were not written or are not finite")
            number = boundary(layer, num_layers=self._num_layers)
            if number:
                seen_TD = self._outputs.get(number)
                faults += _compare(
                    f"layer {layer!r}", hidden_TD, seen_TD, f"block {number - 1}'s output", SAME_STATE[dtype]
                )
        if "embed" in captured and self._embedding is not None:
            faults += _compare_direction(captured["embed"], self._embedding, SAME_STATE[dtype])
        if "final" in captured:
            last_TD = self._outputs.get(self._num_layers)
            normed_TD = None if last_TD is None else _apply_norm(self._norm, last_TD)
            what = "the final norm of the last block's output"
            faults += _compare("layer 'final'", captured["final"], normed_TD, what, SAME_NORM[dtype])
        return faults

    def choices(self, final_TD: "torch.Tensor", vocab_size: int) -> list[int] | None:
        """The tokens that the LM head, in float32, scores best after the last row: the best and its near ties.

        None where the head's weight is sharded over ranks or quantised, or so many tie that its choice says nothing.
        """
        heads = (getattr(module, "lm_head", None) for module in self._model.modules())
        head = next((head for head in heads if head is not None), None)
        weight = getattr(head, "weight", None)
        if weight is None or weight.dim() != 2 or weight.shape[0] < vocab_size or weight.shape[1] != final_TD.shape[1]:
            return None
        scores_V = weight[:vocab_size].float() @ final_TD[-1].to(weight.device).float()
        bias = getattr(head, "bias", None)
        if bias is not None:
            scores_V = scores_V + bias[:vocab_size].float()
        near = scores_V.max() - NEAR_TIE * (scores_V.max() - scores_V.mean())
        choices = (scores_V >= near).nonzero()[:, 0].tolist()
        return choices if len(choices) <= MAX_TIES else None


def block_input(block: "torch.nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any]) -> "list[torch.Tensor]":
    """The residual stream that enters a block, as the one or two tensors [B, D] whose sum it is.

    SGLang up to 0.5.20 passes a pending residual beside the last block's output; 0.5.23 keeps it, with whatever the
    output still owes, on ``forward_batch.residual_stream``, for the classes moved to it.
    """
    places = _places(type(block))
    hidden_states, forward_batch, residual = (
        args[place] if (place := places.get(name, len(args))) < len(args) else kwargs.get(name)
        for name in ("hidden_states", "forward_batch", "residual")
    )
    stream = getattr(forward_batch, "residual_stream", None)
    if stream is not None:
        return [stream.snapshot(hidden_states)]
    return [hidden_states] if residual is None else [hidden_states, residual]


def norm_input(_norm: "torch.nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any]) -> "list[torch.Tensor]":
    """The residual stream that enters the final norm: its first argument and the residual it adds, if any, [B, D]."""
    hidden_states, *rest = args
    residual = rest[0] if rest else kwargs.get("residual")
    return [hidden_states] if residual is None else [hidden_states, residual]


@functools.cache
def _places(block_type: type) -> dict[str, int]:
    """Where a block's forward takes each of its arguments; to bind them anew takes longer than a short prompt's block."""
    names = list(inspect.signature(block_type.forward).parameters)[1:]
    return {name: place for place, name in enumerate(names)}


def block_output(output: Any, arguments: Sequence[Any]) -> "torch.Tensor":
    """The residual stream after a block, [T, D], from what its forward returned.

    Up to 0.5.20 that is the stream, or (output, pending residual, ..); in 0.5.23, for the classes moved to it, a handle
    that the batch's residual stream completes.
    """
    import torch

    for argument in arguments:
        stream = getattr(argument, "residual_stream", None)
        if stream is not None:
            return stream.snapshot(output).detach()
    if isinstance(output, torch.Tensor):
        return output.detach().clone()
    hidden_states, *rest = output
    residual = rest[0] if rest else None
    return hidden_states.detach().clone() if residual is None else (hidden_states + residual).detach()


def _apply_norm(norm: "torch.nn.Module", hidden_TD: "torch.Tensor") -> "torch.Tensor":
    import torch

    with torch.no_grad():
        normed = norm(hidden_TD.clone())
    return normed[0] if isinstance(normed, tuple) else normed


def _compare(
    name: str, found_TD: "torch.Tensor", seen_TD: "torch.Tensor | None", what: str, allowed: float
) -> list[str]:
    if seen_TD is None:
        return [f"{name}: {what} was never seen"]
    seen_TD = seen_TD[: len(found_TD)].float()
    error = float((found_TD.float() - seen_TD).norm(dim=1).div(seen_TD.norm(dim=1).clamp_min(1e-20)).max())
    if error <= allowed:
        return []
    return [f"{name} differs from {what} by {error:.1e} in its worst row ({allowed:.0e} allowed)"]


def _compare_direction(found_TD: "torch.Tensor", seen_TD: "torch.Tensor", allowed: float) -> list[str]:
    # Some families scale the embedding after looking it up; the scale is one number for all.
    found_TD, seen_TD = found_TD.float(), seen_TD[: len(found_TD)].float()
    scale = float((found_TD * seen_TD).sum() / (seen_TD * seen_TD).sum())
    return _compare("layer 'embed'", found_TD, scale * seen_TD, f"{scale:.3g} times the embedding", allowed)
