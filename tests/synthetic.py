"""Datasets of random states, made without an engine.

Shapes: T tokens of a prompt, D hidden size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from hsray.layers import Layer
from hsray.manifest import Identity, Manifest, complete
from hsray.plan import read_plan_file
from hsray.prompts import PROMPTS_SCHEMA
from hsray.shard import FileFormat, ShardPrompts
from hsray.store import Store
from pipelines import random_dataset

LAYERS: tuple[Layer, ...] = ("embed", 3, "final")
LENGTHS = [5, 1, 30, 2, 2, 80, 7, 7, 1, 40]
HIDDEN_SIZE = 16


def make_prompts(
    lengths: Sequence[int], dtype: torch.dtype = torch.bfloat16, hidden_size: int = HIDDEN_SIZE
) -> list[dict]:
    """Prompts with random states, as they should be read."""
    chosen = torch.Generator().manual_seed(0)
    return [
        {
            "prompt_id": f"p{number}",
            "input_ids": torch.randint(0, 1000, (num_tokens,), generator=chosen),
            "loss_mask": torch.rand(num_tokens, generator=chosen) < 0.5,
            "hidden_states": {
                layer: torch.randn(num_tokens, hidden_size, generator=chosen).to(dtype) for layer in LAYERS
            },
        }
        for number, num_tokens in enumerate(lengths)
    ]


def plan_prompts(
    prompts: Sequence[dict],
    out: Path | str,
    shard_tokens: int = 40,
    compression: str = "none",
    file_format: FileFormat = "parquet",
    stored_dtype: str | None = None,
    **storage_options: object,
) -> tuple[Store, Manifest]:
    """A dataset with its plan and no shard yet."""
    store = Store(out, storage_options)
    hidden_TD = prompts[0]["hidden_states"]["final"]
    bytes_per_token = len(LAYERS) * hidden_TD.shape[1] * hidden_TD.element_size()
    identity = Identity(
        model="m",
        config_digest="c",
        weights_digest="w",
        tokenizer_digest="t",
        num_layers=6,
        hidden_size=hidden_TD.shape[1],
        layers=LAYERS,
        dtype=str(hidden_TD.dtype).removeprefix("torch."),
        stored_dtype=stored_dtype or str(hidden_TD.dtype).removeprefix("torch."),
        engine="transformers",
        engine_args={},
        tensor_parallel=1,
        requests_in_flight=1,
        prefill_tokens=16_384,
        file_format=file_format,
        compression=compression,
        shard_bytes=shard_tokens * bytes_per_token,
        max_tokens=1024,
        too_long="error",
        prompt_options={},
        prompts_digest=None,
        plan_digest=None,
    )
    rows = [
        {
            "row_digest": number.to_bytes(16, "big"),
            "prompt_id": prompt["prompt_id"],
            "input_ids": prompt["input_ids"].tolist(),
            "loss_mask": prompt["loss_mask"].tolist(),
        }
        for number, prompt in enumerate(prompts)
    ]
    return store, random_dataset.save_plan(store, identity, pa.Table.from_pylist(rows, schema=PROMPTS_SCHEMA))


def publish_shard(store: Store, manifest: Manifest, prompts: Sequence[dict], shard: int) -> str:
    """Publishes a shard of a planned dataset; returns its digest."""
    listed = ShardPrompts.from_plan(read_plan_file(store, manifest.plan.files[0]), shard)
    ids = listed.prompt_ids.to_pylist()
    wanted = [prompt["hidden_states"] for prompt in prompts if prompt["prompt_id"] in ids]
    states = {layer: torch.cat([states[layer] for states in wanted]) for layer in LAYERS}
    return random_dataset.publish_shard(store, manifest, listed, states)


def write_dataset(prompts: Sequence[dict], out: Path | str, shard_tokens: int = 40, **changes: object) -> None:
    """A finished dataset."""
    store, manifest = plan_prompts(prompts, out, shard_tokens, **changes)
    digests = {shard: publish_shard(store, manifest, prompts, shard) for shard in range(manifest.plan.num_shards)}
    complete(manifest, store, digests)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """That a prompt is read as it was made."""
    assert found["prompt_id"] == wanted["prompt_id"]
    for name in ("input_ids", "loss_mask"):
        assert found[name].dtype == wanted[name].dtype
        assert torch.equal(found[name], wanted[name])
    assert list(found["hidden_states"]) == list(wanted["hidden_states"])
    for layer, wanted_TD in wanted["hidden_states"].items():
        assert found["hidden_states"][layer].dtype == wanted_TD.dtype
        assert torch.equal(found["hidden_states"][layer], wanted_TD)
