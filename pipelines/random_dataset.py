"""Makes a dataset of random states without an engine, to measure on what reads one."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import torch

from hsray.layers import Layer
from hsray.manifest import Identity, Manifest, complete, planned_prompts
from hsray.plan import PlanOptions, shard_name, write_plan
from hsray.prompts import PROMPTS_SCHEMA
from hsray.shard import shard_schema, shard_table, stamped, write_table
from hsray.store import Store


def make_random_dataset(
    out: Path, *, lengths: Sequence[int], layers: Sequence[Layer], num_layers: int, hidden_size: int, shard_bytes: int
) -> None:
    """A complete dataset in bfloat16 of prompts of these lengths."""
    identity = Identity(
        model="random",
        config_digest="-",
        weights_digest="-",
        tokenizer_digest="-",
        num_layers=num_layers,
        hidden_size=hidden_size,
        layers=tuple(layers),
        dtype="bfloat16",
        stored_dtype="bfloat16",
        engine="transformers",
        engine_args={},
        tensor_parallel=1,
        requests_in_flight=1,
        prefill_tokens=1,
        shard_bytes=shard_bytes,
        file_format="parquet",
        compression="none",
        max_tokens=max(lengths),
        too_long="error",
        prompt_options={},
        prompts_digest=None,
        plan_digest=None,
    )
    rows = [
        {
            "row_digest": number.to_bytes(16, "big"),
            "prompt_id": f"p{number}",
            "input_ids": [1] * num_tokens,
            "loss_mask": [True] * num_tokens,
        }
        for number, num_tokens in enumerate(lengths)
    ]
    value_bytes = 2 * hidden_size
    options = PlanOptions(
        bytes_per_token=len(layers) * value_bytes,
        value_bytes_per_token=value_bytes,
        shard_bytes=shard_bytes,
        duplicates="keep",
    )
    store = Store(out)
    plan = write_plan([pa.Table.from_pylist(rows, schema=PROMPTS_SCHEMA)], store, options)
    manifest = Manifest(state="planning", identity=identity).with_plan(plan)
    manifest.save(store)
    schema = shard_schema(layers, hidden_size=hidden_size, dtype="bfloat16")
    digests = {}
    for prompts in planned_prompts(manifest, store):
        shape = (int(prompts.ends[-1]), hidden_size)
        states = {layer: torch.empty(shape, dtype=torch.bfloat16).normal_() for layer in layers}
        stamp = stamped(schema, shard=prompts.shard, identity_digest=manifest.identity.digest)
        shard = shard_table(prompts, states, stamp)
        with store.staged(shard_name(prompts.shard)) as sink:
            write_table(shard, sink)
        digests[prompts.shard] = shard.schema.metadata[b"hsray.digest"].decode()
    complete(manifest, store, digests)
