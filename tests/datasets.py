"""Datasets for tests, made in this process as a build makes them, and rewritten to damage them.

Shapes: T tokens of a prompt, S tokens of a shard, D hidden size.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hsray.engine import EngineOptions, open_engine
from hsray.layers import Layer, resolve_layers
from hsray.manifest import Identity, complete, load_manifest, planned_prompts
from hsray.model import DTYPE_BYTES, describe_model, load_tokenizer, tokenizer_digest
from hsray.plan import shard_name
from hsray.prompts import PROMPTS_SCHEMA
from hsray.shard import (
    FileFormat,
    ShardPrompts,
    digested,
    layer_columns,
    stamped,
    to_tensor,
    write_table,
)
from hsray.store import Store
from pipelines.random_dataset import publish_shard, save_plan

#: A prompt's states, layer -> [T, D], to be changed in place; its position in the shard's list.
States = dict[Layer, torch.Tensor]


def make_dataset(
    model: Path,
    out: Path,
    *,
    lengths: Sequence[int],
    layers: Sequence[Layer | str],
    dtype: str = "float32",
    stored_dtype: str | None = None,
    file_format: FileFormat = "parquet",
    compression: str = "none",
    shard_tokens: int = 60,
    seed: int = 0,
) -> Path:
    """A complete dataset of random prompts of these lengths."""
    description = describe_model(str(model), dtype=dtype)
    store, resolved = Store(out), resolve_layers(list(layers), num_layers=description.num_layers)
    value_bytes = description.hidden_size * DTYPE_BYTES[dtype]
    identity = Identity(
        model=str(model),
        config_digest=description.config_digest,
        weights_digest=description.weights_digest,
        tokenizer_digest=tokenizer_digest(load_tokenizer(str(model))),
        num_layers=description.num_layers,
        hidden_size=description.hidden_size,
        layers=resolved,
        dtype=dtype,
        stored_dtype=stored_dtype or dtype,
        engine="transformers",
        engine_args={},
        tensor_parallel=1,
        requests_in_flight=1,
        prefill_tokens=16_384,
        shard_bytes=shard_tokens * value_bytes * len(resolved),
        file_format=file_format,
        compression=compression,
        max_tokens=1024,
        too_long="error",
        prompt_options={},
        prompts_digest=None,
        plan_digest=None,
    )
    manifest = save_plan(store, identity, _prompts(lengths, description.vocab_size, seed))
    engine_options = EngineOptions(
        model=description,
        layers=resolved,
        max_tokens=max(lengths),
        buffer_tokens=max(manifest.plan.shard_tokens),
        num_buffers=1,
    )
    digests = {}
    with open_engine("transformers", engine_options) as engine:
        for prompts in planned_prompts(manifest, store):
            buffer = engine.buffer(int(prompts.ends[-1]))
            engine.capture_all(prompts.tokens, into=buffer)
            digests[prompts.shard] = publish_shard(store, manifest, prompts, buffer.states)
            buffer.release()
    complete(manifest, store, digests)
    return out


def _prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> pa.Table:
    chosen = random.Random(seed)
    rows = [
        {
            "row_digest": number.to_bytes(16, "big"),
            "prompt_id": f"p{number}",
            "input_ids": [chosen.randrange(vocab_size) for _ in range(num_tokens)],
            "loss_mask": [chosen.random() < 0.5 for _ in range(num_tokens)],
        }
        for number, num_tokens in enumerate(lengths)
    ]
    return pa.Table.from_pylist(rows, schema=PROMPTS_SCHEMA)


def rewrite(out: Path, change: Callable[[list[States], ShardPrompts], ShardPrompts | None]) -> None:
    """Lets `change` alter each shard's prompts' states, or return other prompts, and makes the dataset whole again."""
    store = Store(out)
    manifest, digests = load_manifest(store), {}
    for prompts in planned_prompts(manifest, store):
        table = pq.read_table(out / shard_name(prompts.shard)).combine_chunks()
        states = [
            {
                layer: to_tensor(
                    table[name].chunk(0).slice(row, 1), table.schema.field(name), len(prompts.tokens[row])
                ).clone()
                for layer, name in layer_columns(table.schema).items()
            }
            for row in range(len(table))
        ]
        changed = change(states, prompts) or prompts
        columns = {"input_ids": changed.input_ids, "loss_mask": changed.loss_masks}
        for layer, name in layer_columns(table.schema).items():
            columns[name] = pa.array([_bytes_of(prompt[layer]) for prompt in states], pa.large_binary())
        for name, values in columns.items():
            table = table.set_column(table.column_names.index(name), table.schema.field(name), values)
        schema = stamped(table.schema, shard=prompts.shard, identity_digest=manifest.identity.digest)
        table = digested(table.cast(schema))
        digests[prompts.shard] = table.schema.metadata[b"hsray.digest"].decode()
        with store.staged(shard_name(prompts.shard)) as sink:
            write_table(table, sink, compression=manifest.identity.compression)
    complete(manifest.reopened(), store, digests)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
