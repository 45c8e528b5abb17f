"""Each trainer's files hold what that trainer reads, read here as it reads them and not by the code that wrote them.

Shapes: T tokens of a prompt, L layers, D hidden size.
"""

import inspect
import json
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from safetensors import safe_open
from safetensors.torch import load, load_file

import hsray
from hsray.exporter import ExportError
from hsray.manifest import ManifestError, Skipped, load_manifest
from hsray.store import Store
from hsray.targets import TARGETS, finish_speculators_v1
from pipelines.export import main, make_parser
from tests.datasets import make_dataset
from tests.s3 import options_for, s3_server
from tests.synthetic import make_prompts, plan_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [9, 3, 30, 7, 12, 28, 12, 7, 20, 5, 17]
AUX = [1, 2, 4]
HIDDEN_SIZE = 128


@pytest.fixture(scope="module")
def stored(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, the last block's and the final state, in bfloat16; 3 shards."""
    out = tmp_path_factory.mktemp("export") / "x"
    return make_dataset(tiny_llama, out, lengths=LENGTHS, layers=[*AUX, 5, "final"], dtype="bfloat16")


@pytest.fixture(scope="module")
def prompts(stored: Path) -> list[dict]:
    dataset = hsray.read(stored)
    return [dataset[index] for index in range(len(dataset))]


@pytest.fixture
def export(ray_session, stored, tmp_path):
    def run(target: str, **options: object) -> Path:
        hsray.export(stored, target, to=tmp_path / "to", progress=False, **options)
        return tmp_path / "to"

    return run


def files_of(folder: Path, pattern: str) -> list[str]:
    """Paths as trainers see them: walked and sorted as text."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(pattern) if "hsray-export" not in path.parts)


def joined(prompt: dict) -> torch.Tensor:
    return torch.cat([prompt["hidden_states"][layer] for layer in AUX], dim=1)


def test_safetensors_hold_every_prompt_and_layer(export, prompts):
    folder = export("safetensors")
    assert files_of(folder, "*") == [f"{row:08d}.safetensors" for row in range(len(prompts))]
    for row, prompt in enumerate(prompts):
        tensors = load_file(folder / f"{row:08d}.safetensors")
        assert set(tensors) == {"input_ids", "loss_mask", "layer_1", "layer_2", "layer_4", "layer_5", "layer_final"}
        assert torch.equal(tensors["input_ids"], prompt["input_ids"])
        assert torch.equal(tensors["loss_mask"], prompt["loss_mask"])
        for layer, hidden_TD in prompt["hidden_states"].items():
            assert torch.equal(tensors[f"layer_{layer}"], hidden_TD)
        with safe_open(folder / f"{row:08d}.safetensors", framework="pt") as file:
            assert file.metadata() == {"prompt_id": prompt["prompt_id"]}


def test_speculators_rows_and_files_go_by_one_number_and_end_pre_norm(export, prompts):
    folder = export("speculators")
    data = load_from_disk(str(folder))
    assert len(data) == len(prompts) == len(files_of(folder, "hs_*.safetensors"))
    assert list(data.with_format(None)["seq_len"]) == LENGTHS
    counts: dict[int, int] = {}
    for row, prompt in enumerate(prompts):
        # In torch format: the trainer compares tensors.
        assert torch.equal(data[row]["input_ids"], prompt["input_ids"]) and data[row]["input_ids"].dtype == torch.int64
        assert torch.equal(data[row]["loss_mask"], prompt["loss_mask"].long())
        tensors = load_file(folder / f"hidden_states/hs_{row}.safetensors")
        assert torch.equal(tensors["token_ids"], prompt["input_ids"])
        assert tensors["hidden_states"].shape == (LENGTHS[row], 4, HIDDEN_SIZE)
        for slot, layer in enumerate([*AUX, 5]):
            assert torch.equal(tensors["hidden_states"][:, slot], prompt["hidden_states"][layer])
        for token in prompt["input_ids"][prompt["loss_mask"]].tolist():
            counts[token] = counts.get(token, 0) + 1
    assert torch.load(folder / "token_freq.pt", weights_only=True) == counts


def test_speculators_v1_lists_states_and_ends_pre_norm(export, prompts):
    folder = export("speculators-v1")
    lengths = json.loads((folder / "sample_lengths.json").read_text())
    assert lengths == {str(row): num_tokens for row, num_tokens in enumerate(LENGTHS)}
    # Its reader takes any file whose name ends so.
    assert len([name for name in files_of(folder, "*") if name.endswith("pt")]) == len(prompts)
    for row, prompt in enumerate(prompts):
        content = torch.load(folder / f"data_{row}.pt", mmap=True, weights_only=True)
        assert set(content) == {"input_ids", "hidden_states", "loss_mask"}
        assert torch.equal(content["input_ids"], prompt["input_ids"])
        assert (
            torch.equal(content["loss_mask"], prompt["loss_mask"].long()) and content["loss_mask"].dtype == torch.int64
        )
        assert [hidden.dtype for hidden in content["hidden_states"]] == [torch.bfloat16] * 4
        for hidden_TD, layer in zip(content["hidden_states"], [*AUX, 5], strict=True):
            assert torch.equal(hidden_TD, prompt["hidden_states"][layer])


def test_specforge_eagle3_walks_the_prompts_in_order_and_ends_post_norm(export, prompts):
    folder = export("specforge")
    names = files_of(folder, "*.ckpt")
    assert names[0] == "rows_00000000-00002000/data_00000000.ckpt"
    for name, prompt in zip(names, prompts, strict=True):
        content = torch.load(folder / name, mmap=True, weights_only=True)
        num_tokens = len(prompt["input_ids"])
        assert content["hidden_state"].shape == (1, num_tokens, HIDDEN_SIZE)
        assert torch.equal(content["hidden_state"][0], prompt["hidden_states"]["final"])
        assert torch.equal(content["aux_hidden_state"], joined(prompt)[None])
        assert torch.equal(content["input_ids"], prompt["input_ids"])
        assert torch.equal(content["loss_mask"], prompt["loss_mask"].long())


def test_specforge_dflash_takes_any_number_of_layers(export, prompts):
    folder = export("specforge-dflash", layers=[1, 2, 4, 5])
    for name, prompt in zip(files_of(folder, "*.ckpt"), prompts, strict=True):
        content = torch.load(folder / name, mmap=True, weights_only=True)
        wanted = torch.cat([joined(prompt), prompt["hidden_states"][5]], dim=1)
        assert torch.equal(content["hidden_states"], wanted)
        assert torch.equal(content["target_last_hidden_states"], prompt["hidden_states"]["final"])


def test_sae_lens_rows_are_of_one_length_and_none_is_made_up(export, stored, prompts):
    folder = export("sae-lens", context_size=16)
    data = load_from_disk(str(folder)).with_format("torch")
    assert data.features["blocks.2.hook_resid_post"].shape == (16, HIDDEN_SIZE)
    assert set(data.column_names) == {
        *(f"blocks.{layer}.hook_resid_post" for layer in (*AUX, 5)),
        "ln_final.hook_normalized",
        "token_ids",
    }
    plan, first, rows = load_manifest(Store(stored)).plan, 0, []
    for num_prompts in plan.shard_prompts:
        shard, first = prompts[first : first + num_prompts], first + num_prompts
        ids_S = torch.cat([prompt["input_ids"] for prompt in shard])
        hidden_SD = torch.cat([prompt["hidden_states"][2] for prompt in shard]).float()
        rows += [(ids_S[at : at + 16], hidden_SD[at : at + 16]) for at in range(0, len(ids_S) - 15, 16)]
    assert len(data) == len(rows) > 4
    for row, (ids_C, hidden_CD) in zip(data, rows, strict=True):
        assert torch.equal(row["token_ids"], ids_C)
        assert torch.equal(row["blocks.2.hook_resid_post"], hidden_CD)


def test_what_fills_no_row_of_sae_lens_is_counted(ray_session, stored, tmp_path):
    report = hsray.export(stored, "sae-lens", to=tmp_path / "to", context_size=16, progress=False)
    kept = 16 * len(load_from_disk(str(tmp_path / "to")))
    assert report.dropped_tokens == sum(LENGTHS) - kept > 0
    assert f"{report.dropped_tokens} tokens at shards' ends fill no row" in str(report)


def test_deepspec_index_points_at_every_array(export, stored, prompts):
    folder = export("deepspec")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["version"], manifest["num_samples"], manifest["index_record_size"]) == (2, len(prompts), 56)
    assert (manifest["target_layer_ids"], manifest["hidden_size"]) == (AUX, HIDDEN_SIZE)
    index = (folder / "samples.idx").read_bytes()
    assert len(index) == 56 * len(prompts)
    names = {shard["shard_id"]: shard["file_name"] for shard in manifest["shards"]}
    assert names[2] == "shard-00002.bin" and len(names) == manifest["num_shards"]
    for row, prompt in enumerate(prompts):
        sample_id, shard, seq_len, *offsets = struct.unpack_from("<QIIQQQQQ", index, 56 * row)
        assert (sample_id, seq_len) == (row, LENGTHS[row])
        shapes = [(np.int32, 1), (np.uint8, 1), (np.uint8, 1), (np.uint16, 3 * HIDDEN_SIZE), (np.uint16, HIDDEN_SIZE)]
        ids, attention, mask, hidden, last = (
            np.memmap(folder / names[shard], dtype, "r", offset, (seq_len, width))
            for offset, (dtype, width) in zip(offsets, shapes, strict=True)
        )
        assert ids[:, 0].tolist() == prompt["input_ids"].tolist()
        assert attention.all()
        assert mask[:, 0].tolist() == prompt["loss_mask"].int().tolist()
        assert np.array_equal(hidden, joined(prompt).view(torch.uint16).numpy())
        assert np.array_equal(last, prompt["hidden_states"]["final"].view(torch.uint16).numpy())


def test_webdataset_tars_pair_a_json_with_safetensors(export, prompts):
    folder = export("webdataset")
    seen = 0
    for name in files_of(folder, "*.tar"):
        with tarfile.open(folder / name) as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
        for key in sorted({name.split(".")[0] for name in members}):
            prompt, tensors = prompts[seen], load(members[f"{key}.safetensors"])
            assert int(key) == seen
            assert json.loads(members[f"{key}.json"]) == {"prompt_id": prompt["prompt_id"], "num_tokens": LENGTHS[seen]}
            assert torch.equal(tensors["layer_final"], prompt["hidden_states"]["final"])
            seen += 1
    assert seen == len(prompts)


def test_modelopt_says_that_its_last_state_is_post_norm(export, prompts):
    folder = export("modelopt")
    for name, prompt in zip(files_of(folder, "*.pt"), prompts, strict=True):
        content = torch.load(folder / name, weights_only=True)
        assert (content["conversation_id"], content["hidden_states_prenorm"]) == (prompt["prompt_id"], False)
        assert torch.equal(content["hidden_states"], prompt["hidden_states"]["final"])
        assert torch.equal(content["aux_hidden_states"], joined(prompt))
        assert torch.equal(content["loss_mask"], prompt["loss_mask"].long())


@pytest.mark.parametrize("target", ["speculators-v1", "specforge", "specforge-dflash", "modelopt"])
def test_a_file_holds_its_own_prompt_and_not_what_was_read_with_it(export, prompts, target):
    """A prompt's states are views of its row group, and `torch.save` writes the whole memory of a view."""
    folder = export(target)
    files = {
        int(path.stem.removeprefix("data_")): path for pattern in ("*.pt", "*.ckpt") for path in folder.rglob(pattern)
    }
    assert sorted(files) == list(range(len(prompts)))
    for row, prompt in enumerate(prompts):
        state_bytes = 4 * prompt["hidden_states"]["final"].nbytes
        assert state_bytes < files[row].stat().st_size < state_bytes + 16 * LENGTHS[row] + 4096


def test_a_final_state_that_was_not_built_is_made_by_the_models_own_norm(ray_session, tiny_gemma, tmp_path):
    """Gemma's, which multiplies by 1 + w: a norm that guessed would be far off."""
    asked = {"lengths": LENGTHS, "dtype": "bfloat16", "shard_tokens": sum(LENGTHS)}  # one shard: one process loads it
    whole = make_dataset(tiny_gemma, tmp_path / "whole", layers=[0, 1, 2, 3, "final"], **asked)
    out = make_dataset(tiny_gemma, tmp_path / "x", layers=[0, 1, 2, 3], **asked)
    hsray.export(out, "modelopt", to=tmp_path / "to", progress=False)
    for row, name in enumerate(files_of(tmp_path / "to", "*.pt")):
        content = torch.load(tmp_path / "to" / name, weights_only=True)
        assert torch.equal(content["hidden_states"], hsray.read(whole)[row]["hidden_states"]["final"])


@pytest.mark.parametrize("target", ["speculators", "webdataset"])
def test_an_export_from_and_to_s3_is_the_local_one_byte_for_byte(export, stored, target):
    with s3_server() as endpoint:
        options = options_for(endpoint)
        out, to = Store("s3://bucket/x", options), Store(f"s3://bucket/{target}", options)
        for path in stored.rglob("*.*"):
            out.publish(str(path.relative_to(stored)), path.read_bytes())
        report = hsray.export(out.url, target, to=to.url, storage_options=options, progress=False)
        folder = export(target)
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        assert len(names) > report.files >= report.new_shards == 3
        assert all(to.read(name) == (folder / name).read_bytes() for name in names)
        assert hsray.export(out.url, target, to=to.url, storage_options=options, progress=False).new_shards == 0


class TestResume:
    def test_what_is_written_is_not_written_again(self, ray_session, stored, tmp_path):
        to = tmp_path / "to"
        first = hsray.export(stored, "safetensors", to=to, progress=False)
        inodes = {path: path.stat().st_ino for path in to.glob("*.safetensors")}
        assert (first.new_shards, first.files) == (3, len(LENGTHS))
        (to / "hsray-export/shards/000001.json").unlink()
        (to / ".hsray-tmp-0123").write_text("what a killed writer left")
        lost = to / "00000005.safetensors"
        content = lost.read_bytes()
        lost.unlink()
        again = hsray.export(stored, "safetensors", to=to, progress=False)
        assert (again.new_shards, again.files) == (1, load_manifest(Store(stored)).plan.shard_prompts[1])
        assert lost.read_bytes() == content
        assert not list(to.glob(".hsray-tmp-*"))
        kept = {path for path, inode in inodes.items() if path.stat().st_ino == inode}
        assert len(kept) == len(LENGTHS) - again.files
        assert hsray.export(stored, "safetensors", to=to, progress=False).new_shards == 0

    def test_another_export_in_the_folder_is_an_error_that_shows_both(self, ray_session, stored, tmp_path):
        hsray.export(stored, "safetensors", to=tmp_path / "to", layers=[1], progress=False)
        with pytest.raises(ExportError, match=r"layers: there is \[1\], this export has \[2\]"):
            hsray.export(stored, "safetensors", to=tmp_path / "to", layers=[2], progress=False)

    def test_a_folder_of_something_else_is_left_alone(self, stored, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(ExportError, match=r"is not empty \(found notes.txt\)"):
            hsray.export(stored, "safetensors", to=tmp_path, progress=False)


class TestRefusals:
    @pytest.mark.parametrize(
        ("layers", "target", "words"),
        [
            ([1, 2, 4, "final"], "speculators", r"lacks \[5\]: build with layers=\[1, 2, 4, 5\]"),
            ([1, 2, 4], "specforge", r"lacks \['final'\]: build with layers=\[1, 2, 4, 'final'\]"),
            ([1, 2, "final"], "specforge", r"specforge takes 3 layers; \[1, 2\] are 2: choose them with layers="),
            (["final"], "modelopt", r"modelopt takes one or more layers; \[\] are 0"),
            (
                [1, 2, 4, "final"],
                "deepspec",
                "takes bfloat16 alone; the dataset is float32: build with dtype='bfloat16'",
            ),
            ([1], "eagle", "target='eagle' is not known; wanted one of safetensors, speculators"),
        ],
    )
    def test_what_the_dataset_lacks_is_named_with_the_way_out(self, tiny_llama, tmp_path, layers, target, words):
        out = make_dataset(tiny_llama, tmp_path / "x", lengths=[3], layers=layers)
        with pytest.raises(ExportError, match=words):
            hsray.export(out, target, to=tmp_path / "to", progress=False)
        assert not (tmp_path / "to").exists()

    def test_a_preset_of_layers_the_dataset_lacks_names_them_all(self, stored, tmp_path):
        with pytest.raises(ExportError, match=r"lacks \[3\]: build with layers=\[1, 3, 4, 'final'\]"):
            hsray.export(stored, "specforge", to=tmp_path / "to", layers=[1, 3, 4], progress=False)

    def test_an_unfinished_dataset_is_not_exported(self, tmp_path):
        with pytest.raises(ManifestError, match="holds no complete dataset; build it to its end"):
            hsray.export(tmp_path / "none", "safetensors", to=tmp_path / "to")


def test_its_flags_are_the_keywords():
    actions = {action.dest: action for action in make_parser()._actions if action.dest != "help"}
    keywords = inspect.signature(hsray.export).parameters
    assert set(actions) == set(keywords)
    for name, keyword in keywords.items():
        assert actions[name].required == (keyword.default is inspect.Parameter.empty)
        assert actions[name].required or actions[name].default == keyword.default
    assert list(actions["target"].choices) == list(TARGETS)


def test_the_command_line_exports_or_says_why_not(ray_session, stored, tmp_path, capsys):
    flags = ["--out", str(stored), "--to", str(tmp_path / "to"), "--no-progress"]
    assert main([*flags, "--target", "safetensors", "--layers", "final"]) == 0
    assert "11 prompts, 150 tokens as one safetensors file a prompt; layers final" in capsys.readouterr().out
    assert main([*flags, "--target", "modelopt"]) == 1
    assert "holds another export" in capsys.readouterr().err


def test_lengths_are_of_the_prompts_that_are_there_and_not_of_those_left_out(tmp_path):
    store, manifest = plan_prompts(make_prompts([5, 1, 30, 2]), tmp_path / "dataset")
    skipped = Skipped(shard=0, place=1, prompt_id="p1", num_tokens=1, reason="the engine died of it")
    manifest = manifest.without([skipped], store)
    finish_speculators_v1(Store(tmp_path / "to"), store, manifest, None)
    assert json.loads((tmp_path / "to/sample_lengths.json").read_text()) == {"0": 5, "1": 30, "2": 2}
