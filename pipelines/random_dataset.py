"""Makes a dataset of random states without an engine, to measure on what reads one.

Shapes: S tokens of a shard, D hidden size.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from hsray.layers import Layer
from hsray.manifest import Identity, Manifest, complete, planned_prompts
from hsray.model import DTYPE_BYTES
from hsray.plan import PlanOptions, write_plan
from hsray.prompts import PROMPTS_SCHEMA
from hsray.report import Receipt
from hsray.shard import FileFormat, ShardPrompts, shard_schema, shard_table, stamped, write_table
from hsray.store import Store


def make_random_dataset(out: Path, **planned: Any) -> None:
    """A complete dataset of normally distributed states, planned as `plan_random_dataset` is told."""
    store = Store(out)
    manifest = plan_random_dataset(store, **planned)
    identity = manifest.identity
    digests = {}
    for prompts in planned_prompts(manifest, store):
        shape = (int(prompts.ends[-1]), identity.hidden_size)
        states = {layer: torch.empty(shape, dtype=torch.bfloat16).normal_() for layer in identity.layers}
        digests[prompts.shard] = publish_shard(store, manifest, prompts, states)
    complete(manifest, store, digests)


def plan_random_dataset(
    store: Store,
    *,
    lengths: Sequence[int],
    layers: Sequence[Layer],
    num_layers: int,
    hidden_size: int,
    shard_bytes: int,
    file_format: FileFormat = "parquet",
) -> Manifest:
    """The plan and the manifest of a dataset in bfloat16 of prompts of these lengths."""
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
        file_format=file_format,
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
    return save_plan(store, identity, pa.Table.from_pylist(rows, schema=PROMPTS_SCHEMA))


def save_plan(store: Store, identity: Identity, prompts: pa.Table) -> Manifest:
    """Writes a dataset's plan of prompts (`hsray.prompts.PROMPTS_SCHEMA`), and its manifest."""
    value_bytes = identity.hidden_size * DTYPE_BYTES[identity.dtype]
    options = PlanOptions(
        bytes_per_token=len(identity.layers) * value_bytes,
        value_bytes_per_token=value_bytes,
        shard_bytes=identity.shard_bytes,
        duplicates="keep",
    )
    manifest = Manifest(state="planning", identity=identity).with_plan(write_plan([prompts], store, options))
    manifest.save(store)
    return manifest


def publish_shard(store: Store, manifest: Manifest, prompts: ShardPrompts, states: Mapping[Layer, torch.Tensor]) -> str:
    """Publishes a shard of given states, layer -> [S, D]; gives its digest."""
    identity = manifest.identity
    schema = shard_schema(identity.layers, hidden_size=identity.hidden_size, dtype=identity.stored_dtype)
    schema = stamped(schema, shard=prompts.shard, identity_digest=identity.digest)
    table = shard_table(prompts, states, schema)
    with store.staged(manifest.shard_name(prompts.shard)) as sink:
        write_table(table, sink, compression=identity.compression, file_format=identity.file_format)
    return table.schema.metadata[b"hsray.digest"].decode()


def receipt_of(shard: int, num_bytes: int, digest: str) -> Receipt:
    """What an actor says of a shard that it captured."""
    return Receipt(
        shard=shard,
        prompts=1,
        tokens=1,
        host="",
        pid=0,
        engine_start_s=0.0,
        load_s=0.0,
        first_request_s=0.0,
        started_at=0.0,
        published_at=0.0,
        captured=True,
        nbytes=num_bytes,
        digest=digest,
    )
