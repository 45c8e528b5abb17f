"""A stream gives every token once, to one rank and worker, in an order that is found again."""

import copy
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import hsray
from hsray.batch_memory import Memories, SharedBatch
from tests.builds import files_of
from tests.synthetic import LAYERS, assert_same, make_prompts, plan_prompts, publish_shard, write_dataset

LENGTHS = [7, 1, 30, 2, 2, 80, 7, 7, 1, 40, 300, 5, 5, 5, 90, 11, 3, 64, 1, 1]
NUM_TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    return make_prompts(LENGTHS)


@pytest.fixture(scope="module")
def out(tmp_path_factory, prompts) -> Path:
    """A dataset of a dozen shards, some of several row groups."""
    folder = tmp_path_factory.mktemp("stream")
    before, hsray.shard.ROW_GROUP_BYTES = hsray.shard.ROW_GROUP_BYTES, 10 * 96
    write_dataset(prompts, folder, shard_tokens=60)
    hsray.shard.ROW_GROUP_BYTES = before
    dataset = hsray.read(folder)
    assert max(dataset.open_shard(shard).num_groups for shard in dataset.shards) > 1
    return folder


def tokens_of(batches: Iterable[dict]) -> Iterator[tuple[int, int]]:
    """Which token of which prompt each is."""
    for batch in batches:
        yield from zip(batch["document_ids"][0].tolist(), batch["position_ids"][0].tolist(), strict=True)


def assert_right(batch: dict, prompts: list[dict]) -> None:
    """That each token's id, mask and states are its prompt's."""
    for place, (document, position) in enumerate(tokens_of([batch])):
        wanted = prompts[document]
        assert batch["input_ids"][0, place] == wanted["input_ids"][position]
        assert batch["loss_mask"][0, place] == wanted["loss_mask"][position]
        for layer in LAYERS:
            assert torch.equal(batch["hidden_states"][layer][0, place], wanted["hidden_states"][layer][position])


ALL = [(document, position) for document, num_tokens in enumerate(LENGTHS) for position in range(num_tokens)]


@pytest.mark.parametrize("batch_tokens", [1, 50, 64, NUM_TOKENS, NUM_TOKENS + 1])
def test_in_order_every_token_follows_the_one_before(out, prompts, batch_tokens):
    batches = list(hsray.read(out).stream(batch_tokens=batch_tokens))
    assert list(tokens_of(batches)) == ALL
    assert {len(batch["input_ids"][0]) for batch in batches[:-1]} <= {batch_tokens}
    for batch in batches:
        assert {values.shape[:2] for values in batch["hidden_states"].values()} == {batch["input_ids"].shape}
        assert_right(batch, prompts)


def test_a_batch_that_lies_side_by_side_is_a_view_and_may_be_written_to(out, prompts):
    before = files_of(out)
    batches = list(hsray.read(out).stream(batch_tokens=5))
    starts = [batch["hidden_states"][3].data_ptr() for batch in batches]
    row_bytes = batches[0]["hidden_states"][3][0, :1].nbytes
    assert starts[-10] == starts[-11] + 5 * row_bytes, "a prompt of 90 tokens"
    for batch in batches[::2]:
        batch["hidden_states"][3].zero_()
        batch["input_ids"].zero_()
    for batch in batches[1::2]:
        assert_right(batch, prompts)
    assert files_of(out) == before


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_what_is_written_to_a_batch_reaches_no_other_pass_nor_reader(tmp_path, prompts, file_format, shuffle):
    write_dataset(prompts[:6], tmp_path, shard_tokens=200, file_format=file_format)
    dataset = hsray.read(tmp_path)
    stream = dataset.stream(batch_tokens=9, shuffle=shuffle)
    for _ in range(3):
        for batch in stream:
            assert_right(batch, prompts)
            batch["input_ids"][~batch["loss_mask"]] = -100
            batch["loss_mask"].fill_(True)
            batch["hidden_states"][3].zero_()
            index = int(batch["document_ids"][0, 0])
            assert_same(dataset[index], prompts[index])


def test_shuffled_every_pass_has_every_token_once_in_another_order(out, prompts):
    stream = hsray.read(out).stream(batch_tokens=64, shuffle=True, seed=1)
    passes = [list(stream), list(stream)]
    orders = [list(tokens_of(batches)) for batches in passes]
    assert sorted(orders[0]) == sorted(orders[1]) == ALL
    assert len({tuple(order) for order in [*orders, ALL]}) == 3
    for batch in passes[0]:
        assert_right(batch, prompts)
    assert list(tokens_of(hsray.read(out).stream(batch_tokens=64, shuffle=True, seed=1))) == orders[0]
    assert list(tokens_of(hsray.read(out).stream(batch_tokens=64, shuffle=True, seed=2))) != orders[0]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_and_workers_share_every_token_without_overlap(out, shuffle, num_workers):
    found = Counter()
    for rank in range(3):
        stream = hsray.read(out).stream(batch_tokens=40, shuffle=shuffle, rank=rank, world_size=3)
        loader = DataLoader(stream, batch_size=None, num_workers=num_workers, timeout=60 if num_workers else 0)
        of_rank = list(tokens_of(loader))
        assert of_rank
        found.update(of_rank)
    assert found == Counter(ALL)


def test_batches_of_workers_stay_as_they_are_while_they_are_held(out, prompts):
    stream = hsray.read(out).stream(batch_tokens=40)
    loader = DataLoader(stream, batch_size=None, num_workers=2, timeout=60, persistent_workers=True)
    held = [batch for _ in range(2) for batch in loader]
    for batch in held:
        assert_right(batch, prompts)
    assert Counter(tokens_of(held)) == Counter(ALL * 2)
    one_layer = held[0]["hidden_states"][3][0, 1:]
    wanted = one_layer.clone()
    del held, batch
    for batch in loader:
        assert_right(batch, prompts)
    assert torch.equal(one_layer, wanted)


def test_a_memory_is_filled_again_once_neither_process_has_a_tensor_in_it():
    memories = Memories()
    memory = memories.free(256)
    values = memory.take()
    values[:] = 7
    elsewhere = torch.ones(3)
    batch = copy.copy(SharedBatch({"a": values[64:128].view(4, 16), "b": {1: values[128:]}, "c": elsewhere}, memory))
    sent = ForkingPickler.dumps(batch)
    again = ForkingPickler.dumps(batch)
    del values, batch
    assert not memory.is_free, "on its way"
    found = ForkingPickler.loads(sent)
    assert type(found) is dict
    assert found["a"].shape == (4, 16)
    assert torch.equal(found["c"], elsewhere)
    kept = found["b"][1][3:5]
    del found
    assert memories.free(256) is not memory
    assert kept.tolist() == [7, 7]
    del kept
    assert memory.is_free
    assert memories.free(256) is memory
    assert ForkingPickler.loads(again)["b"][1].tolist() == [7] * 128


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_goes_on_exactly_where_its_state_says(out, shuffle):
    def stream() -> hsray.stream.PackedStream:
        return hsray.read(out).stream(batch_tokens=33, shuffle=shuffle, seed=5)

    whole = [list(tokens_of([batch])) for batch in stream()]
    for count in (1, 2, 7, len(whole) - 1):
        first = stream()
        given = iter(first)
        for _ in range(count):
            next(given)
        state = first.state_dict()
        given.close()
        second = stream()
        second.load_state_dict(state)
        assert [list(tokens_of([batch])) for batch in second] == whole[count:]
    over = stream()
    list(over)
    again = stream()
    again.load_state_dict(over.state_dict())
    assert list(tokens_of(again)) == list(tokens_of(over))


def test_a_snapshot_of_a_growing_dataset_is_streamed_to_its_end(tmp_path, prompts):
    store, manifest = plan_prompts(prompts, tmp_path, shard_tokens=60)
    for shard in (0, 2):
        publish_shard(store, manifest, prompts, shard)
    dataset = hsray.read(tmp_path)
    publish_shard(store, manifest, prompts, 1)
    num_tokens = sum(manifest.plan.shard_tokens[shard] for shard in (0, 2))
    assert len(list(tokens_of(dataset.stream(batch_tokens=16)))) == num_tokens


@pytest.mark.parametrize("only_loss_mask", [False, True])
def test_single_tokens_come_once_each_shuffled_across_prompts(out, prompts, only_loss_mask):
    stream = hsray.read(out).tokens(3, batch_size=16, shuffle_buffer=100, only_loss_mask=only_loss_mask, skip_first=2)
    batches = list(stream)
    assert {len(batch) for batch in batches[:-1]} == {16}
    found_ND = torch.cat(batches)
    kept = []
    for prompt in prompts:
        keep_T = prompt["loss_mask"].clone() if only_loss_mask else torch.ones_like(prompt["loss_mask"])
        keep_T[:2] = False
        kept.append(prompt["hidden_states"][3][keep_T])
    wanted_ND = torch.cat(kept)
    assert sorted(map(tuple, found_ND.float().tolist())) == sorted(map(tuple, wanted_ND.float().tolist()))
    assert not torch.equal(found_ND, wanted_ND)
    assert torch.allclose(stream.mean, wanted_ND.double().mean(dim=0))
    assert stream.mean_norm == pytest.approx(wanted_ND.double().norm(dim=1).mean().item())
    assert stream.num_tokens == len(wanted_ND)


def test_a_stream_of_tokens_goes_on_exactly_where_its_state_says(out):
    def stream() -> hsray.stream.TokenStream:
        return hsray.read(out).tokens(3, batch_size=16, shuffle_buffer=100, only_loss_mask=True, skip_first=1, seed=4)

    one = stream()
    whole = [[batch.clone() for batch in one] for _ in range(2)]
    assert not torch.equal(whole[0][0], whole[1][0])
    for count in (0, 1, 5, 6, 7, len(whole[0]) - 1):
        first, second = stream(), stream()
        given = iter(first)
        for _ in range(count):
            next(given)
        second.load_state_dict(first.state_dict())
        assert torch.equal(torch.cat(list(second)), torch.cat(whole[0][count:]))
        assert torch.equal(torch.cat(list(second)), torch.cat(whole[1]))
        assert (second.num_tokens, second.mean_norm) == (one.num_tokens, one.mean_norm)
        assert torch.equal(second.mean, one.mean)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_tokens": 0}, "batch_tokens=0"),
        ({"batch_tokens": 8, "rank": 2, "world_size": 2}, "rank=2, world_size=2; give a rank from 0 to world_size - 1"),
    ],
)
def test_a_stream_that_cannot_be_is_refused(out, options, message):
    with pytest.raises(ValueError, match=message):
        hsray.read(out).stream(**options)


def test_tokens_of_a_layer_that_was_not_opened_are_refused(out):
    with pytest.raises(KeyError, match=r"layer 3 is not among those opened, \['final'\]"):
        hsray.read(out, layers="final").tokens(3, batch_size=1)
    with pytest.raises(ValueError, match="give a batch of 1 up to the buffer"):
        hsray.read(out).tokens(3, batch_size=10, shuffle_buffer=5)


def test_threads_share_a_dataset(out, prompts):
    dataset = hsray.read(out)
    start = threading.Barrier(8)

    def read_all(offset: int) -> None:
        start.wait()
        for index in range(len(prompts)):
            index = (index * 7 + offset) % len(prompts)
            assert_same(dataset[index], prompts[index])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read_all, range(8)))


def test_a_prompt_as_arrow_has_the_columns_of_its_shard(out, prompts):
    table = hsray.read(out, layers=["final"]).to_arrow(5)
    assert table.column_names == ["prompt_id", "num_tokens", "input_ids", "loss_mask", "layer_final"]
    assert table["prompt_id"].to_pylist() == ["p5"]
    assert table["layer_final"][0].as_py() == prompts[5]["hidden_states"]["final"].view(torch.int16).numpy().tobytes()


def test_ray_data_has_every_prompt_with_its_states_as_tensors(ray_session, out, prompts):
    rows = {row["prompt_id"]: row for row in hsray.read(out).to_ray().take_all()}
    assert len(rows) == len(prompts)
    for prompt in prompts:
        row = rows[prompt["prompt_id"]]
        assert torch.equal(torch.from_numpy(row["input_ids"].copy()), prompt["input_ids"])
        for layer in LAYERS:
            assert torch.equal(torch.from_numpy(row[f"layer_{layer}"].copy()), prompt["hidden_states"][layer].float())
