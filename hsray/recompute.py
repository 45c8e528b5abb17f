"""A dataset's prompts recomputed by a reference engine: each layer's errors, and what is wrong with which prompt.

Shapes: T tokens of a prompt, D hidden size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hsray.engine import CaptureEngine, EngineName, EngineOptions, open_engine
from hsray.faults import Comparison, Fault, Kind, explain_misfit
from hsray.layers import Layer
from hsray.reader import HiddenStates

if TYPE_CHECKING:
    import torch

    from hsray.faults import Norm

#: Of the reference's own rounding, what the engine's may be.
ROUNDING_RATIO = 2.0

#: Wrong prompts for which other prompts are recomputed, to find whose states they hold.
MAX_EXPLAINED = 8

#: Such other prompts, the nearest of the same shard or of the sample.
MAX_OTHERS = 16

UNEXPLAINED = (
    "differs from the reference, and no shift of layers or tokens, norm, scale, byte order or other prompt explains it: other "
    "weights, or a fault of the engine's own"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerErrors:
    """How far one layer is from the reference, over all sampled tokens."""

    layer: Layer
    mean_error: float
    """Of a token: the norm of the difference over the reference's."""
    worst_error: float
    worst_prompt: str
    worst_token: int
    mean_cosine: float
    min_cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A prompt as the plan has it."""

    prompt_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(slots=True, kw_only=True)
class _Tally:
    """One layer's errors, token by token."""

    errors: "list[torch.Tensor]" = field(default_factory=list)
    cosines: "list[torch.Tensor]" = field(default_factory=list)
    prompt_ids: list[str] = field(default_factory=list)

    def add(self, prompt_id: str, comparison: Comparison) -> None:
        self.errors.append(comparison.errors_T)
        self.cosines.append(comparison.cosines_T)
        self.prompt_ids.append(prompt_id)

    def summary(self, layer: Layer) -> LayerErrors:
        import torch

        errors, cosines = torch.cat(self.errors), torch.cat(self.cosines)
        worst = max(range(len(self.errors)), key=lambda prompt: float(self.errors[prompt].max()))
        return LayerErrors(
            layer=layer,
            mean_error=float(errors.mean()),
            worst_error=float(errors.max()),
            worst_prompt=self.prompt_ids[worst],
            worst_token=int(self.errors[worst].argmax()),
            mean_cosine=float(cosines.mean()),
            min_cosine=float(cosines.min()),
        )


class Reference:
    """What recomputes prompts, and what is made of the differences."""

    def __init__(
        self,
        engine: EngineName,
        options: EngineOptions,
        *,
        stored_dtype: str,
        norm: "Norm | None",
        allowed: float,
        fixed: bool,
    ):
        """Args: options: every layer of the model; allowed: the misfit up to which states are right, or, unless it is
        `fixed`, what the reference's own rounding comes to if that is more."""
        self._engine, self._options, self._stored_dtype, self._norm = engine, options, stored_dtype, norm
        self._allowed, self._fixed = allowed, fixed
        self._unexplained: dict[int, dict[Layer, torch.Tensor]] = {}

    def compare(
        self, dataset: HiddenStates, chosen: Sequence[int], planned: Mapping[int, Planned]
    ) -> tuple[tuple[LayerErrors, ...], list[Fault]]:
        """Recomputes the chosen prompts: each layer's errors, and the faults."""
        tallies = {layer: _Tally() for layer in dataset.layers}
        faults: list[Fault] = []
        num_suspects = 0
        with open_engine(self._engine, self._options) as engine:
            for index in chosen:
                prompt, truth = dataset[index], engine.capture_alone(planned[index].input_ids)
                comparisons = {
                    layer: Comparison.of(found_TD, truth[layer]) for layer, found_TD in prompt["hidden_states"].items()
                }
                for layer, comparison in comparisons.items():
                    tallies[layer].add(prompt["prompt_id"], comparison)
                suspects = {
                    layer: comparison.misfit
                    for layer, comparison in comparisons.items()
                    if self._is_suspect(layer, prompt["hidden_states"][layer], truth, comparison.misfit)
                }
                num_suspects += bool(suspects)
                elsewhere = (
                    _Elsewhere(engine, planned, index, dataset.layers) if num_suspects <= MAX_EXPLAINED else None
                )
                faults += [
                    self._explain(index, prompt, layer, misfit, truth, elsewhere) for layer, misfit in suspects.items()
                ]
        if self._unexplained and not self._fixed:
            rounding = self._rounding(planned)
            faults = [
                fault
                for fault in faults
                if fault.kind != "unexplained" or fault.misfit > ROUNDING_RATIO * rounding.get(fault.layer, 0.0)
            ]
        return tuple(tally.summary(layer) for layer, tally in tallies.items()), faults

    def _is_suspect(
        self, layer: Layer, found_TD: "torch.Tensor", truth: "Mapping[Layer, torch.Tensor]", misfit: float
    ) -> bool:
        """Whether the misfit is too large, or half of it would be left with the layer before or after: layers of a deep
        model may differ by less than is allowed."""
        if misfit > self._allowed:
            return True
        layers = list(truth)
        place = layers.index(layer)
        beside = [layers[other] for other in (place - 1, place + 1) if 0 <= other < len(layers)]
        return any(Comparison.of(found_TD, truth[other]).misfit < misfit / 2 for other in beside)

    def _explain(
        self,
        index: int,
        prompt: Mapping[str, Any],
        layer: Layer,
        misfit: float,
        truth: "Mapping[Layer, torch.Tensor]",
        elsewhere: "_Elsewhere | None",
    ) -> Fault:
        found_TD, allowed = prompt["hidden_states"][layer], min(self._allowed, misfit / 2)
        explained = explain_misfit(layer, found_TD, truth, allowed=allowed, norm=self._norm, elsewhere=elsewhere)
        if explained is None and (index in self._unexplained or len(self._unexplained) < MAX_EXPLAINED):
            self._unexplained.setdefault(index, {})[layer] = truth[layer]
        kind, what = explained or ("unexplained", UNEXPLAINED)
        return Fault(kind=kind, what=what, layer=layer, prompt_id=prompt["prompt_id"], misfit=misfit)

    def _rounding(self, planned: Mapping[int, Planned]) -> dict[Layer, float]:
        """How far the reference in the stored dtype is from the truth, layer by layer: what rounding alone does."""
        if self._stored_dtype == self._options.model.dtype or self._engine != "transformers":
            return {}
        rounding: dict[Layer, float] = {}
        model = replace(self._options.model, dtype=self._stored_dtype)
        with open_engine(self._engine, replace(self._options, model=model)) as engine:
            for index, truth in self._unexplained.items():
                states = engine.capture_alone(planned[index].input_ids)
                for layer, truth_TD in truth.items():
                    misfit = Comparison.of(states[layer], truth_TD).misfit
                    rounding[layer] = max(misfit, rounding.get(layer, 0.0))
        return rounding


class _Elsewhere:
    """States that may stand in a prompt's place, recomputed when first asked for."""

    def __init__(self, engine: CaptureEngine, planned: Mapping[int, Planned], index: int, layers: Sequence[Layer]):
        self._engine, self._planned, self._index, self._layers = engine, planned, index, layers
        self._states: list[tuple[Kind, str, Mapping[Layer, torch.Tensor]]] | None = None

    def __call__(self, layer: Layer) -> "Iterator[tuple[Kind, str, torch.Tensor]]":
        if self._states is None:
            self._states = list(self._recompute())
        for kind, what, states in self._states:
            yield kind, what, states[layer]

    def _recompute(self) -> "Iterator[tuple[Kind, str, Mapping[Layer, torch.Tensor]]]":
        here, before = self._planned[self._index], self._planned.get(self._index - 1)
        if before is not None and len(before.input_ids) + len(here.input_ids) <= self._engine.options.max_tokens:
            states = self._run(np.concatenate([before.input_ids, here.input_ids]), first=len(before.input_ids))
            yield "context", "was computed with the prompt before it as its context", states
        others = sorted(set(self._planned) - {self._index}, key=lambda other: abs(other - self._index))
        for other in others[:MAX_OTHERS]:
            prompt = self._planned[other]
            yield "other prompt", f"holds prompt {prompt.prompt_id!r}", self._run(prompt.input_ids, first=0)

    def _run(self, input_ids: np.ndarray, *, first: int) -> "dict[Layer, torch.Tensor]":
        states = self._engine.capture_alone(input_ids)
        return {layer: states[layer][first:].clone() for layer in self._layers}
