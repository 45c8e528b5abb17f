"""Trainers' own packages read what was exported for them: every prompt's ids, masks and states, bit for bit.

`make interop` installs the packages (`tests/interop.txt`) in an environment beside the project's and runs these.
"""

from pathlib import Path

import pytest
import torch

import hsray
from tests.datasets import make_dataset

pytestmark = pytest.mark.interop

LENGTHS = [9, 3, 30, 7, 12, 28, 12, 7, 20, 5, 17]
AUX = [1, 2, 4]
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def stored(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("interop") / "x"
    return make_dataset(tiny_llama, out, lengths=LENGTHS, layers=[*AUX, 5, "final"], dtype="bfloat16")


@pytest.fixture(scope="module")
def prompts(stored: Path) -> list[dict]:
    dataset = hsray.read(stored)
    return [dataset[index] for index in range(len(dataset))]


@pytest.fixture
def export(ray_session, stored, tmp_path):
    def run(target: str) -> Path:
        hsray.export(stored, target, to=tmp_path / "to", progress=False)
        return tmp_path / "to"

    return run


def joined(prompt: dict) -> torch.Tensor:
    return torch.cat([prompt["hidden_states"][layer] for layer in AUX], dim=1)


def test_speculators_reads_every_row_and_its_own_check_passes(export, prompts):
    from safetensors.torch import load_file
    from speculators.data_generation.offline import check_hidden_states
    from speculators.train.data import ArrowDataset

    folder = export("speculators")
    dataset = ArrowDataset(MAX_TOKENS, folder, on_missing="raise", model=None)
    assert len(dataset) == len(prompts)
    assert dataset.approx_lengths == LENGTHS
    for row, prompt in enumerate(prompts):
        check_hidden_states(load_file(folder / f"hidden_states/hs_{row}.safetensors"), prompt["input_ids"].tolist())
        sample = dataset[row]
        assert torch.equal(sample["input_ids"], prompt["input_ids"])
        assert torch.equal(sample["loss_mask"], prompt["loss_mask"].long())
        assert torch.equal(sample["hidden_states"], joined(prompt))
        assert torch.equal(sample["verifier_last_hidden_states"], prompt["hidden_states"][5])


def test_speculators_splits_by_row(export, prompts):
    from speculators.train.data import ArrowDataset

    dataset = ArrowDataset(
        MAX_TOKENS, export("speculators"), on_missing="raise", model=None, train_ratio=0.5, split="val"
    )
    assert [sample["input_ids"].tolist() for sample in map(dataset.__getitem__, range(len(dataset)))] == [
        prompt["input_ids"].tolist() for prompt in prompts[len(prompts) // 2 :]
    ]


def test_specforge_reads_every_eagle3_file_in_order(export, prompts):
    from specforge.algorithms.eagle3.data import normalize_offline_sample
    from specforge.runtime.data_plane.feature_store import load_feature_file
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    refs = list(OfflineManifestReader(str(export("specforge")), max_len=MAX_TOKENS, validate_files=True))
    assert [ref.num_tokens for ref in refs] == LENGTHS
    for ref, prompt in zip(refs, prompts, strict=True):
        sample = normalize_offline_sample(load_feature_file(ref.feature_store_uri.removeprefix("file://")), MAX_TOKENS)
        assert torch.equal(sample["input_ids"], prompt["input_ids"][None])
        assert torch.equal(sample["hidden_state"], joined(prompt)[None])
        assert torch.equal(sample["target"], prompt["hidden_states"]["final"][None])
        assert torch.equal(sample["loss_mask"][0, :-1], prompt["loss_mask"].long()[:-1])


def test_specforge_reads_dflash_and_dspark_files(export, prompts):
    from specforge.algorithms.common.dflash_family_data import (
        has_consecutive_supervised_tokens,
        normalize_dspark_offline_sample,
    )
    from specforge.runtime.data_plane.feature_store import load_feature_file
    from specforge.runtime.data_plane.offline_reader import list_feature_files

    files = list_feature_files(str(export("specforge-dflash")))
    trained = [
        (file, prompt)
        for file, prompt in zip(files, prompts, strict=True)
        if has_consecutive_supervised_tokens(prompt["loss_mask"])  # it refuses others
    ]
    assert len(trained) > 5
    for file, prompt in trained:
        sample = normalize_dspark_offline_sample(load_feature_file(file), MAX_TOKENS)
        assert torch.equal(sample["hidden_states"], joined(prompt)[None])
        assert torch.equal(sample["target_last_hidden_states"], prompt["hidden_states"]["final"][None])


def test_modelopt_reads_every_file(export, prompts):
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    files = sorted(export("modelopt").rglob("*.pt"))
    dataset = OfflineSupervisedDataset(files, answer_only_loss=True)
    for sample, prompt in zip(map(dataset.__getitem__, range(len(files))), prompts, strict=True):
        assert torch.equal(sample["input_ids"], prompt["input_ids"])
        assert torch.equal(sample["loss_mask"], prompt["loss_mask"].long())
        assert torch.equal(sample["base_model_hidden_states"], prompt["hidden_states"]["final"])
        assert torch.equal(sample["aux_hidden_states"], joined(prompt))
        assert sample["base_hidden_prenorm"] is False
    batch = EagleOfflineDataCollator(train_len=16)([dataset[0], dataset[1]])
    assert batch["base_model_outputs"]["base_model_hidden_states"].shape == (2, 16, 128)


def test_sae_lens_reads_every_row(ray_session, stored, tmp_path):
    from datasets import load_from_disk
    from sae_lens.training.activations_store import ActivationsStore

    hsray.export(stored, "sae-lens", to=tmp_path / "to", context_size=16, progress=False)
    rows = load_from_disk(str(tmp_path / "to")).with_format("torch")
    store = ActivationsStore(
        model=None,  # whose states are read and not made
        dataset=None,
        cached_activations_path=str(tmp_path / "to"),
        streaming=False,
        hook_name="blocks.2.hook_resid_post",
        hook_head_index=None,
        context_size=16,
        d_in=128,
        n_batches_in_buffer=2,
        total_training_tokens=1000,
        store_batch_size_prompts=1,
        train_batch_size_tokens=16,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
    )
    assert len(rows) > 4
    for row in rows:
        states_CD, ids_C = store.get_raw_llm_batch()
        assert torch.equal(states_CD, row["blocks.2.hook_resid_post"])
        assert torch.equal(ids_C, row["token_ids"])
