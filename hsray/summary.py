"""What is in a dataset, at a glance: counts, prompts' lengths, norms of the states, and prompts with what is trained on.

Counts are the manifest's and the listing's; norms are of a sample of prompts, spread evenly over the dataset.
"""

import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hsray.estimator import shown_prompt
from hsray.float8 import Rounding
from hsray.layers import Layer
from hsray.manifest import Identity, load_manifest, published_shards
from hsray.model import load_tokenizer
from hsray.reader import read
from hsray.store import Store

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

#: Of the norms of a layer's tokens, in percent.
QUANTILES = (0, 5, 50, 95, 100)

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>%s</title>
<style>{stylesheet} body {{ color: {foreground}; background: {background}; font-family: sans-serif; margin: 2em }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere }} svg {{ max-width: 48em; display: block }}</style></head>
<body>%s<pre><code>{code}</code></pre></body></html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A dataset at a glance."""

    url: str
    complete: bool
    identity: Identity
    shards: int
    """Published, of"""
    planned_shards: int
    prompts: int
    """Of the published shards, as are the next two."""
    tokens: int
    nbytes: int
    dropped: int
    length_histogram: dict[int, int]
    """Planned prompts of up to so many tokens, but more than half as many."""
    norms: dict[Layer, tuple[float, ...]]
    """Of the sampled tokens' states: `QUANTILES`."""
    rounding: dict[str, Rounding]
    """Of the sampled shards' layers in float8_e4m3."""
    has_tokenizer: bool
    """Whether the model, and so its tokenizer, was found from here; samples are token ids otherwise."""
    samples: "tuple[Text, ...]"
    """Prompts; what is trained on is green."""


def summarize(
    out: str | os.PathLike[str],
    *,
    sample: int = 16,
    show: int = 3,
    storage_options: Mapping[str, Any] | None = None,
) -> Summary:
    """Reads a dataset's manifest and a sample of its prompts.

    Args:
        out: The dataset's folder; one still being built is shown as far as it goes.
        sample: Prompts whose norms are taken.
        show: Prompts of those to show.
        storage_options: For the filesystem of `out`.

    Raises:
        ManifestError: `out` holds no dataset with a plan.
    """
    if sample < 1 or show < 0:
        raise ValueError(f"sample={sample}, show={show}; give a sample from 1 up, and 0 or more to show")
    store, dataset = Store(out, storage_options), read(out, dtype="float32", storage_options=storage_options)
    manifest = load_manifest(store)
    plan, published = manifest.plan, published_shards(store, manifest.identity.file_format)
    chosen = sorted({int(index) for index in np.linspace(0, len(dataset) - 1, sample)} if len(dataset) else ())
    norms: dict[Layer, list[np.ndarray]] = {layer: [] for layer in dataset.layers}
    for prompt in map(dataset.__getitem__, chosen):
        for layer, hidden_TD in prompt["hidden_states"].items():
            norms[layer].append(hidden_TD.norm(dim=1).numpy())
    tokenizer = _tokenizer(manifest.identity.model) if show else None
    return Summary(
        url=store.url,
        complete=dataset.complete,
        identity=manifest.identity,
        shards=len(dataset.shards),
        planned_shards=plan.num_shards,
        prompts=len(dataset),
        tokens=sum(plan.shard_tokens[shard] for shard in dataset.shards),
        nbytes=sum(published[shard] for shard in dataset.shards),
        dropped=plan.num_dropped,
        length_histogram={2**power: count for power, count in enumerate(plan.length_histogram) if count},
        norms={
            layer: tuple(np.percentile(np.concatenate(of_layer), QUANTILES))
            for layer, of_layer in norms.items()
            if chosen
        },
        rounding=_rounding([dataset.open_shard(shard).schema.metadata for shard in dataset.shards[:sample]]),
        has_tokenizer=tokenizer is not None,
        samples=tuple(_shown(index, dataset[index], tokenizer) for index in chosen[:show]),
    )


def _tokenizer(model: str) -> Any:
    """The model's own; None where the model is no longer there: its ids are shown instead."""
    try:
        return load_tokenizer(model)
    except OSError:
        return None


def _shown(index: int, prompt: Mapping[str, Any], tokenizer: Any) -> "Text":
    about = {"source": f"prompt {index}", "prompt_id": prompt["prompt_id"], "dropped": None}
    return shown_prompt(
        {**about, "input_ids": prompt["input_ids"].tolist(), "loss_mask": prompt["loss_mask"].tolist()}, tokenizer
    )


def _rounding(metadatas: Sequence[Mapping[bytes, bytes]]) -> dict[str, Rounding]:
    found: dict[str, Rounding] = {}
    for metadata in metadatas:
        for layer, values in json.loads(metadata.get(b"hsray.rounding", b"{}")).items():
            found.setdefault(layer, Rounding()).add(Rounding(**values))
    return found


def show(summary: Summary, console: "Console") -> None:
    """Prints a summary."""
    identity = summary.identity
    for name, value in {
        "dataset": f"{summary.url}, {'complete' if summary.complete else 'being built'}",
        "model": f"{identity.model}: {identity.num_layers} blocks of width {identity.hidden_size}",
        "layers": ", ".join(map(str, identity.layers)),
        "states": f"computed in {identity.dtype} by {identity.engine}, stored in {identity.stored_dtype}",
        "files": f"{summary.shards:,} of {summary.planned_shards:,} shards, {summary.nbytes / 1e6:,.1f} MB, "
        f"{identity.file_format}, compression {identity.compression}",
        "prompts": f"{summary.prompts:,}, {summary.tokens:,} tokens; {summary.dropped:,} dropped",
    }.items():
        console.print(f"[bold]{name:8}[/bold] ", end="")
        console.print(value, markup=False, highlight=False, soft_wrap=True)
    console.print(_lengths(summary))
    if summary.norms:
        console.print(_norms(summary))
    if summary.samples and not summary.has_tokenizer:
        console.print(f"no tokenizer of {identity.model!r} is found from here, so prompts are token ids:", markup=False)
    for text in summary.samples:
        console.print(text, soft_wrap=True)


def _lengths(summary: Summary) -> "Table":
    from rich.bar import Bar
    from rich.table import Table

    table = Table("tokens, up to", "prompts", "", title="prompts by length", title_justify="left")
    most = max(summary.length_histogram.values(), default=1)
    for tokens, prompts in summary.length_histogram.items():
        table.add_row(f"{tokens:,}", f"{prompts:,}", Bar(most, 0, prompts, width=40))
    return table


def _norms(summary: Summary) -> "Table":
    from rich.table import Table

    names = ["least", *(f"{part} %" for part in QUANTILES[1:-1]), "largest"]
    off = ["rounding, mean", "worst"] if summary.rounding else []
    table = Table("layer", *names, *off, title="norm of a token's state, in a sample", title_justify="left")
    for layer, values in summary.norms.items():
        rounding = summary.rounding.get(str(layer))
        errors = [f"{rounding.mean:.2%}", f"{rounding.worst:.2%}"] if rounding else []
        table.add_row(str(layer), *(f"{value:,.4g}" for value in values), *errors)
    return table


def page(summary: Summary) -> str:
    """A summary as one HTML page that needs nothing else."""
    from rich.console import Console

    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, record=True, width=120, force_terminal=True)
        show(summary, console)
    plots = [
        _plot(
            "prompts by length, tokens up to", {f"{n:,}": (0, count) for n, count in summary.length_histogram.items()}
        )
    ]
    if summary.norms:
        # Of a few tokens, mostly each prompt's first, norms are far larger: an axis of powers shows both.
        spans = {
            str(layer): (np.log10(max(v[0], 1e-9)), np.log10(max(v[-1], 1e-9))) for layer, v in summary.norms.items()
        }
        floor = min(low for low, _ in spans.values()) - 0.1
        powers = {layer: (low - floor, high - floor) for layer, (low, high) in spans.items()}
        words = {str(layer): f"{v[0]:,.4g} to {v[-1]:,.4g}" for layer, v in summary.norms.items()}
        plots.append(_plot("norms by layer, least to largest, logarithmic", powers, words))
    body = "".join(plots).replace("{", "{{").replace("}", "}}")
    title = html.escape(summary.url).replace("{", "{{").replace("}", "}}")
    return console.export_html(code_format=PAGE % (title, body))


def _plot(title: str, spans: Mapping[str, tuple[float, float]], words: Mapping[str, str] | None = None) -> str:
    """Bars, one under the other, each from its low to its high, as SVG; `words` to stand beside them, or the highs."""
    most, step = max((high for _, high in spans.values()), default=1) or 1, 22
    rows = [f'<text x="0" y="16" font-weight="bold">{html.escape(title)}</text>']
    for number, (name, (low, high)) in enumerate(spans.items(), start=1):
        start, width, y = 90 + 400 * low / most, max(1.0, 400 * (high - low) / most), number * step
        said = words[name] if words else f"{high:,}"
        rows.append(
            f'<text x="80" y="{y + 16}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect x="{start:.1f}" y="{y + 4}" width="{width:.1f}" height="14" fill="#3572a5"/>'
            f'<text x="{start + width + 6:.1f}" y="{y + 16}">{html.escape(said)}</text>'
        )
    return (
        f'<svg viewBox="0 0 640 {step * (len(spans) + 2)}" font-family="sans-serif" font-size="12">'
        + "".join(rows)
        + "</svg>"
    )
