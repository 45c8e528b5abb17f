"""What was stored is what is read: each prompt once, in order, and only the layers that were asked for.

Shapes: T tokens of a prompt, S tokens of a shard, D hidden size.
"""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from torch.utils.data import DataLoader

import hsray
from hsray.layers import column_name
from hsray.manifest import Manifest, ManifestError
from hsray.row_group import RowGroup
from hsray.store import Store
from tests.synthetic import LAYERS, LENGTHS, assert_same, make_prompts, plan_prompts, publish_shard, write_dataset


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    return make_prompts(LENGTHS)


@pytest.fixture(scope="module")
def out(prompts, tmp_path_factory) -> Path:
    """A complete dataset of several shards."""
    folder = tmp_path_factory.mktemp("dataset")
    write_dataset(prompts, folder)
    assert len(list(folder.glob("shards/*"))) == 4
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("where", ["local", "memory://test_reader/"])
def test_every_prompt_is_read_as_it_was_stored(tmp_path, dtype, where):
    target = tmp_path if where == "local" else f"{where}{dtype}"
    prompts = make_prompts(LENGTHS, dtype)
    write_dataset(prompts, target)
    dataset = hsray.read(target)
    assert dataset.complete
    assert dataset.layers == LAYERS
    assert len(dataset) == len(prompts)
    for index, prompt in enumerate(prompts):
        assert_same(dataset[index], prompt)


def test_prompts_are_read_in_any_order_again_and_from_the_end(out, prompts):
    dataset = hsray.read(out)
    for index in [9, 0, 5, 5, -1, -10, 3, -4]:
        assert_same(dataset[index], prompts[index])


def test_a_dataset_says_in_a_line_what_it_is(out):
    tokens = f"{sum(LENGTHS):,}"
    assert repr(hsray.read(out)) == f"<{out}: 10 prompts, {tokens} tokens; layers {list(LAYERS)}, bfloat16>"
    assert repr(hsray.read(out, layers=["final"], dtype="float32")).endswith("; layers ['final'], float32>")


@pytest.mark.parametrize("index", [10, -11, 1000])
def test_a_prompt_that_is_not_there_is_an_index_error(out, index):
    with pytest.raises(IndexError, match=f"prompt {index} of 10"):
        hsray.read(out)[index]


@pytest.mark.parametrize("index", [slice(0, 2), "p0", None, [0, 1], 1.0])
def test_what_is_no_number_is_a_type_error_that_shows_it(out, index):
    with pytest.raises(
        TypeError, match="a prompt is asked for by its number, a whole one; found " + re.escape(repr(index))
    ):
        hsray.read(out)[index]


def test_iterating_ends_after_the_last_prompt(out, prompts):
    assert [prompt["prompt_id"] for prompt in hsray.read(out)] == [prompt["prompt_id"] for prompt in prompts]


def test_more_shards_than_are_kept_open_are_read(tmp_path):
    prompts = make_prompts([1] * 40)
    write_dataset(prompts, tmp_path, shard_tokens=2)
    dataset = hsray.read(tmp_path)
    for index in [*range(40), *range(39, -1, -7)]:
        assert_same(dataset[index], prompts[index])


@pytest.mark.parametrize("layers", [["final"], ["final", "embed"], (3,), []])
def test_the_layers_asked_for_are_read_in_the_order_asked(out, prompts, layers):
    dataset = hsray.read(out, layers=layers)
    assert dataset.layers == tuple(layers)
    for found, wanted in zip(dataset, prompts, strict=True):
        assert_same(found, wanted | {"hidden_states": {layer: wanted["hidden_states"][layer] for layer in layers}})


@pytest.mark.parametrize("layer", [4, -1, "3", "last"])
def test_a_layer_that_is_not_there_is_a_key_error_that_says_which_are(out, layer):
    message = rf"layers \[{layer!r}\] are not in .*, which has \['embed', 3, 'final'\]"
    with pytest.raises(KeyError, match=message):
        hsray.read(out, layers=["final", layer])


class WatchedFileSystem(AbstractFileSystem):
    """Local files, read through Python as remote ones are; counts the bytes, and minds who reads.

    A forked process has its parent's files, but their positions are those of all: two that read move each other's.
    """

    protocol = "watched"
    num_read = 0

    def ls(self, path: str, detail: bool = True, **options: Any) -> list:
        return LocalFileSystem().ls(path, detail=detail)

    def info(self, path: str, **options: Any) -> dict:
        return LocalFileSystem().info(path)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = LocalFileSystem()._open(path, mode)
        read, opener = file.f.read, os.getpid()

        def watched_read(*args: int) -> bytes:
            assert os.getpid() == opener, "read by another process than the one that opened it"
            data = read(*args)
            WatchedFileSystem.num_read += len(data)
            return data

        file.read = watched_read
        return file


fsspec.register_implementation("watched", WatchedFileSystem, clobber=True)


def test_only_the_row_group_and_the_columns_asked_for_are_read(tmp_path):
    layer_bytes = 4096 * 1024 * 2
    write_dataset(make_prompts([4096, 4096, 4096], hidden_size=1024), tmp_path, shard_tokens=3 * 4096)
    read = {}
    for layers in ([], ["final"], [3, "final"]):
        dataset = hsray.read(f"watched://{tmp_path}", layers=layers)
        before = WatchedFileSystem.num_read
        dataset[1]
        read[len(layers)] = WatchedFileSystem.num_read - before
    assert 0 < read[0] < 0.1 * layer_bytes
    for count in (1, 2):
        assert count * layer_bytes <= read[count] < (count + 0.1) * layer_bytes


def test_a_growing_dataset_holds_what_was_published_when_it_was_opened(tmp_path, prompts):
    store, manifest = plan_prompts(prompts, tmp_path)
    ends = [sum(manifest.plan.shard_prompts[: shard + 1]) for shard in range(manifest.plan.num_shards)]
    of_shard = [prompts[end - count : end] for end, count in zip(ends, manifest.plan.shard_prompts, strict=True)]
    assert len(hsray.read(tmp_path)) == 0
    publish_shard(store, manifest, prompts, 0)
    publish_shard(store, manifest, prompts, 3)
    dataset = hsray.read(tmp_path)
    assert not dataset.complete
    publish_shard(store, manifest, prompts, 1)
    (tmp_path / "shards/.hsray-tmp-0123").write_bytes(b"half of shard 2")
    for found, wanted in zip(dataset, of_shard[0] + of_shard[3], strict=True):
        assert_same(found, wanted)
    for found, wanted in zip(hsray.read(tmp_path), of_shard[0] + of_shard[1] + of_shard[3], strict=True):
        assert_same(found, wanted)


def test_a_shard_that_was_not_planned_is_not_read(tmp_path, prompts):
    write_dataset(prompts, tmp_path)
    (tmp_path / "shards/000099.parquet").write_bytes(b"from elsewhere")
    assert len(hsray.read(tmp_path)) == len(prompts)


def test_a_folder_without_a_planned_dataset_is_an_error_that_names_it(tmp_path, prompts):
    with pytest.raises(ManifestError, match=f"'{re.escape(str(tmp_path))}' holds no dataset that can be read yet"):
        hsray.read(tmp_path)
    _, manifest = plan_prompts(prompts, tmp_path / "planned")
    Manifest(state="planning", identity=manifest.identity).save(Store(tmp_path / "planning"))
    with pytest.raises(ManifestError, match="holds no dataset that can be read yet"):
        hsray.read(tmp_path / "planning")


def test_a_data_loader_with_two_workers_gives_every_prompt_in_order(out, prompts):
    loader = DataLoader(hsray.read(out), batch_size=None, num_workers=2, timeout=60)
    for found, wanted in zip(loader, prompts, strict=True):
        assert_same(found, wanted)


def test_forked_workers_share_no_file_with_the_process_that_read_before(out, prompts):
    dataset = hsray.read(f"watched://{out}")
    assert_same(dataset[0], prompts[0])
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    for found, wanted in zip(loader, prompts, strict=True):
        assert_same(found, wanted)
    assert_same(dataset[1], prompts[1])


def test_a_dataset_that_has_read_travels_to_another_process(out, prompts):
    dataset = hsray.read(out, layers=["final"])
    dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == len(prompts)
    assert torch.equal(copy[7]["hidden_states"]["final"], prompts[7]["hidden_states"]["final"])


def test_a_tensor_outlives_its_dataset(out, prompts):
    states = [hsray.read(out)[index]["hidden_states"]["final"] for index in range(len(prompts))]
    for found_TD, prompt in zip(states, prompts, strict=True):
        assert torch.equal(found_TD, prompt["hidden_states"]["final"])


HEAVY = ("torch", "ray", "transformers", "sglang", "pandas")


def test_importing_and_opening_need_neither_torch_nor_ray_nor_an_engine(out):
    script = (
        "import sys, hsray, hsray.reader\n"
        f"assert len(hsray.read({str(out)!r})) == 10\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_states_are_views_of_the_buffers_that_arrow_read(out):
    dataset = hsray.read(out)
    table = dataset.open_shard(1).read(0, ["input_ids", "loss_mask", *map(column_name, LAYERS)])
    for layer, hidden_SD in RowGroup(table, LAYERS).states.items():
        values = table[column_name(layer)].chunk(0).buffers()[2]
        assert values.address <= hidden_SD.data_ptr() <= values.address + values.size - hidden_SD.nbytes
