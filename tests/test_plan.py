"""Every prompt is in exactly one shard, in order; the same prompts give the same bytes, however they arrive."""

import io
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsray import plan as plan_module
from hsray.plan import Plan, PlanOptions, digest_rows, read_plan_file, shard_name, shard_number, write_plan
from hsray.prompts import PROMPTS_SCHEMA
from hsray.seen import FirstSeen
from hsray.sources import PromptError
from hsray.store import Store

BYTES_PER_TOKEN = 10


def options_for(**changes: object) -> PlanOptions:
    defaults = {
        "bytes_per_token": BYTES_PER_TOKEN,
        "value_bytes_per_token": 5,
        "shard_bytes": 100,
        "duplicates": "keep",
    }
    return PlanOptions(**(defaults | changes))


def prompt(number: int, num_tokens: int = 3, **changes: object) -> dict:
    """A row as `tokenize_rows` gives it, whose content tells its number."""
    row = {
        "source": f"data.jsonl:{number + 1}",
        "row_digest": number.to_bytes(16, "big"),
        "shape": "text",
        "prompt_id": f"p{number}",
        "content_digest": number.to_bytes(12, "big"),
        "input_ids": [number * 1000 + position for position in range(num_tokens)],
        "loss_mask": [(number + position) % 3 == 0 for position in range(num_tokens)],
        "error": None,
        "dropped": None,
        "truncated": False,
    }
    return row | changes


def block_of(rows: Sequence[dict]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=PROMPTS_SCHEMA)


def memory_store(name: str) -> Store:
    store = Store(f"memory://test_plan/{name}")
    store.remove_folder("")
    return store


def planned_shards(store: Store, plan: Plan) -> list[dict]:
    return [shard for file in plan.files for shard in read_plan_file(store, file).to_pylist()]


def files_of(store: Store) -> dict[str, bytes]:
    names = [f"plan/{name}" for name in store.list("plan")] + [name for name in store.list() if name != "plan"]
    return {name: store.read(name) for name in names}


ROWS = st.lists(st.tuples(st.integers(1, 25), st.booleans()), min_size=1, max_size=40).map(
    lambda drawn: [
        prompt(i, num_tokens, dropped="for a test" if i > 0 and drop else None)
        for i, (num_tokens, drop) in enumerate(drawn)
    ]
)


@given(ROWS, st.integers(1, 300))
def test_every_prompt_is_in_exactly_one_shard_in_order(rows, shard_bytes):
    store = memory_store("order")
    plan = write_plan([block_of(rows)], store, options_for(shard_bytes=shard_bytes))
    shards = planned_shards(store, plan)
    assert [shard["shard"] for shard in shards] == list(range(plan.num_shards))
    kept = [row for row in rows if not row["dropped"]]
    for name in ("prompt_id", "input_ids", "loss_mask"):
        assert [value for shard in shards for value in shard[name]] == [row[name] for row in kept]
    assert plan.longest_prompt == max(len(row["input_ids"]) for row in kept)
    assert plan.num_dropped == len(rows) - len(kept)


@given(ROWS, st.integers(1, 300))
def test_a_shard_takes_what_fits_and_no_more(rows, shard_bytes):
    store = memory_store("packing")
    plan = write_plan([block_of(rows)], store, options_for(shard_bytes=shard_bytes))
    shards = [[len(ids) for ids in shard["input_ids"]] for shard in planned_shards(store, plan)]
    assert list(plan.shard_prompts) == [len(lengths) for lengths in shards]
    assert list(plan.shard_tokens) == [sum(lengths) for lengths in shards]
    for lengths in shards:
        assert len(lengths) == 1 or 0 < sum(lengths) * BYTES_PER_TOKEN <= shard_bytes
    for lengths, following in zip(shards, shards[1:], strict=False):
        assert (sum(lengths) + following[0]) * BYTES_PER_TOKEN > shard_bytes


@given(ROWS, st.lists(st.integers(0, 40), max_size=6), st.integers(1, 4), st.booleans())
def test_how_the_prompts_arrive_in_blocks_changes_no_byte(rows, cuts, file_shards, sliced):
    bounds = sorted({0, len(rows), *(min(cut, len(rows)) for cut in cuts)})
    bounds.insert(1, bounds[1])  # an empty block, as Ray gives them
    whole = block_of(rows)
    parts = [whole.slice(a, b - a) if sliced else block_of(rows[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "FILE_SHARDS", file_shards)
        at_once, in_parts = memory_store("at_once"), memory_store("in_parts")
        first, second = write_plan([whole], at_once, options_for()), write_plan(parts, in_parts, options_for())
    assert first == second
    assert first.digest == second.digest
    assert files_of(at_once) == files_of(in_parts)
    assert first.prompts_digest == digest_rows(parts)


def test_a_long_plan_is_cut_into_files_by_shards(monkeypatch, tmp_path):
    monkeypatch.setattr(plan_module, "FILE_SHARDS", 3)
    rows = [prompt(number, 10) for number in range(8)]
    store = Store(tmp_path)
    plan = write_plan([block_of(rows[:5]), block_of(rows[5:])], store, options_for())
    assert [(file.name, file.first_shard, file.num_shards) for file in plan.files] == [
        ("plan/000000.parquet", 0, 3),
        ("plan/000001.parquet", 3, 3),
        ("plan/000002.parquet", 6, 2),
    ]
    assert [shard["prompt_id"] for shard in planned_shards(store, plan)] == [[row["prompt_id"]] for row in rows]


def test_a_plan_of_long_prompts_is_cut_into_files_by_tokens(monkeypatch, tmp_path):
    monkeypatch.setattr(plan_module, "FILE_TOKENS", 25)
    plan = write_plan([block_of([prompt(number, 10) for number in range(7)])], Store(tmp_path), options_for())
    assert [file.num_shards for file in plan.files] == [3, 3, 1]


def test_the_digest_tells_any_change_of_prompts_or_of_their_order(tmp_path):
    rows = [prompt(number, 10) for number in range(4)]
    versions = {
        "same": rows,
        "swapped": [rows[1], rows[0], *rows[2:]],
        "shorter": rows[:3],
        "token": [rows[0] | {"input_ids": [7, *rows[0]["input_ids"][1:]]}, *rows[1:]],
        "mask": [rows[0] | {"loss_mask": [not rows[0]["loss_mask"][0], *rows[0]["loss_mask"][1:]]}, *rows[1:]],
        "id": [rows[0] | {"prompt_id": "other"}, *rows[1:]],
    }
    digests = [write_plan([block_of(v)], Store(tmp_path / name), options_for()).digest for name, v in versions.items()]
    assert len({*digests}) == len(versions)


@pytest.mark.parametrize("own_id", ["a17", ""])
def test_one_id_for_two_rows_is_an_error_that_names_both(tmp_path, own_id):
    blocks = [block_of([prompt(0, prompt_id=own_id), prompt(1)]), block_of([prompt(2, prompt_id=own_id)])]
    message = f"data.jsonl:3: its id {own_id!r} is that of data.jsonl:1 too"
    with pytest.raises(PromptError, match=re.escape(message)):
        write_plan(blocks, Store(tmp_path), options_for())


def test_content_that_comes_again_without_ids_is_kept_under_ids_of_its_own(tmp_path):
    rows = [prompt(number, prompt_id="#d1" if number % 2 else "#d2", input_ids=[1, 2, 3]) for number in range(6)]
    store = Store(tmp_path)
    plan = write_plan([block_of(rows)], store, options_for())
    ids = [prompt_id for shard in planned_shards(store, plan) for prompt_id in shard["prompt_id"]]
    assert ids == ["#d2", "#d1", "#d2-2", "#d1-2", "#d2-3", "#d1-3"]


def test_what_a_policy_drops_is_listed_with_its_reason_and_in_no_shard(tmp_path):
    rows = [prompt(0), prompt(1, 40, dropped="too long"), prompt(2), prompt(3, 50, dropped="untrained")]
    store = Store(tmp_path)
    plan = write_plan([block_of(rows[:2]), block_of(rows[2:])], store, options_for())
    assert plan.num_dropped == 2
    assert [shard["prompt_id"] for shard in planned_shards(store, plan)] == [["p0", "p2"]]
    assert pq.read_table(tmp_path / "dropped.parquet").to_pylist() == [
        {"source": "data.jsonl:2", "prompt_id": "p1", "num_tokens": 40, "reason": "too long"},
        {"source": "data.jsonl:4", "prompt_id": "p3", "num_tokens": 50, "reason": "untrained"},
    ]


@pytest.mark.parametrize("cut", range(7))
def test_content_that_came_before_is_dropped_where_that_is_asked_for(tmp_path, cut):
    contents = [0, 1, 0, 2, 1, 0]
    rows = [prompt(number, content_digest=bytes([content] * 12)) for number, content in enumerate(contents)]
    store = Store(tmp_path)
    plan = write_plan([block_of(rows[:cut]), block_of(rows[cut:])], store, options_for(duplicates="drop"))
    assert [prompt_id for shard in planned_shards(store, plan) for prompt_id in shard["prompt_id"]] == [
        "p0",
        "p1",
        "p3",
    ]
    listed = pq.read_table(tmp_path / "dropped.parquet").to_pylist()
    assert [(row["source"], row["reason"]) for row in listed] == [
        ("data.jsonl:3", "the tokens and mask of data.jsonl:1"),
        ("data.jsonl:5", "the tokens and mask of data.jsonl:2"),
        ("data.jsonl:6", "the tokens and mask of data.jsonl:1"),
    ]


def test_truncated_prompts_are_counted(tmp_path):
    rows = [prompt(0, truncated=True), prompt(1), prompt(2, truncated=True), prompt(3, dropped="x", truncated=True)]
    assert write_plan([block_of(rows[:1]), block_of(rows[1:])], Store(tmp_path), options_for()).num_truncated == 2


@pytest.mark.parametrize("cut", [2, 3])
def test_a_row_of_another_shape_than_the_first_is_an_error_that_names_both(tmp_path, cut):
    rows = [prompt(0), prompt(1), prompt(2, shape="messages")]
    told = []
    with pytest.raises(PromptError) as caught:
        options = options_for(on_shape=lambda *shape: told.append(shape))
        write_plan([block_of(rows[:cut]), block_of(rows[cut:])], Store(tmp_path), options)
    assert str(caught.value).startswith(
        "data.jsonl:3: a row of shape 'messages', where data.jsonl:1 has shape 'text'; "
    )
    assert told == [("text", "data.jsonl:1")]


def test_the_prompts_of_a_split_row_count_as_one_row_in_the_digest():
    rows = [prompt(0), prompt(1), prompt(2, row_digest=None), prompt(3)]
    assert digest_rows([block_of(rows)]) == digest_rows([block_of([rows[0], rows[1], rows[3]])])


def test_a_plan_made_without_a_store_is_the_one_that_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_module, "FILE_SHARDS", 2)
    blocks = [block_of([prompt(number, 3 + number % 5) for number in range(40)])]
    written, made = (write_plan(blocks, store, options_for()) for store in (Store(tmp_path), None))
    assert made == replace(written, files=())


@given(st.lists(st.lists(st.integers(0, 30), max_size=20), max_size=12))
def test_a_key_that_came_before_is_found_under_its_first_number(batches):
    seen, first, number = FirstSeen(), {}, 0
    for batch in batches:
        numbers = np.arange(number, number + len(batch)) * 3
        expected = []
        for key, own in zip(batch, numbers.tolist(), strict=True):
            expected.append(first.get(key, -1))
            first.setdefault(key, own)
        assert seen.find([f"key {key}" for key in batch], numbers).tolist() == expected
        number += len(batch)


def test_where_nothing_is_dropped_there_is_no_list_of_it(tmp_path):
    write_plan([block_of([prompt(0)])], Store(tmp_path), options_for())
    assert not (tmp_path / "dropped.parquet").exists()


@pytest.mark.parametrize(("source", "place"), [("data.jsonl:7", "data.jsonl:7"), (None, "row 6")])
def test_the_first_row_that_cannot_be_used_is_named(tmp_path, source, place):
    rows = [prompt(number) for number in range(9)]
    bad = {"input_ids": None, "loss_mask": None, "prompt_id": None, "content_digest": None}
    rows[6] |= {"source": source, "error": "an empty prompt", **bad}
    rows[8] |= {"error": "another fault", **bad}
    with pytest.raises(PromptError, match=f"^{place}: an empty prompt$"):
        write_plan([block_of(rows[:4]), block_of(rows[4:])], Store(tmp_path), options_for())


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], "0 rows, 0 dropped"),
        ([block_of([])], "0 rows, 0 dropped"),
        ([block_of([prompt(0, dropped="too long")])], "1 rows, 1 dropped"),
    ],
)
def test_a_dataset_without_prompts_is_an_error(tmp_path, blocks, message):
    with pytest.raises(PromptError, match=f"the dataset has no prompt to build from .{message}"):
        write_plan(blocks, Store(tmp_path), options_for())


def test_a_prompt_whose_states_no_parquet_value_holds_is_refused_by_name(tmp_path):
    options = options_for(value_bytes_per_token=1 << 28, bytes_per_token=1 << 30)
    write_plan([block_of([prompt(0, 7)])], Store(tmp_path / "just_fits"), options)
    with pytest.raises(PromptError, match=r"'p1' has 8 tokens, 2147483648 bytes a layer; .* max_tokens=7 with"):
        write_plan([block_of([prompt(0, 7), prompt(1, 8)])], Store(tmp_path / "out"), options)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def planned(tmp_path) -> tuple[Store, Plan]:
    store = Store(tmp_path)
    return store, write_plan([block_of([prompt(number) for number in range(9)])], store, options_for())


def test_a_changed_plan_file_is_refused(planned, tmp_path):
    store, plan = planned
    path = tmp_path / plan.files[0].name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=rf"{re.escape(str(path))} is changed: .*restore the file, or build to another"
    ):
        read_plan_file(store, plan.files[0])


def test_a_missing_plan_file_is_refused(planned, tmp_path):
    store, plan = planned
    (tmp_path / plan.files[0].name).unlink()
    with pytest.raises(ValueError, match="plan/000000.parquet is missing"):
        read_plan_file(store, plan.files[0])


def test_a_plan_file_is_plain_parquet(planned, tmp_path):
    store, plan = planned
    data = (tmp_path / plan.files[0].name).read_bytes()
    assert pq.read_table(io.BytesIO(data)) == read_plan_file(store, plan.files[0])


@given(st.integers(0, 10**7))
def test_a_shards_name_and_number_are_one_to_one(shard):
    assert shard_number(shard_name(shard).removeprefix("shards/")) == shard


@pytest.mark.parametrize(
    "name",
    [
        "12.parquet",
        "0000012.parquet",
        "000012.parquet.tmp",
        "00001x.parquet",
        "-00012.parquet",
        "000012",
        "٠٠٠٠٠١.parquet",
    ],
)
def test_another_name_is_no_shards(name):
    assert shard_number(name) is None
