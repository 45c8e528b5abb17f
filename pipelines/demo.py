"""Builds hidden states of a small real model for the prompts beside this file, and shows what came out."""

import argparse
import sys
from pathlib import Path

from demo_model import prepare_demo_model
from rich.console import Console
from rich.table import Table

import hsray
from hsray.manifest import ManifestError

PROMPTS = Path(__file__).with_name("demo_prompts.jsonl")
LAYERS = [9, 19, 29, "embed", "final"]
SHARD_BYTES = 16 << 20
#: The checkpoint is bfloat16, which a CPU without instructions for it computes several times as slowly.
DTYPE = "float32"


def main() -> int:
    """Prepares the model, builds the dataset, prints a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="holds model/ and dataset/ (default: .demo)")
    folder = parser.parse_args().folder
    console = Console()
    console.print("[bold]1. The model[/]: SmolLM2-135M-Instruct, 30 blocks, hidden size 576")
    model = prepare_demo_model(folder / "model")
    console.print(f"[bold]2. The states[/] of layers {', '.join(map(str, LAYERS))} for the prompts in {PROMPTS.name}")
    out = folder / "dataset"
    try:
        report = hsray.build(
            str(PROMPTS), model=str(model), layers=LAYERS, out=str(out), dtype=DTYPE, shard_bytes=SHARD_BYTES
        )
    except ManifestError as error:  # of another version's demo, or not the demo's
        print(f"error: {error}; for the demo, remove {out} or give another --folder", file=sys.stderr)
        return 1
    console.print("[bold]3. What came out[/]")
    console.print(report_table(report))
    console.print(prompt_table(hsray.read(out)[0]))
    console.print(f"Read it: [bold]hsray.read({str(out)!r})[0]['hidden_states'][19][/]. Say it again, and it resumes.")
    return 0


def report_table(report: "hsray.pipeline.BuildReport") -> Table:
    """The build in a few rows."""
    table = Table(show_header=False)
    table.add_row("layers asked for", ", ".join(map(str, report.layers)))
    table.add_row("prompts", f"{report.prompts:,}")
    table.add_row("tokens", f"{report.tokens:,}")
    table.add_row("states", f"{report.nbytes / 1e6:,.1f} MB in {report.shards} shards")
    speed = f"{report.tokens_per_s:,.0f} tokens/s, after {report.engine_start_s:.0f} s to start the engine"
    table.add_row("this run", speed if report.new_shards else "everything was there already: no engine was opened")
    return table


def prompt_table(prompt: dict) -> Table:
    """One prompt: its states' shape, type and mean norm, layer by layer."""
    num_tokens, num_trained = len(prompt["input_ids"]), int(prompt["loss_mask"].sum())
    title = f"prompt {prompt['prompt_id']!r}: {num_tokens} tokens, {num_trained} of them the assistant's"
    table = Table("layer", "shape", "dtype", "mean norm of a token's state", title=title)
    for layer, hidden_TD in prompt["hidden_states"].items():
        norm = hidden_TD.float().norm(dim=1).mean().item()
        table.add_row(
            str(layer), str(list(hidden_TD.shape)), str(hidden_TD.dtype).removeprefix("torch."), f"{norm:.2f}"
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
