"""What may be wrong with a prompt's states: by how much they differ from the truth, and which known mistake explains it.

Each known mistake is tried: the states are compared with what they would be had it been made, and the one under which
they fit names the fault. Shapes: T tokens of a prompt, D hidden size; *found* is what is stored, *truth* what was
recomputed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hsray.layers import Layer, boundary
from hsray.model import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

    Norm = Callable[[torch.Tensor], torch.Tensor]
    #: Of a layer, (kind, what, states [T, D]) that may stand in a prompt's place.
    Elsewhere = Callable[[Layer], Iterator[tuple["Kind", str, torch.Tensor]]]
    #: A mistake, what is found [.., D], and what the truth would make of it had it been made.
    Mistake = tuple["Kind", str, torch.Tensor, torch.Tensor]

Kind = Literal[
    "damaged file",
    "model",
    "ids",
    "loss mask",
    "not finite",
    "zeros",
    "norm",
    "layer shift",
    "pre-norm",
    "post-norm",
    "token shift",
    "order",
    "scale",
    "bytes",
    "context",
    "other prompt",
    "unexplained",
]

#: A token may be so many times as far off as the mean token may.
WORST_RATIO = 8

#: The longest prompt whose rows are looked for one by one.
ORDER_TOKENS = 1024

#: Token shifts that are tried.
TOKEN_SHIFTS = (1, -1, 2, -2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that is wrong with one prompt, with one layer of it, or with the dataset."""

    kind: Kind
    what: str
    """Without the layer's and the prompt's name, so that one mistake made throughout reads the same everywhere."""
    layer: Layer | None = None
    prompt_id: str | None = None
    misfit: float = 0.0
    """Where states were compared, `Comparison.misfit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Found against truth, token by token."""

    errors_T: "torch.Tensor"
    """Norm of the difference over the truth's norm."""
    cosines_T: "torch.Tensor"

    @classmethod
    def of(cls, found_TD: "torch.Tensor", truth_TD: "torch.Tensor") -> "Comparison":
        """Compares in float32."""
        import torch

        found_TD, truth_TD = found_TD.float(), truth_TD.float()
        errors_T = (found_TD - truth_TD).norm(dim=1) / truth_TD.norm(dim=1).clamp_min(1e-20)
        cosines_T = torch.nn.functional.cosine_similarity(found_TD, truth_TD, dim=1)
        return cls(errors_T=errors_T, cosines_T=cosines_T.masked_fill(errors_T == 0, 1.0))  # 0 of two rows of zeros

    @property
    def misfit(self) -> float:
        """The mean token's error, or an eighth of the worst one's if that is more; infinite where a number is not finite.

        Not the Frobenius norm: the first token's state is often a thousand times the others' and would hide them.
        """
        misfit = max(float(self.errors_T.mean()), float(self.errors_T.max()) / WORST_RATIO)
        return misfit if misfit == misfit else float("inf")


def explain_misfit(
    layer: Layer,
    found_TD: "torch.Tensor",
    truth: "Mapping[Layer, torch.Tensor]",
    *,
    allowed: float,
    norm: "Norm | None",
    elsewhere: "Elsewhere | None",
) -> tuple[Kind, str] | None:
    """The known mistake under which a layer's states fit best, and fit within `allowed`; None if none does.

    Args:
        truth: Every layer of the model, layer -> [T, D].
        norm: The model's final norm, if it can be had.
        elsewhere: Of a layer, states [T, D] that need the engine once more; asked only if nothing else explains it.
    """
    for mistakes in (_of_this_prompt(layer, found_TD, truth, norm), _of_others(layer, found_TD, elsewhere)):
        fits = [(Comparison.of(as_found, as_meant).misfit, kind, what) for kind, what, as_found, as_meant in mistakes]
        best = min((misfit for misfit, _, _ in fits), default=float("inf"))
        if best <= allowed:
            # The simplest of those that fit as well as the best: a shift by one is another order, too.
            return next((kind, what) for misfit, kind, what in fits if misfit <= max(1.5 * best, 1e-6))
    return None


def _of_this_prompt(
    layer: Layer,
    found_TD: "torch.Tensor",
    truth: "Mapping[Layer, torch.Tensor]",
    norm: "Norm | None",
) -> "Iterator[Mistake]":
    truth_TD = truth[layer]
    yield from _other_layers(layer, found_TD, truth)
    if norm is not None and layer != "final":
        yield "post-norm", "holds its states after the final norm", found_TD, norm(truth_TD.float())
    for shift in TOKEN_SHIFTS:
        if len(found_TD) - abs(shift) > 1:  # one row that fits may do so by chance
            ahead, behind = slice(max(shift, 0), min(shift, 0) or None), slice(max(-shift, 0), min(-shift, 0) or None)
            what = f"is shifted by {_count(shift, 'token')}: row t holds token t{shift:+d}"
            yield "token shift", what, found_TD[behind], truth_TD[ahead]
    yield from _rescaled(found_TD, truth_TD)
    yield from _reordered(found_TD, truth_TD)
    yield from _other_bytes(found_TD, truth_TD)


def _other_layers(layer: Layer, found_TD: "torch.Tensor", truth: "Mapping[Layer, torch.Tensor]") -> "Iterator[Mistake]":
    num_layers = sum(isinstance(other, int) for other in truth)
    last, place = num_layers - 1, {other: boundary(other, num_layers=num_layers) for other in truth}
    for other, other_TD in truth.items():
        if other == layer:
            continue
        if (layer, other) == ("final", last):
            yield "pre-norm", "holds the last block's output, before the final norm", found_TD, other_TD
        elif (layer, other) == (last, "final"):
            yield "post-norm", "holds its states after the final norm", found_TD, other_TD
        elif "final" in (layer, other):
            yield "layer shift", f"holds layer {other!r}", found_TD, other_TD
        else:
            shift = place[other] - place[layer]
            towards = "deeper" if shift > 0 else "less deep"
            what = f"is shifted by {_count(shift, 'layer')}: it holds the state {abs(shift)} {towards}"
            yield "layer shift", what, found_TD, other_TD


def _count(shift: int, what: str) -> str:
    return f"{abs(shift)} {what}{'s' if abs(shift) > 1 else ''}"


def _rescaled(found_TD: "torch.Tensor", truth_TD: "torch.Tensor") -> "Iterator[Mistake]":
    """One factor for all rows: the median of each row's own, as one row may be far larger than the rest."""
    found_TD, truth_TD = found_TD.float(), truth_TD.float()
    scale = float(((found_TD * truth_TD).sum(1) / truth_TD.square().sum(1).clamp_min(1e-20)).median())
    if scale == scale and abs(scale) > 1e-6:
        yield "scale", f"is {scale:.3g} times what it must be", found_TD / scale, truth_TD


def _reordered(found_TD: "torch.Tensor", truth_TD: "torch.Tensor") -> "Iterator[Mistake]":
    import torch

    num_tokens = len(found_TD)
    if 1 < num_tokens <= ORDER_TOKENS and bool(torch.isfinite(found_TD.float()).all()):
        order_T = torch.cdist(found_TD.float(), truth_TD.float()).argmin(dim=1)
        if order_T.unique().numel() == num_tokens:
            yield "order", "has its rows in another order than the tokens", found_TD, truth_TD[order_T]


def _other_bytes(found_TD: "torch.Tensor", truth_TD: "torch.Tensor") -> "Iterator[Mistake]":
    import torch

    num_tokens, hidden_size = found_TD.shape
    contiguous_TD = found_TD.contiguous()
    dtype = str(found_TD.dtype).removeprefix("torch.")
    item_bytes = contiguous_TD.element_size()
    swapped = contiguous_TD.view(torch.uint8).view(num_tokens, hidden_size, item_bytes).flip(-1).contiguous()
    swapped_TD = swapped.view(found_TD.dtype).view(num_tokens, hidden_size)
    yield "bytes", "has its bytes in big-endian order", swapped_TD, truth_TD
    yield "bytes", "is stored column by column", contiguous_TD.view(hidden_size, num_tokens).T, truth_TD
    for other, other_bytes in DTYPE_BYTES.items():
        if other != dtype and other_bytes == item_bytes:
            as_other_TD = contiguous_TD.view(getattr(torch, other))
            yield "bytes", f"holds {other} numbers, labelled {dtype}", as_other_TD, truth_TD


def _of_others(layer: Layer, found_TD: "torch.Tensor", elsewhere: "Elsewhere | None") -> "Iterator[Mistake]":
    for kind, what, other_TD in elsewhere(layer) if elsewhere is not None else ():
        rows = min(len(found_TD), len(other_TD))
        yield kind, what, found_TD[:rows], other_TD[:rows]


def sentences(faults: Sequence[Fault], num_prompts: int) -> list[str]:
    """One line for each mistake: which layers, what is wrong, in how many prompts, and the first of those."""
    groups: dict[tuple[Kind, str], list[Fault]] = {}
    for fault in faults:
        groups.setdefault((fault.kind, fault.what), []).append(fault)
    lines = []
    for (kind, what), group in groups.items():
        layers = list(dict.fromkeys(fault.layer for fault in group if fault.layer is not None))
        prompts = list(dict.fromkeys(fault.prompt_id for fault in group if fault.prompt_id is not None))
        words = [f"{kind}:"]
        if layers:
            words.append(f"layer {', '.join(map(str, layers))}")
        words.append(what)
        if kind == "unexplained":
            words.append(f"(by up to {max(fault.misfit for fault in group):.1%})")
        if prompts:
            words.append(f"(in {len(prompts)} of {num_prompts} prompts, first {prompts[0]!r})")
        lines.append(" ".join(words))
    return lines
