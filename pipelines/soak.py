"""Checks at length, on a random-weight model of a family's real class.

    build    many prompts of mixed lengths in one build, each row against the same prompt alone
    chunks   one long prompt whole and in chunks of 8192
    memory   on a GPU that other work has filled: the engine must end in an error, and no row be handed out
    engines  one build by one engine, by two side by side, and by one whose model two GPUs share

python pipelines/soak.py --family llama --prompts 1000 --long 32768 --engine-args '{"attention_backend": "triton"}'
"""

import argparse
import filecmp
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parity import TEXT_TOKENS, families, make_model, relative_error, states
from rich.console import Console

import hsray
from hsray.engine import CaptureError, EngineOptions, open_engine
from hsray.flags import parse_object
from hsray.layers import resolve_layers
from hsray.model import describe_model

LAYERS = ["embed", 0, 2, 5, "final"]

#: Enough that two engines have some of them each.
NUM_SHARDS = 32


def options_for(model: str, max_tokens: int, arguments: argparse.Namespace) -> EngineOptions:
    """An engine for one prompt at a time, of up to `max_tokens`."""
    description = describe_model(model, dtype=arguments.dtype)
    return EngineOptions(
        model=description,
        layers=resolve_layers(LAYERS, num_layers=description.num_layers),
        max_tokens=max_tokens,
        buffer_tokens=max_tokens,
        num_buffers=1,
        engine_args=arguments.engine_args,
    )


def mixed_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """--prompts random prompts of 1 to --longest tokens."""
    chosen = random.Random(0)
    return [
        {
            "id": f"p{number}",
            "input_ids": [chosen.randrange(3, TEXT_TOKENS) for _ in range(chosen.randint(1, arguments.longest))],
        }
        for number in range(arguments.prompts)
    ]


def check_build(model: str, arguments: argparse.Namespace, console: Console) -> bool:
    """Builds prompts of 1 to --longest tokens, then runs each alone; true if all rows are there once and agree."""
    import torch

    rows = mixed_rows(arguments)
    with tempfile.TemporaryDirectory(prefix="hsray-soak-", dir=arguments.folder) as out:
        report = hsray.build(
            rows, model=model, layers=LAYERS, out=out, dtype=arguments.dtype, engine_args=arguments.engine_args
        )
        console.print(str(report))
        dataset = hsray.read(out)
        ids = [dataset[index]["prompt_id"] for index in range(len(dataset))]
        worst, exact = 0.0, 0
        with open_engine("sglang", options_for(model, arguments.longest, arguments)) as engine:
            for index, row in enumerate(rows):
                alone = engine.capture_alone(row["input_ids"])
                stored = dataset[index]["hidden_states"]
                different = [layer for layer in alone if not torch.equal(stored[layer], alone[layer])]
                exact += not different
                worst = max([worst, *(relative_error(stored[layer], alone[layer]) for layer in different)])
    right = ids == [row["id"] for row in rows] and worst <= arguments.allowed
    console.print(
        f"{len(ids)} rows for {len(rows)} prompts, {len(set(ids))} different; {exact} bit-equal to the prompt alone, "
        f"worst relative error {worst:.1e} ({arguments.allowed:.0e} allowed): {'right' if right else 'WRONG'}"
    )
    return right


def check_chunks(model: str, arguments: argparse.Namespace, console: Console) -> bool:
    """Runs one long prompt whole and in chunks of 8192; true if every layer has all rows and both agree."""
    chosen = random.Random(1)
    input_ids = [chosen.randrange(3, TEXT_TOKENS) for _ in range(arguments.long)]
    runs: list[Mapping[Any, Any]] = [
        states("sglang", model, arguments.dtype, [input_ids], arguments.engine_args | changes)[0]
        for changes in ({}, {"chunked_prefill_size": 8192})
    ]
    errors = {layer: relative_error(runs[1][layer], runs[0][layer]) for layer in runs[0]}
    right = max(errors.values()) <= arguments.allowed
    console.print(
        f"{arguments.long} tokens whole and in chunks of 8192: worst relative error {max(errors.values()):.1e} "
        f"({arguments.allowed:.0e} allowed): {'right' if right else 'WRONG'}"
    )
    return right


def check_memory(model: str, arguments: argparse.Namespace, console: Console) -> bool:
    """Takes the GPU's free memory away from an open engine; true if its next long prompt is an error."""
    import torch

    with open_engine("sglang", options_for(model, arguments.long, arguments)) as engine:
        free_bytes, _ = torch.cuda.mem_get_info()
        hog = torch.empty(free_bytes - (256 << 20), dtype=torch.uint8, device="cuda")
        try:
            engine.capture_alone([3] * arguments.long)
        except CaptureError as error:
            console.print(
                f"{arguments.long} tokens with {free_bytes - len(hog) >> 20} MiB free: {type(error).__name__}: {error}"
            )
            return "out of memory" in str(error)
    console.print("a prompt that cannot have had the memory it needs was captured: WRONG")
    return False


def check_engines(model: str, arguments: argparse.Namespace, console: Console) -> bool:
    """Builds the same prompts three ways; true if two engines write one's bytes, and shared GPUs the same but for rounding."""
    rows, options = mixed_rows(arguments), options_for(model, arguments.longest, arguments)
    state_bytes = sum(len(row["input_ids"]) for row in rows) * options.bytes_per_token
    ways: dict[str, dict[str, Any]] = {
        "one engine": {"engines": 1},
        "two engines": {"engines": 2},
        "one engine of two GPUs": {"engines": 1, "tensor_parallel": 2},
    }
    with tempfile.TemporaryDirectory(prefix="hsray-soak-", dir=arguments.folder) as folder:
        for way, more in ways.items():
            report = hsray.build(
                rows,
                model=model,
                layers=LAYERS,
                out=Path(folder, way),
                dtype=arguments.dtype,
                engine_args=arguments.engine_args,
                shard_bytes=max(1, state_bytes // NUM_SHARDS),
                **more,
            )
            console.print(f"{way}: {report}")
        one, two, _ = (Path(folder, way, "shards") for way in ways)
        names = {file.name for file in one.iterdir()}
        same, _, _ = filecmp.cmpfiles(one, two, names, shallow=False)
        exact = 1 < len(same) == len(names) == len(list(two.iterdir()))
        alone, shared = (hsray.read(Path(folder, way)) for way in ("one engine", "one engine of two GPUs"))
        errors = [
            relative_error(shared[index]["hidden_states"][layer], hidden_TD)
            for index in range(len(rows))
            for layer, hidden_TD in alone[index]["hidden_states"].items()
        ]
    right = exact and max(errors) <= arguments.allowed
    console.print(
        f"{len(rows)} prompts: {len(same)} of {len(names)} shards of two engines are one engine's, byte for byte; shared GPUs: "
        f"worst relative error of a prompt's layer {max(errors):.1e}, mean {sum(errors) / len(errors):.1e} "
        f"({arguments.allowed:.0e} allowed): {'right' if right else 'WRONG'}"
    )
    return right


def main() -> int:
    """Runs the checks asked for; exit status 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--family", default="llama", choices=list(families()), help="of the random-weight model (default: llama)")
    add("--checks", nargs="+", default=["build", "chunks"], choices=list(CHECKS), help="(default: build chunks)")
    add("--prompts", type=int, default=1000, help="of the build (default: 1000)")
    add("--longest", type=int, default=4096, help="prompts have 1 to this many tokens (default: 4096)")
    add("--long", type=int, default=32768, help="tokens of the long prompt (default: 32768)")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--allowed", type=float, default=1e-2, help="relative error: about one bfloat16 run's own (default: 0.01)")
    add("--engine-args", type=parse_object, default={}, metavar="JSON", help="for SGLang")
    add("--folder", type=Path, help="where the dataset goes, in a temporary folder (default: the system's)")
    arguments = parser.parse_args()
    console = Console(width=160)
    with tempfile.TemporaryDirectory(prefix="hsray-soak-model-") as folder:
        make_model(arguments.family, Path(folder))
        results = [CHECKS[name](folder, arguments, console) for name in arguments.checks]
    return 0 if all(results) else 1


CHECKS = {"build": check_build, "chunks": check_chunks, "memory": check_memory, "engines": check_engines}


if __name__ == "__main__":
    sys.exit(main())
