"""A right dataset is said to be right; a wrong one is said to be wrong, where, and how.

Shapes: T tokens of a prompt, D hidden size.
"""

import inspect
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

import hsray
from hsray.layers import resolve_layers
from hsray.manifest import ManifestError, load_manifest
from hsray.norm import NormError, load_final_norm
from hsray.shard import ShardPrompts
from hsray.store import Store
from pipelines.verify import main, make_parser
from tests.datasets import States, make_dataset, rewrite
from tests.reference import hugging_face_states, load_model, module_outputs

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [9, 3, 30, 7, 12, 28, 12, 7, 20, 5, 17]
LAYERS = ["embed", 1, 2, 4, 5, "final"]


@pytest.fixture(scope="module")
def right(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tiny_llama, tmp_path_factory.mktemp("right") / "x", lengths=LENGTHS, layers=LAYERS)


@pytest.fixture(scope="module")
def right_bfloat16(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("right") / "x"
    return make_dataset(tiny_llama, out, lengths=LENGTHS, layers=LAYERS, dtype="bfloat16", compression="zstd:1")


@pytest.fixture
def copy(right: Path, tmp_path: Path) -> Path:
    return shutil.copytree(right, tmp_path / "copy")


@pytest.mark.parametrize(
    ("dtype", "compression"), [("float32", "none"), ("bfloat16", "zstd:1"), ("float16", "none"), ("bfloat16", "none")]
)
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
def test_right_datasets_are_right_whatever_the_reference_computes_in(request, tmp_path, family, dtype, compression):
    model = request.getfixturevalue(family)
    layers = resolve_layers("all", num_layers=4) if family == "tiny_gemma" else LAYERS
    out = make_dataset(model, tmp_path / "x", lengths=LENGTHS, layers=layers, dtype=dtype, compression=compression)
    for computed_in in ("float32", dtype):
        report = hsray.verify(out, dtype=computed_in)
        assert report.faults == [] and report.unchecked == []
        assert (report.num_prompts, report.num_tokens) == (len(LENGTHS), sum(LENGTHS))
        assert str(report).endswith("\nright")
        assert [layer.layer for layer in report.layers] == list(layers)
    # Computed again in the same dtype, the states are the same to the last bit.
    assert {layer.worst_error for layer in report.layers} == {0.0}
    assert all(layer.min_cosine == pytest.approx(1) for layer in report.layers)


#: Datasets as right as those, of other shapes.
OTHER_SHAPES = {
    "a prompt a shard": {"shard_tokens": 1},
    "all prompts in one shard": {"shard_tokens": 1000, "compression": "zstd:9"},
    "prompts of a token or two": {"lengths": [1, 2, 1, 1]},
    "a long prompt": {"lengths": [3, 600, 5]},
    "prompts of one length": {"lengths": [12] * 8},
    "embed alone": {"layers": ["embed"]},
    "a block alone": {"layers": [3]},
    "the last block alone": {"layers": [-1]},
    "final alone": {"layers": ["final"], "dtype": "float16"},
    "every layer": {"layers": ["embed", *range(6), "final"]},
}


@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_right_datasets_are_right_whatever_their_shape(tiny_llama, tmp_path, shape):
    asked = {"lengths": LENGTHS, "layers": LAYERS, "dtype": "bfloat16"} | OTHER_SHAPES[shape]
    assert hsray.verify(make_dataset(tiny_llama, tmp_path / "x", **asked)).faults == []


def test_a_right_dataset_of_many_row_groups_is_right(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(hsray.shard, "ROW_GROUP_BYTES", 1)
    out = make_dataset(tiny_llama, tmp_path / "x", lengths=LENGTHS, layers=LAYERS)
    assert hsray.read(out).open_shard(0).num_groups > 1
    assert hsray.verify(out).faults == []


def test_a_right_dataset_is_right_as_far_as_it_is_built(copy):
    load_manifest(Store(copy)).reopened().save(Store(copy))
    (copy / "shards/000001.parquet").unlink()
    report = hsray.verify(copy)
    assert report.faults == [] and 0 < report.num_prompts < len(LENGTHS)


def in_chunks(decoder: torch.nn.Module, prompts: ShardPrompts) -> list[States]:
    """Each prompt's states, computed eight tokens at a time."""
    states = []
    for ids_T in prompts.tokens:
        cache = DynamicCache(config=decoder.config)
        chunks = [
            module_outputs(decoder, input_ids=ids_1T, past_key_values=cache)
            for ids_1T in torch.from_numpy(ids_T.astype("int64"))[None].split(8, dim=1)
        ]
        states.append({layer: torch.cat([chunk[layer][0] for chunk in chunks]) for layer in LAYERS})
    return states


def together(decoder: torch.nn.Module, prompts: ShardPrompts) -> list[States]:
    """The states of a shard's prompts, computed in one pass, the shorter ones padded."""
    ids = [torch.from_numpy(ids_T.astype("int64")) for ids_T in prompts.tokens]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.arange(padded.shape[1]) < torch.tensor(prompts.lengths)[:, None]
    outputs = module_outputs(decoder, input_ids=padded, attention_mask=mask.long(), use_cache=False)
    return [{layer: outputs[layer][row, : len(ids_T)] for layer in LAYERS} for row, ids_T in enumerate(ids)]


@pytest.mark.parametrize("stored", ["right", "right_bfloat16"])
@pytest.mark.parametrize("compute", [in_chunks, together], ids=lambda compute: compute.__name__)
def test_prompts_computed_in_chunks_or_together_are_right(request, tiny_llama, tmp_path, compute, stored):
    decoder, changed = load_model(str(tiny_llama)).model, []

    def recompute(states: list[States], prompts: ShardPrompts) -> None:
        for prompt, recomputed in zip(states, compute(decoder, prompts), strict=True):
            for layer in LAYERS:
                changed.append(not torch.equal(prompt[layer], recomputed[layer].to(prompt[layer].dtype)))
                prompt[layer].copy_(recomputed[layer])

    copy = shutil.copytree(request.getfixturevalue(stored), tmp_path / "copy")
    rewrite(copy, recompute)
    assert any(changed)  # by other roundings
    assert hsray.verify(copy).faults == []


def shift_layers(states: list[States], _prompts: ShardPrompts) -> None:
    for prompt in states:
        prompt[1].copy_(prompt[2])


def shift_every_layer(states: list[States], prompts: ShardPrompts) -> None:
    """As if boundaries were taken for outputs: 1 -> 0, 2 -> 1, ... For want of others, of those that are there."""
    for prompt in states:
        prompt[5].copy_(prompt[4])
        prompt[2].copy_(prompt[1])


def swap_columns(states: list[States], _prompts: ShardPrompts) -> None:
    for prompt in states:
        prompt[1], prompt[4] = prompt[4], prompt[1]


def shift_tokens(states: list[States], _prompts: ShardPrompts) -> None:
    for prompt in states:
        prompt[2] = prompt[2].roll(1, dims=0)


def forget_norm(states: list[States], _prompts: ShardPrompts) -> None:
    for prompt in states:
        prompt["final"].copy_(prompt[5])


def norm_last(states: list[States], _prompts: ShardPrompts) -> None:
    for prompt in states:
        prompt[5].copy_(prompt["final"])


def stretch_final(states: list[States], _prompts: ShardPrompts) -> None:
    for prompt in states:
        prompt["final"] *= 1.2


def swap_prompts(states: list[States], prompts: ShardPrompts) -> None:
    if prompts.shard == 1:
        (here, there) = [at for at, length in enumerate(prompts.lengths) if length == 12]
        states[here], states[there] = states[there], states[here]


def zero_a_row(states: list[States], prompts: ShardPrompts) -> None:
    if prompts.shard == 0:
        states[2][4][7] = 0


def poison_a_row(states: list[States], prompts: ShardPrompts) -> None:
    if prompts.shard == 0:
        states[2][4][7] *= 3


def scale(states: list[States], _prompts: ShardPrompts) -> None:
    for prompt in states:
        prompt["embed"] *= 0.5


def reverse(states: list[States], prompts: ShardPrompts) -> None:
    for prompt in states:
        prompt[4] = prompt[4].flip(0)


def swap_bytes(states: list[States], _prompts: ShardPrompts) -> None:
    for prompt in states:
        hidden_TD = prompt["embed"]
        shape = (*hidden_TD.shape, hidden_TD.element_size())
        swapped = hidden_TD.view(torch.uint8).view(shape).flip(-1).contiguous()
        prompt["embed"] = swapped.view(hidden_TD.dtype).view(hidden_TD.shape)


def transpose(states: list[States], _prompts: ShardPrompts) -> None:
    for prompt in states:
        prompt[1] = prompt[1].T.contiguous().view(prompt[1].shape)


def add_noise(states: list[States], _prompts: ShardPrompts) -> None:
    generator = torch.Generator().manual_seed(0)
    for prompt in states:
        noise_TD = torch.randn(prompt[4].shape, generator=generator) * prompt[4].float().std(dim=1, keepdim=True)
        prompt[4] += (0.2 * noise_TD).to(prompt[4].dtype)


def other_ids(_states: list[States], prompts: ShardPrompts) -> ShardPrompts | None:
    ids = prompts.input_ids.to_pylist()
    ids[0][1] += 1
    return replace(prompts, input_ids=pa.array(ids, prompts.input_ids.type)) if prompts.shard == 0 else None


def other_mask(_states: list[States], prompts: ShardPrompts) -> ShardPrompts | None:
    masks = prompts.loss_masks.to_pylist()
    masks[0][1] = not masks[0][1]
    return replace(prompts, loss_masks=pa.array(masks, prompts.loss_masks.type)) if prompts.shard == 0 else None


DAMAGES: dict[Callable, tuple[str, list, str]] = {
    shift_layers: ("layer shift", [1], "is shifted by 1 layer: it holds the state 1 deeper"),
    shift_every_layer: ("layer shift", [2, 5], "is shifted by 1 layer: it holds the state 1 less deep"),
    swap_columns: ("layer shift", [1, 4], "it holds the state 3 deeper"),
    shift_tokens: ("token shift", [2], "is shifted by 1 token: row t holds token t-1"),
    forget_norm: ("pre-norm", ["final"], "holds the last block's output, before the final norm"),
    norm_last: ("post-norm", [5], "holds its states after the final norm"),
    swap_prompts: ("other prompt", [1, 2, 4, 5, "embed", "final"], "holds prompt 'p4'"),
    zero_a_row: ("zeros", [4], "has rows of zeros: they were never written, first at token 7"),
    poison_a_row: ("unexplained", [4], "no shift of layers or tokens"),
    scale: ("scale", ["embed"], "is 0.5 times what it must be"),
    reverse: ("order", [4], "has its rows in another order"),
    swap_bytes: ("bytes", ["embed"], "has its bytes in big-endian order"),
    transpose: ("bytes", [1], "is stored column by column"),
    add_noise: ("unexplained", [4], "other weights"),
    other_ids: ("ids", [], "not the input_ids of the plan, from token 1 on"),
    other_mask: ("loss mask", [], "not the loss_mask of the plan, from token 1 on"),
}


@pytest.mark.parametrize("stored", ["right", "right_bfloat16"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_each_damage_is_named_with_its_layers(request, tmp_path, damage, stored):
    kind, layers, words = DAMAGES[damage]
    copy = shutil.copytree(request.getfixturevalue(stored), tmp_path / "copy")
    rewrite(copy, damage)
    report = hsray.verify(copy)
    assert {fault.kind for fault in report.faults} == {kind}
    assert sorted({fault.layer for fault in report.faults} - {None}, key=str) == layers
    assert words in str(report)
    assert "WRONG: " in str(report) and not str(report).endswith("right")


def test_rewriting_without_a_change_is_right(copy):
    rewrite(copy, lambda states, prompts: None)
    assert hsray.verify(copy).right


def test_another_context_is_named(tiny_llama, tmp_path):
    """A prompt computed after the one before it, as packing without a mask between them does."""
    out = make_dataset(tiny_llama, tmp_path / "x", lengths=[20, 10, 40], layers=LAYERS, shard_tokens=100)
    together = hugging_face_states(str(tiny_llama), sum((list(hsray.read(out)[at]["input_ids"]) for at in (0, 1)), []))

    def leak(states: list[States], _prompts: ShardPrompts) -> None:
        states[1] = {layer: together[layer][20:] for layer in LAYERS}

    rewrite(out, leak)
    report = hsray.verify(out)
    assert {(fault.kind, fault.prompt_id) for fault in report.faults} == {("context", "p1")}
    assert "was computed with the prompt before it as its context (in 1 of 3 prompts, first 'p1')" in str(report)


def test_another_checkpoint_is_named_before_anything_is_recomputed(right, tiny_llama, tmp_path):
    model = load_model(str(tiny_llama))
    other = LlamaForCausalLM(model.config)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.model.layers[3].mlp.down_proj.weight.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    report = hsray.verify(right, model=str(tmp_path / "other"), engine=None)
    assert [fault.kind for fault in report.faults] == ["model"]
    assert "is not the dataset's: its weights_digest is sampled-sha256:" in str(report)
    compared = hsray.verify(right, model=str(tmp_path / "other"))
    assert {fault.layer for fault in compared.faults if fault.kind == "unexplained"} == {4, 5, "final"}
    assert re.search(
        r"unexplained: layer 4, 5, final differs from the reference.* \(by up to \d+\.\d%\)", str(compared)
    )


class TestWithoutAnEngine:
    def test_a_right_dataset_is_right(self, right):
        report = hsray.verify(right, engine=None)
        assert (report.right, report.layers, report.unchecked) == (True, (), [])
        assert "against no engine: only what needs none" in str(report)

    @pytest.mark.parametrize("damage", [forget_norm, stretch_final])
    def test_final_is_compared_with_the_norm_of_the_last_layer(self, copy, damage):
        rewrite(copy, damage)
        report = hsray.verify(copy, engine=None)
        assert {(fault.kind, fault.layer) for fault in report.faults} == {("norm", "final")}
        assert "norm: layer final is not the model's final norm of layer 5 (in 11 of 11 prompts" in str(report)

    @pytest.mark.parametrize("damage", [zero_a_row, other_ids, other_mask])
    def test_rows_ids_and_masks_are_checked(self, copy, damage):
        rewrite(copy, damage)
        report = hsray.verify(copy, engine=None)
        assert {fault.kind for fault in report.faults} == {DAMAGES[damage][0]}

    def test_a_model_that_is_gone_is_not_needed_and_said_to_be_missing(self, copy):
        rename_model(copy, "/gone")
        report = hsray.verify(copy, engine=None)
        assert report.right
        assert "not checked: vocabulary, model and final norm, since the model is not there" in str(report)
        with pytest.raises(FileNotFoundError, match="say where it lies now with model=, or engine=None"):
            hsray.verify(copy)


def rename_model(out: Path, model: str) -> None:
    store = Store(out)
    manifest = load_manifest(store)
    replace(manifest, identity=replace(manifest.identity, model=model)).save(store)
    # Each shard carries the identity's digest, so it must be renamed with it.
    rewrite(out, lambda states, prompts: None)


def test_a_damaged_or_missing_file_is_a_fault_that_names_it(copy):
    shard = copy / "shards/000001.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9] + bytes(9))
    report = hsray.verify(copy, engine=None)
    assert {fault.kind for fault in report.faults} == {"damaged file"}
    assert "shards/000001.parquet is damaged" in str(report)
    shard.unlink()
    assert "shards/000001.parquet is not there; the inventory says" in str(hsray.verify(copy))


def test_a_sample_is_chosen_by_its_seed(right):
    def chosen(seed: int) -> str:
        return str(hsray.verify(right, sample=4, seed=seed)).splitlines()[0]

    assert chosen(0) == chosen(0)
    assert len({chosen(seed) for seed in range(4)}) > 1
    assert "4 of 11 prompts" in chosen(0)


def test_what_is_no_dataset_or_no_sample_is_an_error(right, tmp_path):
    with pytest.raises(ManifestError, match="holds no dataset that can be verified yet; build it first"):
        hsray.verify(tmp_path)
    with pytest.raises(ValueError, match="sample=0; give a number of prompts from 1 up"):
        hsray.verify(right, sample=0)
    with pytest.raises(ValueError, match="tolerance=-1; give a share"):
        hsray.verify(right, tolerance=-1)


def test_a_tolerance_that_is_given_is_kept(right):
    assert hsray.verify(right, tolerance=1e-9, dtype="bfloat16").right is False


class TestNorm:
    @pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
    def test_it_is_the_models_own_in_one_file_or_several(self, request, family, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(family), dtype=torch.float32)
        model.save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
        assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
        hidden_TD = torch.randn(7, 128, generator=torch.Generator().manual_seed(0))
        for folder in (request.getfixturevalue(family), tmp_path / "sharded"):
            assert torch.equal(load_final_norm(str(folder), dtype="float32")(hidden_TD), model.model.norm(hidden_TD))

    def test_a_checkpoint_without_it_is_an_error_that_names_it(self, tiny_llama, tmp_path):
        folder = shutil.copytree(tiny_llama, tmp_path / "model")
        tensors = load_file(folder / "model.safetensors")
        norm = tensors.pop("model.norm.weight")
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(NormError, match="0 tensors that may be model.norm.weight of shape"):
            load_final_norm(str(folder), dtype="float32")
        save_file({**tensors, "language_model.norm.weight": norm}, folder / "model.safetensors")
        assert torch.equal(load_final_norm(str(folder), dtype="float32").weight, norm)


class TestCommandLine:
    def test_the_exit_status_says_right_wrong_or_cannot_tell(self, copy, tmp_path, capsys):
        assert main(["--out", str(copy), "--engine", "none"]) == 0
        assert capsys.readouterr().out.endswith("\nright\n")
        rewrite(copy, zero_a_row)
        assert main(["--out", str(copy), "--sample", "11"]) == 1
        assert "WRONG: zeros: layer 4 has rows of zeros" in capsys.readouterr().out
        assert main(["--out", str(tmp_path / "none")]) == 2
        assert "error: " in capsys.readouterr().err

    def test_its_flags_are_the_keywords(self):
        actions = {action.dest: action for action in make_parser()._actions if action.dest != "help"}
        keywords = inspect.signature(hsray.verify).parameters
        assert set(actions) == set(keywords)
        for name, keyword in keywords.items():
            assert actions[name].required == (keyword.default is inspect.Parameter.empty)
            assert actions[name].required or actions[name].default == keyword.default
