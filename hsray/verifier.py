"""`verify`: whether a dataset's states are what they are called, and if not, what is wrong with which layer.

A seeded sample of prompts is recomputed by a reference engine; before that stand the checks that need no model: every
sampled shard opens, ids and masks are the plan's, numbers are finite and were written, the model is the one the
manifest names, and ``"final"`` is the model's final norm of layer N-1 (for which one tensor of the model is read).

Shapes: T tokens of a prompt, D hidden size.
"""

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hsray.engine import CaptureError, EngineName, EngineOptions
from hsray.faults import Comparison, Fault, sentences
from hsray.layers import resolve_layers
from hsray.manifest import Identity, Manifest, ManifestError, load_manifest, planned_prompts, published_shards
from hsray.model import ModelDescription, describe_model, load_tokenizer, tokenizer_digest
from hsray.norm import NormError, load_final_norm
from hsray.reader import HiddenStates, read
from hsray.recompute import LayerErrors, Planned, Reference
from hsray.shard import ShardError
from hsray.store import Store

if TYPE_CHECKING:
    from hsray.faults import Norm

#: How far a prompt's states may be from the reference's (`hsray.faults.Comparison.misfit`), by the dtype they are stored in:
#: a few times what a dense model's own rounding comes to. Where it comes to more, the reference is asked how much.
TOLERANCE = {"float32": 2e-3, "float16": 2e-2, "bfloat16": 6e-2, "float8_e4m3": 1.2e-1}

#: What leaves a prompt's states comparable.
ROW_FAULTS = ("not finite", "zeros")
COMPARABLE = (*ROW_FAULTS, "loss mask", "norm")


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found."""

    out: str
    num_prompts: int
    """In the sample."""
    num_tokens: int
    of_prompts: int
    """That the dataset holds."""
    reference: str
    """What recomputed them."""
    layers: tuple[LayerErrors, ...] = ()
    faults: list[Fault] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """What could not be checked, and why."""

    @property
    def right(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def __str__(self) -> str:
        lines = [
            f"{self.out}: {self.num_prompts} of {self.of_prompts} prompts, {self.num_tokens} tokens, against {self.reference}"
        ]
        if self.layers:
            lines.append(
                f"{'layer':>8}  {'mean error':>10}  {'worst':>8}  {'mean cosine':>11}  {'least':>8}  worst token"
            )
        for layer in self.layers:
            lines.append(
                f"{layer.layer!s:>8}  {layer.mean_error:>10.2e}  {layer.worst_error:>8.1e}  {layer.mean_cosine:>11.6f}  "
                f"{layer.min_cosine:>8.5f}  {layer.worst_token} of {layer.worst_prompt!r}"
            )
        lines += [f"not checked: {words}" for words in self.unchecked]
        if self.right:
            return "\n".join([*lines, "right"])
        return "\n".join([*lines, *(f"WRONG: {words}" for words in sentences(self.faults, self.num_prompts))])


def verify(
    out: str | os.PathLike[str],
    *,
    sample: int = 64,
    seed: int = 0,
    engine: EngineName | None = "transformers",
    engine_args: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    model: str | None = None,
    tolerance: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> VerifyReport:
    """Recomputes a sample of a dataset's prompts and names what is wrong, if anything is.

    Args:
        out: The dataset's folder; one still being built is verified as far as it goes.
        sample: Prompts to recompute, chosen by `seed`; all where there are fewer.
        seed: Another one chooses other prompts.
        engine: What recomputes them: ``"transformers"`` (any device), ``"sglang"``, or None to make only the checks that
            need no engine.
        engine_args: Arguments for that engine, such as ``{"device": "cpu"}``.
        dtype: What that engine computes in; ``"auto"`` is the checkpoint's own.
        model: Where the model lies now; by default where it lay when the dataset was built.
        tolerance: How far a prompt's mean token may be off, as a share of its norm (its worst token eight times as
            far); by default `TOLERANCE` of the stored dtype or, if more, twice the reference's own rounding in it.
        storage_options: For the filesystem of `out`.
        trust_remote_code: Lets the model's own code run.

    Raises:
        ManifestError: `out` holds no dataset, or nothing of it yet.
        FileNotFoundError: the model is not there.
        CaptureError: the reference engine does not open.
    """
    if sample < 1:
        raise ValueError(f"sample={sample}; give a number of prompts from 1 up")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"tolerance={tolerance!r}; give a share of a token's norm above 0")
    store = Store(out, storage_options)
    manifest = load_manifest(store)
    if manifest is None or manifest.plan is None:
        raise ManifestError(f"{store.url!r} holds no dataset that can be verified yet; build it first")
    report = VerifyReport(
        out=store.url, num_prompts=0, num_tokens=0, of_prompts=0, reference=engine or "no engine: only what needs none"
    )
    try:
        dataset = read(out, storage_options=storage_options)
    except ManifestError as error:  # of its inventory: there is a dataset
        report.faults.append(Fault(kind="damaged file", what=str(error)))
        return report
    if not len(dataset):
        raise ManifestError(f"{store.url!r} holds no shard yet; build it first")
    report.of_prompts = len(dataset)
    chosen = sorted(random.Random(seed).sample(range(len(dataset)), min(sample, len(dataset))))
    planned = _read_plan(manifest, store, chosen)
    description = _describe(
        model or manifest.identity.model, dtype, trust_remote_code, report, needed=engine is not None
    )
    if description is not None:
        report.faults += _check_model(manifest.identity, description, trust_remote_code)
    norm = _load_norm(manifest.identity, description, trust_remote_code, report)
    allowed = tolerance or TOLERANCE[manifest.identity.stored_dtype]
    sound = []
    for index in chosen:
        faults = _check_alone(dataset, index, planned[index], description, norm, allowed)
        report.num_prompts += 1
        report.num_tokens += len(planned[index].input_ids)
        report.faults += faults
        if all(fault.kind in COMPARABLE for fault in faults):
            sound.append(index)
    if engine is not None and sound:
        options = _engine_options(description, planned, engine_args or {}, trust_remote_code)
        stored_dtype, fixed = manifest.identity.dtype, tolerance is not None
        reference = Reference(engine, options, stored_dtype=stored_dtype, norm=norm, allowed=allowed, fixed=fixed)
        report.reference = f"{engine} in {description.dtype}"
        report.layers, faults = reference.compare(dataset, sound, planned)
        report.faults = _without_echoes(report.faults, faults, last=description.num_layers - 1)
    return report


def _engine_options(
    description: ModelDescription,
    planned: Mapping[int, Planned],
    engine_args: Mapping[str, Any],
    trust_remote_code: bool,
) -> EngineOptions:
    """Every layer of the model, one prompt at a time: a state may be another layer's."""
    longest = max(len(prompt.input_ids) for prompt in planned.values())
    return EngineOptions(
        model=description,
        layers=resolve_layers("all", num_layers=description.num_layers),
        max_tokens=longest,
        buffer_tokens=longest,
        num_buffers=1,
        trust_remote_code=trust_remote_code,
        engine_args=engine_args,
    )


def _without_echoes(alone: Sequence[Fault], compared: Sequence[Fault], *, last: int) -> list[Fault]:
    """Both lists together, each mistake once: as the comparison explains it, else as the prompt alone shows it.

    A row of zeros that the reference has too (of a padding token, for one) is none.
    """
    unexplained = {(fault.prompt_id, fault.layer) for fault in compared if fault.kind == "unexplained"}
    shown = {(fault.prompt_id, fault.layer) for fault in alone if fault.kind in ROW_FAULTS}
    # "final" may be right and layer N-1, with which it was compared, wrong.
    blamed = {fault.prompt_id for fault in compared if fault.layer in ("final", last)}
    kept = []
    for fault in alone:
        if fault.kind in ROW_FAULTS:
            is_one = (fault.prompt_id, fault.layer) in unexplained
        else:
            is_one = fault.kind != "norm" or fault.prompt_id not in blamed
        kept += [fault] * is_one
    return kept + [
        fault for fault in compared if fault.kind != "unexplained" or (fault.prompt_id, fault.layer) not in shown
    ]


def _read_plan(manifest: Manifest, store: Store, chosen: Sequence[int]) -> dict[int, Planned]:
    """The prompts of the shards that hold the chosen ones, by their place among the published prompts."""
    published = sorted(published_shards(store, manifest.identity.file_format))
    starts = np.cumsum([0, *(manifest.plan.shard_prompts[shard] for shard in published)])
    wanted = {published[at]: int(starts[at]) for at in np.searchsorted(starts, chosen, side="right") - 1}
    planned = {}
    for prompts in planned_prompts(manifest, store, wanted):
        masks = prompts.loss_masks.flatten().to_numpy(zero_copy_only=False)
        rows = zip(prompts.prompt_ids.to_pylist(), prompts.tokens, np.split(masks, prompts.ends[1:-1]), strict=True)
        for row, (prompt_id, ids_T, mask_T) in enumerate(rows, start=wanted[prompts.shard]):
            planned[row] = Planned(prompt_id=prompt_id, input_ids=ids_T, loss_mask=mask_T)
    return planned


def _describe(
    model: str, dtype: str, trust_remote_code: bool, report: VerifyReport, *, needed: bool
) -> ModelDescription | None:
    try:
        return describe_model(model, dtype=dtype, trust_remote_code=trust_remote_code)
    except FileNotFoundError as error:
        if needed:
            raise FileNotFoundError(
                f"{error}; say where it lies now with model=, or engine=None for what needs none"
            ) from error
        report.unchecked.append(f"vocabulary, model and final norm, since the model is not there: {error}")
        return None


def _check_model(identity: Identity, description: ModelDescription, trust_remote_code: bool) -> list[Fault]:
    """Whether the model is the one that the dataset was built from."""
    tokenizer = load_tokenizer(description.model, trust_remote_code=trust_remote_code)
    found = {
        "config_digest": description.config_digest,
        "weights_digest": description.weights_digest,
        "tokenizer_digest": tokenizer_digest(tokenizer),
    }
    return [
        Fault(
            kind="model",
            what=f"{description.model!r} is not the dataset's: its {name} is {value}, the manifest's {wanted}",
        )
        for name, value in found.items()
        if value != (wanted := getattr(identity, name))
    ]


def _load_norm(
    identity: Identity, description: ModelDescription | None, trust_remote_code: bool, report: VerifyReport
) -> "Norm | None":
    if description is None:
        return None
    try:
        return load_final_norm(description.model, dtype=identity.read_dtype, trust_remote_code=trust_remote_code)
    except (NormError, CaptureError) as error:
        report.unchecked.append(f"'final' against the final norm of layer N-1: {error}")
        return None


def _check_alone(
    dataset: HiddenStates,
    index: int,
    planned: Planned,
    description: ModelDescription | None,
    norm: "Norm | None",
    allowed: float,
) -> list[Fault]:
    """What is wrong with a prompt, as far as no engine is needed to say so."""
    import torch

    try:
        prompt = dataset[index]
    except (ShardError, FileNotFoundError) as error:
        return [Fault(kind="damaged file", what=str(error), prompt_id=planned.prompt_id)]
    faults = _check_tokens(prompt, planned, description)
    states = prompt["hidden_states"]
    for layer, hidden_TD in states.items():
        hidden_TD = hidden_TD.float()
        where = {"layer": layer, "prompt_id": planned.prompt_id}
        for kind, what, bad_T in (
            ("not finite", "has rows with NaN or infinite numbers", ~torch.isfinite(hidden_TD).all(dim=1)),
            ("zeros", "has rows of zeros: they were never written", (hidden_TD == 0).all(dim=1)),
        ):
            if bool(bad_T.any()) and (kind, layer) != ("zeros", "embed"):  # a padding token's embedding may be zero
                rows = bad_T.nonzero()[:, 0].tolist()
                faults.append(Fault(kind=kind, what=f"{what}, first at token {rows[0]}", **where))
    if norm is None or faults or not {"final", description.num_layers - 1} <= set(states):
        return faults
    normed_TD = norm(states[description.num_layers - 1])
    if Comparison.of(states["final"], normed_TD).misfit > allowed:
        what = f"is not the model's final norm of layer {description.num_layers - 1}"
        faults.append(Fault(kind="norm", what=what, layer="final", prompt_id=planned.prompt_id))
    return faults


def _check_tokens(prompt: Mapping[str, Any], planned: Planned, description: ModelDescription | None) -> list[Fault]:
    faults = []
    if prompt["prompt_id"] != planned.prompt_id:
        what = f"stands where the plan has {planned.prompt_id!r}"
        faults.append(Fault(kind="ids", what=what, prompt_id=prompt["prompt_id"]))
    for kind, name, wanted in (
        ("ids", "input_ids", planned.input_ids),
        ("loss mask", "loss_mask", planned.loss_mask),
    ):
        found = prompt[name].numpy()
        if not np.array_equal(found, wanted):
            same = min(len(found), len(wanted))
            first = next(iter(np.flatnonzero(found[:same] != wanted[:same])), same)
            what = f"not the {name} of the plan, from token {first} on"
            faults.append(Fault(kind=kind, what=what, prompt_id=planned.prompt_id))
    if description is not None and not 0 <= planned.input_ids.min() <= planned.input_ids.max() < description.vocab_size:
        what = f"it has token ids outside the model's vocabulary, 0..{description.vocab_size - 1}"
        faults.append(Fault(kind="ids", what=what, prompt_id=planned.prompt_id))
    return faults
