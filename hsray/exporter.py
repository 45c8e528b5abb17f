"""`export`: a dataset to another trainer's own files, shard by shard, through Ray.

A shard's files are written by one task, each published whole under a name that follows from the dataset, and then the
shard is ticked off in ``hsray-export/``; what is ticked off is not written again. The driver sees counts alone.
"""

import functools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hsray.layers import Layer, LayersSpec, resolve_layers
from hsray.manifest import Manifest, load_complete
from hsray.norm import load_final_norm
from hsray.raydata import blocks_of, ray_data
from hsray.row_group import RowGroup
from hsray.shard import state_columns
from hsray.shard_file import ShardFile
from hsray.store import Store
from hsray.targets import TARGETS, Sample, Selection, Written
from hsray.tasks import map_batches

if TYPE_CHECKING:
    import torch

#: Says what an export is, and in its folder ``shards/`` which shards are written.
HEAD_NAME = "hsray-export/export.json"
TICKS = "hsray-export/shards"


class ExportError(ValueError):
    """A dataset has not what a target needs, or the folder holds another export."""


@dataclass(slots=True, kw_only=True)
class ExportReport:
    """What an export did."""

    to: str
    target: str
    layers: tuple[Layer, ...]
    """The dataset's layers that were taken."""
    prompts: int
    tokens: int
    new_shards: int = 0
    """Written by this call; the others were there already."""
    files: int = 0
    """Of this call, as are the bytes."""
    nbytes: int = 0
    dropped_tokens: int = 0
    """Of all shards: what a target of fixed rows has no place for."""

    def __str__(self) -> str:
        layers = ", ".join(map(str, self.layers))
        lines = [f"{self.to}: {self.prompts:,} prompts, {self.tokens:,} tokens as {self.target}; layers {layers}"]
        if self.dropped_tokens:
            lines.append(f"{self.dropped_tokens:,} tokens at shards' ends fill no row and are left out")
        return "\n".join(
            [
                *lines,
                f"{self.new_shards:,} shards written in this run: {self.files:,} files, {self.nbytes / 1e6:,.1f} MB",
            ]
        )


def export(
    out: str | os.PathLike[str],
    target: str,
    *,
    to: str | os.PathLike[str],
    layers: LayersSpec | None = None,
    context_size: int = 1024,
    model: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> ExportReport:
    """Writes a complete dataset as another trainer's own files, or resumes doing so.

    Args:
        out: The dataset's folder.
        target: A name of `hsray.targets.TARGETS`, such as ``"speculators"``.
        to: The folder for the files, on any fsspec target that every node reaches; new, or one begun by the same export.
        layers: The dataset's layers that the drafter reads; by default every block it holds but the last one, or, for
            a target that knows no last state, all it holds.
        context_size: Tokens of a row, for ``"sae-lens"``.
        model: Where the model lies now, for a post-norm state that the dataset lacks: it is made from layer N-1 by the
            model's own final norm. By default where it lay when the dataset was built.
        storage_options: For the filesystem of `out` and `to`.
        trust_remote_code: Lets the model's own code run.
        progress: Shows a progress bar.

    Raises:
        ExportError: the dataset lacks a state that the target needs, or `to` holds something else.
        ManifestError: `out` holds no complete dataset.
    """
    if target not in TARGETS:
        raise ExportError(f"target={target!r} is not known; wanted one of {', '.join(TARGETS)}")
    if context_size < 1:
        raise ExportError(f"context_size={context_size}; give a number of tokens from 1 up")
    dataset, folder = Store(out, storage_options), Store(to, storage_options)
    if folder.is_private:
        raise ExportError(f"to={folder.url!r} is memory of this process alone; give a folder, or an object store")
    manifest = load_complete(dataset, purpose="export")
    selection = select(manifest, target, layers=layers, context_size=context_size, model=model)
    job = ExportJob(
        out=dataset.url,
        to=folder.url,
        storage_options=storage_options,
        target=target,
        selection=selection,
        manifest=manifest,
        trust_remote_code=trust_remote_code,
    )
    written = _open_export(job, folder)
    report = ExportReport(
        to=folder.url,
        target=TARGETS[target].what,
        layers=selection.read,
        prompts=sum(manifest.plan.shard_prompts),
        tokens=sum(manifest.plan.shard_tokens),
    )
    pending = sorted(set(range(manifest.plan.num_shards)) - written)
    if selection.derived and pending:
        _final_norm(selection.model, selection.dtype, trust_remote_code)  # fails here, if it does, and not in a task
    _write(job, pending, report, progress)
    finish = TARGETS[target].finish
    if finish is not None:
        finish(folder, dataset, manifest, selection)
    for name in ("", TICKS, *folder.list()):
        folder.sweep(name)
    if TARGETS[target].fixed_rows:
        report.dropped_tokens = sum(num_tokens % context_size for num_tokens in manifest.plan.shard_tokens)
    return report


def select(
    manifest: Manifest, target: str, *, layers: LayersSpec | None, context_size: int, model: str | None = None
) -> Selection:
    """The states of a dataset that a target takes.

    Raises:
        ExportError: one that it needs is not there; the message names the ``layers=`` to build with.
    """
    wanted, identity = TARGETS[target], manifest.identity
    last_block, held = identity.num_layers - 1, identity.layers
    if layers is not None:
        chosen = resolve_layers(layers, num_layers=identity.num_layers)
    elif wanted.last is None:
        chosen = held
    else:
        chosen = tuple(layer for layer in held if isinstance(layer, int) and layer != last_block)
    if wanted.last is not None:  # a preset's "final" names the last state, which the target takes as it needs it
        chosen = tuple(layer for layer in chosen if layer != "final")
    source: tuple[Layer, ...] = ()
    if wanted.last == "pre-norm" or (wanted.last == "post-norm" and "final" not in held and last_block in held):
        source = (last_block,)
    elif wanted.last == "post-norm":
        source = ("final",)
    missing = [layer for layer in (*chosen, *source) if layer not in held]
    if missing:
        needed = [*chosen, *(layer for layer in source if layer not in chosen)]
        reads = {"pre-norm": " and the last block's output, pre-norm", "post-norm": " and the final state, post-norm"}
        raise ExportError(
            f"{target} needs layers {list(chosen)}{reads.get(wanted.last, '')}; the dataset has {list(held)} and lacks "
            f"{missing}: build with layers={needed}"
        )
    if not chosen or wanted.num_layers not in (None, len(chosen)):
        count = wanted.num_layers or "one or more"
        raise ExportError(
            f"{target} takes {count} layers; {list(chosen)} are {len(chosen)}: choose them with layers=, or build with "
            "layers='eagle3'"
        )
    if wanted.dtype not in (None, identity.read_dtype):
        raise ExportError(
            f"{target} takes {wanted.dtype} alone; the dataset is {identity.read_dtype}: build with dtype={wanted.dtype!r}"
        )
    return Selection(
        layers=chosen,
        last=wanted.last,
        derived=wanted.last == "post-norm" and source == (last_block,),
        num_layers=identity.num_layers,
        hidden_size=identity.hidden_size,
        dtype=identity.read_dtype,
        model=model or identity.model,
        context_size=context_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """What a task needs to know."""

    out: str
    to: str
    storage_options: Mapping[str, Any] | None
    target: str
    selection: Selection
    manifest: Manifest
    trust_remote_code: bool


def _open_export(job: ExportJob, folder: Store) -> set[int]:
    """The shards that an export of the same has written; begins one in a folder that is new.

    Raises:
        ExportError: the folder holds something else.
    """
    selection = {**asdict(job.selection), "layers": list(job.selection.layers)}
    # Where the model lies now is not what the export is.
    selection.pop("model")
    head = {"format": "hsray-export", "target": job.target, "dataset": job.manifest.identity.digest, **selection}
    if folder.exists(HEAD_NAME):
        found = json.loads(folder.read(HEAD_NAME))
        differences = [
            f"  {name}: there is {found.get(name)!r}, this export has {value!r}"
            for name, value in head.items()
            if found.get(name) != value
        ]
        if differences:
            words = "\n".join([*differences, "Export the same to resume it, or give another to="])
            raise ExportError(f"{folder.url!r} holds another export:\n{words}")
        return {int(name.removesuffix(".json")) for name in folder.list(TICKS)}
    names = sorted(folder.list())
    if names:
        raise ExportError(
            f"{folder.url!r} is not empty (found {', '.join(names[:5])}); give a to= that is empty or new"
        )
    folder.publish(HEAD_NAME, (json.dumps(head, indent=1) + "\n").encode())
    return set()


def _write(job: ExportJob, pending: list[int], report: ExportReport, progress: bool) -> None:
    """Writes the pending shards, one a task, and counts what comes back."""
    import ray.data
    from tqdm import tqdm

    if not pending:
        return
    starts = np.cumsum([0, *job.manifest.plan.shard_prompts]).tolist()
    rows = [{"shard": shard, "first_row": starts[shard]} for shard in pending]
    num_tokens = sum(job.manifest.plan.shard_tokens[shard] for shard in pending)
    with ray_data(), tqdm(total=num_tokens, unit="tok", unit_scale=True, desc=job.target, disable=not progress) as bar:
        shards = ray.data.from_items(rows, override_num_blocks=len(rows))
        receipts = map_batches(shards, _write_shard, fn_kwargs={"job": ray.put(job)}, batch_size=1, num_cpus=1)
        for block in blocks_of(receipts):
            for receipt in block.to_pylist():
                report.new_shards += 1
                report.files += receipt["files"]
                report.nbytes += receipt["nbytes"]
                bar.update(job.manifest.plan.shard_tokens[receipt["shard"]])


def _write_shard(batch: pa.Table, *, job: Any) -> pa.Table:
    """Writes the files of one shard, then ticks it off."""
    import ray

    job = ray.get(job)
    [row] = batch.to_pylist()
    dataset, folder = Store(job.out, job.storage_options), Store(job.to, job.storage_options)
    samples = read_samples(dataset, job, row["shard"], row["first_row"])
    written: Written = TARGETS[job.target].write(folder, row["shard"], samples, job.selection)
    folder.publish(f"{TICKS}/{row['shard']:06d}.json", json.dumps(asdict(written)).encode())
    return pa.Table.from_pylist([{"shard": row["shard"], "files": written.files, "nbytes": written.nbytes}])


def read_samples(dataset: Store, job: ExportJob, shard: int, first_row: int) -> Iterator[Sample]:
    """A shard's prompts in order; a row group of it is held at a time."""
    selection, stored = job.selection, job.manifest.identity.stored_dtype
    file = ShardFile(dataset, job.manifest.expected(shard))
    try:
        for group in range(file.num_groups):
            states = [name for layer in selection.read for name in state_columns(layer, stored)]
            columns = ["prompt_id", "input_ids", "loss_mask", *states]
            prompts = RowGroup(file.read(group, columns), selection.read)
            for prompt in map(prompts.prompt, range(len(prompts))):
                states = prompt["hidden_states"]
                yield Sample(
                    row=first_row,
                    prompt_id=prompt["prompt_id"],
                    input_ids=prompt["input_ids"],
                    loss_mask=prompt["loss_mask"],
                    states={layer: states[layer] for layer in selection.layers},
                    last=_last(states, job),
                )
                first_row += 1
    finally:
        file.close()


def _last(states: "Mapping[Layer, torch.Tensor]", job: ExportJob) -> "torch.Tensor | None":
    selection = job.selection
    if selection.source is None:
        return None
    last_TD = states[selection.source]
    if not selection.derived:
        return last_TD
    return _final_norm(selection.model, selection.dtype, job.trust_remote_code)(last_TD).to(last_TD.dtype)


@functools.lru_cache(maxsize=1)
def _final_norm(model: str, dtype: str, trust_remote_code: bool) -> "torch.nn.Module":
    return load_final_norm(model, dtype=dtype, trust_remote_code=trust_remote_code)
