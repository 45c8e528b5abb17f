"""Other trainers' files: what each wants of a dataset, and how one shard of it becomes theirs.

Each target's layout is what its own loader reads. "Post-norm" is the state after the final norm (``"final"``), "pre-norm" the
last block's output (layer N-1).

Shapes: T tokens of a prompt, L layers, D hidden size.
"""

import io
import json
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from hsray.layers import Layer, column_name
from hsray.manifest import Manifest, planned_prompts
from hsray.store import Store

if TYPE_CHECKING:
    import torch

#: SpecForge's reader sorts paths as text, so names are padded and folders filled in order.
SPECFORGE_FOLDER_ROWS = 2000

#: DeepSpec's index: sample, shard, T, then the offsets of ids, attention mask, loss mask, layers, last state.
DEEPSPEC_RECORD = struct.Struct("<QIIQQQQQ")
#: Each array begins at a multiple of this, as a mapped view of it must.
DEEPSPEC_ALIGNMENT = 64

SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64", "bool": "BOOL"}

#: The extension type by which Hugging Face's `datasets` stores an Array2D.
ARRAY2D_NAME = "datasets.features.features.Array2DExtensionType"
#: Of one column in a record batch, where a row is not longer.
SAE_BATCH_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which states of a dataset an export takes."""

    layers: tuple[Layer, ...]
    """Those that the drafter reads, or, for a target that knows no last state, all; in depth order."""
    last: Literal["pre-norm", "post-norm"] | None
    derived: bool
    """Whether the post-norm state is made from layer N-1 by the model's own norm."""
    num_layers: int
    hidden_size: int
    dtype: str
    model: str
    context_size: int
    """Tokens of a row, of a target whose rows are of one length."""

    @property
    def source(self) -> Layer | None:
        """The dataset's layer that the last state is read from."""
        if self.last is None:
            return None
        return self.num_layers - 1 if self.last == "pre-norm" or self.derived else "final"

    @property
    def read(self) -> tuple[Layer, ...]:
        """The dataset's layers that are read."""
        return tuple(dict.fromkeys([*self.layers, *([] if self.source is None else [self.source])]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt, as exports take it."""

    row: int
    """Its place in the dataset."""
    prompt_id: str
    input_ids: "torch.Tensor"
    """int64 [T]."""
    loss_mask: "torch.Tensor"
    """bool [T]."""
    states: "Mapping[Layer, torch.Tensor]"
    """layer -> [T, D], of `Selection.layers`, in their order."""
    last: "torch.Tensor | None"
    """[T, D], as `Selection.last` says."""

    @property
    def joined(self) -> "torch.Tensor":
        """The layers side by side, [T, L * D]."""
        import torch

        return torch.cat(list(self.states.values()), dim=1)


@dataclass(slots=True, kw_only=True)
class Written:
    """What came of one shard."""

    files: int = 0
    nbytes: int = 0

    @contextmanager
    def file(self, store: Store, name: str) -> Iterator[IO[bytes]]:
        """A file to write into; published and counted when the block ends."""
        with store.staged(name) as sink:
            yield sink
            self.nbytes += sink.tell()
        self.files += 1


Write = Callable[[Store, int, Iterable[Sample], Selection], Written]
Finish = Callable[[Store, Store, Manifest, Selection], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One trainer's format."""

    what: str
    write: Write
    """Writes the files of one shard (by number)."""
    last: Literal["pre-norm", "post-norm"] | None = None
    """The last state that it needs beside the layers; None for a target that takes whatever layers there are."""
    num_layers: int | None = None
    """How many layers it reads, where that is fixed."""
    dtype: str | None = None
    """The only dtype it takes, if it takes one."""
    fixed_rows: bool = False
    """Whether its rows are of one length, so that the tokens of a shard's end fill none."""
    finish: Finish | None = None
    """Writes what is about all shards; from the plan, without a state: (to, dataset, manifest, selection)."""


def _sample_tensors(sample: Sample) -> "dict[str, torch.Tensor]":
    states = {column_name(layer): hidden_TD for layer, hidden_TD in sample.states.items()}
    return {"input_ids": sample.input_ids, "loss_mask": sample.loss_mask, **states}


def write_safetensors(to: Store, _shard: int, samples: Iterable[Sample], _selection: Selection) -> Written:
    """``00000012.safetensors``: ``input_ids`` int64, ``loss_mask`` bool, ``layer_<i>`` [T, D]; metadata ``prompt_id``."""
    written = Written()
    for sample in samples:
        with written.file(to, f"{sample.row:08d}.safetensors") as sink:
            _save_safetensors(_sample_tensors(sample), sink, metadata={"prompt_id": sample.prompt_id})
    return written


def write_webdataset(to: Store, shard: int, samples: Iterable[Sample], _selection: Selection) -> Written:
    """``000012.tar`` a shard, with ``00000012.safetensors`` and ``00000012.json`` (its id and T) for each prompt."""
    written = Written()
    with written.file(to, f"{shard:06d}.tar") as sink, tarfile.open(fileobj=sink, mode="w|") as tar:
        for sample in samples:
            about = {"prompt_id": sample.prompt_id, "num_tokens": len(sample.input_ids)}
            states = io.BytesIO()
            _save_safetensors(_sample_tensors(sample), states, metadata={"prompt_id": sample.prompt_id})
            for suffix, content in (("json", io.BytesIO(json.dumps(about).encode())), ("safetensors", states)):
                member = tarfile.TarInfo(f"{sample.row:08d}.{suffix}")
                member.size = content.seek(0, io.SEEK_END)
                content.seek(0)
                tar.addfile(member, content)
    return written


def write_speculators(to: Store, shard: int, samples: Iterable[Sample], _selection: Selection) -> Written:
    """``hidden_states/hs_12.safetensors``: ``hidden_states`` [T, L + 1, D], last slot pre-norm, ``token_ids``; and the
    shard's rows of the Arrow dataset, ``input_ids``, ``loss_mask``, ``seq_len``."""
    import torch

    written, rows = Written(), []
    for sample in samples:
        hidden_TLD = torch.stack([*sample.states.values(), sample.last], dim=1)
        with written.file(to, f"hidden_states/hs_{sample.row}.safetensors") as sink:
            _save_safetensors({"hidden_states": hidden_TLD, "token_ids": sample.input_ids}, sink)
        ids, mask = sample.input_ids.tolist(), sample.loss_mask.long().tolist()
        rows.append({"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)})
    table = pa.Table.from_pylist(rows, schema=SPECULATORS_SCHEMA)
    with written.file(to, _arrow_name(shard)) as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return written


SPECULATORS_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int64())), ("seq_len", pa.int64())]
)


def finish_speculators(to: Store, dataset: Store, manifest: Manifest, _selection: Selection) -> None:
    """The Arrow dataset's head, and ``token_freq.pt``: how often each token is trained on."""
    import torch

    ids_feature = {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"}
    features = {
        "input_ids": ids_feature,
        "loss_mask": ids_feature,
        "seq_len": {"dtype": "int64", "_type": "Value"},
    }
    _publish_arrow_head(to, manifest, features, format_type="torch")
    counts = np.zeros(0, np.int64)
    for prompts in planned_prompts(manifest, dataset):
        mask_S = prompts.loss_masks.flatten().to_numpy(zero_copy_only=False)
        found = np.bincount(prompts.input_ids.flatten().to_numpy()[mask_S], minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    with to.staged("token_freq.pt") as sink:
        torch.save({int(token): int(counts[token]) for token in np.flatnonzero(counts)}, sink)


def _save_each(
    to: Store, samples: Iterable[Sample], name: Callable[[int], str], content: Callable[[Sample], dict[str, Any]]
) -> Written:
    """Writes a `torch.save` file for each prompt, named by its row."""
    import torch

    written = Written()
    for sample in samples:
        with written.file(to, name(sample.row)) as sink:
            torch.save({key: _alone(value) for key, value in content(sample).items()}, sink)
    return written


def _alone(value: Any) -> Any:
    """A tensor, or each of a list, in memory of its own: `torch.save` writes all that a view is a part of."""
    import torch

    if isinstance(value, list):
        return [_alone(item) for item in value]
    if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.nbytes:
        return value.clone()
    return value


def write_speculators_v1(to: Store, _shard: int, samples: Iterable[Sample], _selection: Selection) -> Written:
    """``data_12.pt``: ``input_ids`` int64, ``hidden_states``, a list of [T, D], the last pre-norm, ``loss_mask`` int64."""

    def content(sample: Sample) -> dict[str, Any]:
        states = [*sample.states.values(), sample.last]
        return {"input_ids": sample.input_ids, "hidden_states": states, "loss_mask": sample.loss_mask.long()}

    return _save_each(to, samples, lambda row: f"data_{row}.pt", content)


def finish_speculators_v1(to: Store, dataset: Store, manifest: Manifest, _selection: Selection) -> None:
    """``sample_lengths.json``: T by row."""
    lengths = (num_tokens for prompts in planned_prompts(manifest, dataset) for num_tokens in prompts.lengths.tolist())
    to.publish("sample_lengths.json", json.dumps({str(row): length for row, length in enumerate(lengths)}).encode())


def write_specforge(to: Store, _shard: int, samples: Iterable[Sample], _selection: Selection) -> Written:
    """``rows_00000000-00002000/data_00000012.ckpt`` for EAGLE-3: ``aux_hidden_state`` [1, T, 3 D], ``hidden_state``
    [1, T, D] post-norm, ``input_ids`` and ``loss_mask`` int64 [T]."""

    def content(sample: Sample) -> dict[str, Any]:
        return {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask.long(),
            "hidden_state": sample.last[None],
            "aux_hidden_state": sample.joined[None],
        }

    return _save_each(to, samples, _specforge_name, content)


def write_specforge_dflash(to: Store, _shard: int, samples: Iterable[Sample], _selection: Selection) -> Written:
    """The same for DFlash and DSpark: ``hidden_states`` [T, L * D], and ``target_last_hidden_states`` [T, D] post-norm."""

    def content(sample: Sample) -> dict[str, Any]:
        return {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask.long(),
            "hidden_states": sample.joined,
            "target_last_hidden_states": sample.last,
        }

    return _save_each(to, samples, _specforge_name, content)


def _specforge_name(row: int) -> str:
    first = row - row % SPECFORGE_FOLDER_ROWS
    return f"rows_{first:08d}-{first + SPECFORGE_FOLDER_ROWS:08d}/data_{row:08d}.ckpt"


def write_modelopt(to: Store, _shard: int, samples: Iterable[Sample], _selection: Selection) -> Written:
    """``00000012.pt``: ``hidden_states`` [T, D] post-norm, ``aux_hidden_states`` [T, L * D], ``input_ids`` and ``loss_mask``
    int64, ``conversation_id``."""

    def content(sample: Sample) -> dict[str, Any]:
        return {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask.long(),
            "hidden_states": sample.last,
            "aux_hidden_states": sample.joined,
            "hidden_states_prenorm": False,
            "conversation_id": sample.prompt_id,
        }

    return _save_each(to, samples, lambda row: f"{row:08d}.pt", content)


def write_sae_lens(to: Store, shard: int, samples: Iterable[Sample], selection: Selection) -> Written:
    """The shard's rows of an Arrow dataset: a column of [context_size, D] for each layer, named as TransformerLens names
    it, and ``token_ids``. Rows are filled across the prompts' ends; what is left of a shard is no row and left out."""
    import torch

    # One memory is filled again and again: a core fills fresh pages several times as slowly.
    row_bytes = 4 * selection.context_size * selection.hidden_size
    batch_tokens = selection.context_size * max(1, SAE_BATCH_BYTES // row_bytes)
    # NumPy and Arrow have no bfloat16; float32 holds every one.
    dtype = getattr(torch, _numpy_dtype(selection))
    states = {layer: torch.empty(batch_tokens, selection.hidden_size, dtype=dtype) for layer in selection.layers}
    ids_B, filled = torch.empty(batch_tokens, dtype=torch.int32), 0
    schema, written = _sae_schema(selection), Written()
    with written.file(to, _arrow_name(shard)) as sink, pa.ipc.new_stream(sink, schema) as writer:
        for sample in samples:
            at, num_tokens = 0, len(sample.input_ids)
            while at < num_tokens:
                count = min(num_tokens - at, batch_tokens - filled)
                here, there = slice(filled, filled + count), slice(at, at + count)
                ids_B[here] = sample.input_ids[there]
                for layer, hidden_BD in states.items():
                    hidden_BD[here] = sample.states[layer][there]
                at, filled = at + count, filled + count
                if filled == batch_tokens:
                    writer.write_batch(_sae_batch(states, ids_B, filled, selection, schema))
                    filled = 0
        if filled >= selection.context_size:
            writer.write_batch(_sae_batch(states, ids_B, filled, selection, schema))
    return written


def _sae_batch(
    states: "Mapping[Layer, torch.Tensor]",
    ids_B: "torch.Tensor",
    filled: int,
    selection: Selection,
    schema: pa.Schema,
) -> pa.RecordBatch:
    """The rows that so many first tokens fill: views of the memory."""
    num_rows = filled // selection.context_size
    kept = num_rows * selection.context_size
    rows_ends, tokens_ends = _ends(num_rows, selection.context_size), _ends(kept, selection.hidden_size)
    arrays = []
    for hidden_BD in states.values():
        tokens = pa.ListArray.from_arrays(tokens_ends, pa.array(hidden_BD[:kept].view(-1).numpy()))
        arrays.append(pa.ListArray.from_arrays(rows_ends, tokens))
    ids = pa.FixedSizeListArray.from_arrays(pa.array(ids_B[:kept].numpy()), selection.context_size)
    return pa.record_batch([*arrays, ids], schema=schema)


def _sae_schema(selection: Selection) -> pa.Schema:
    dtype = _numpy_dtype(selection)
    number = {"float32": pa.float32(), "float16": pa.float16()}[dtype]
    extension = {
        "ARROW:extension:name": ARRAY2D_NAME,
        "ARROW:extension:metadata": json.dumps([[selection.context_size, selection.hidden_size], dtype]),
    }
    storage = pa.list_(pa.list_(number))
    fields = [pa.field(hook_name(layer), storage, metadata=extension) for layer in selection.layers]
    return pa.schema([*fields, pa.field("token_ids", pa.list_(pa.int32(), selection.context_size))])


def _numpy_dtype(selection: Selection) -> str:
    return {"bfloat16": "float32"}.get(selection.dtype, selection.dtype)


def finish_sae_lens(to: Store, _dataset: Store, manifest: Manifest, selection: Selection) -> None:
    """The Arrow dataset's head."""
    array = {
        "shape": [selection.context_size, selection.hidden_size],
        "dtype": _numpy_dtype(selection),
        "_type": "Array2D",
    }
    features: dict[str, Any] = {hook_name(layer): array for layer in selection.layers}
    ids = {"feature": {"dtype": "int32", "_type": "Value"}, "length": selection.context_size, "_type": "List"}
    _publish_arrow_head(to, manifest, {**features, "token_ids": ids}, format_type=None)


def hook_name(layer: Layer) -> str:
    """What TransformerLens calls a layer's state."""
    ends = {"embed": "blocks.0.hook_resid_pre", "final": "ln_final.hook_normalized"}
    return ends.get(layer, f"blocks.{layer}.hook_resid_post")


def write_deepspec(to: Store, shard: int, samples: Iterable[Sample], selection: Selection) -> Written:
    """``shard-00012.bin``: for each prompt ids int32, attention and loss mask uint8, layers bfloat16 [T, L * D], last state
    bfloat16 [T, D] post-norm; where each begins stands in ``samples.idx``."""
    import torch

    written = Written()
    with written.file(to, _deepspec_name(shard)) as sink:
        for sample in samples:
            num_tokens = len(sample.input_ids)
            arrays = [
                sample.input_ids.int(),
                torch.ones(num_tokens, dtype=torch.uint8),
                sample.loss_mask.to(torch.uint8),
                sample.joined,
                sample.last.contiguous(),
            ]
            for array in arrays:
                sink.write(bytes(-sink.tell() % DEEPSPEC_ALIGNMENT))
                sink.write(_bytes_of(array))
    return written


def finish_deepspec(to: Store, dataset: Store, manifest: Manifest, selection: Selection) -> None:
    """``samples.idx`` and ``manifest.json``."""
    index, sample_id = bytearray(), 0
    for prompts in planned_prompts(manifest, dataset):
        end = 0
        for num_tokens in prompts.lengths.tolist():
            offsets = []
            state_bytes = 2 * num_tokens * selection.hidden_size
            for nbytes in (4 * num_tokens, num_tokens, num_tokens, len(selection.layers) * state_bytes, state_bytes):
                offsets.append(end + -end % DEEPSPEC_ALIGNMENT)
                end = offsets[-1] + nbytes
            index += DEEPSPEC_RECORD.pack(sample_id, prompts.shard, num_tokens, *offsets)
            sample_id += 1
    to.publish("samples.idx", bytes(index))
    content = {
        "version": 2,
        "num_samples": sample_id,
        "num_shards": manifest.plan.num_shards,
        "target_layer_ids": [-1 if layer == "embed" else layer for layer in selection.layers],
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": DEEPSPEC_RECORD.size,
        "hidden_size": selection.hidden_size,
        "target_model_name_or_path": selection.model,
        "shards": [
            {"shard_id": shard, "file_name": _deepspec_name(shard)} for shard in range(manifest.plan.num_shards)
        ],
    }
    to.publish("manifest.json", json.dumps(content, indent=1).encode())


def _deepspec_name(shard: int) -> str:
    return f"shard-{shard:05d}.bin"


#: By the name that `hsray.export` takes.
TARGETS: Mapping[str, Target] = {
    "safetensors": Target(what="one safetensors file a prompt", write=write_safetensors),
    "speculators": Target(
        what="speculators from v0.5", write=write_speculators, finish=finish_speculators, last="pre-norm"
    ),
    "speculators-v1": Target(
        what="speculators to v0.4", write=write_speculators_v1, finish=finish_speculators_v1, last="pre-norm"
    ),
    "specforge": Target(what="SpecForge, EAGLE-3", write=write_specforge, last="post-norm", num_layers=3),
    "specforge-dflash": Target(what="SpecForge, DFlash and DSpark", write=write_specforge_dflash, last="post-norm"),
    "sae-lens": Target(
        what="SAELens' cached activations", write=write_sae_lens, finish=finish_sae_lens, fixed_rows=True
    ),
    "deepspec": Target(
        what="DeepSpec's target cache", write=write_deepspec, finish=finish_deepspec, last="post-norm", dtype="bfloat16"
    ),
    "webdataset": Target(what="one tar of safetensors a shard", write=write_webdataset),
    "modelopt": Target(what="Model-Optimizer's offline EAGLE and DFlash", write=write_modelopt, last="post-norm"),
}


def _save_safetensors(
    tensors: "Mapping[str, torch.Tensor]", sink: IO[bytes], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors as a safetensors file (https://huggingface.co/docs/safetensors): the library's own `save` copies each
    twice on its way to one piece of bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        dtype = SAFETENSORS_DTYPES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sink.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        sink.write(_bytes_of(tensor))


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    """A contiguous tensor's memory."""
    import torch

    return tensor.view(-1).view(torch.uint8).numpy().data


def _ends(count: int, step: int) -> pa.Array:
    return pa.array(np.arange(0, (count + 1) * step, step, dtype=np.int32))


def _arrow_name(shard: int) -> str:
    return f"data-{shard:05d}.arrow"


def _publish_arrow_head(to: Store, manifest: Manifest, features: Mapping[str, Any], format_type: str | None) -> None:
    """What Hugging Face's ``load_from_disk`` reads first."""
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    to.publish("dataset_info.json", json.dumps(info, indent=2).encode())
    state = {
        "_data_files": [{"filename": _arrow_name(shard)} for shard in range(manifest.plan.num_shards)],
        "_fingerprint": manifest.identity.digest[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": format_type,
        "_output_all_columns": False,
        "_split": None,
    }
    to.publish("state.json", json.dumps(state, indent=2).encode())
