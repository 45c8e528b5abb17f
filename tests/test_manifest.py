"""A manifest says what a dataset is, is the same bytes every time, and is never believed when it is damaged."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsray.manifest import (
    Identity,
    Manifest,
    ManifestError,
    check_identity,
    complete,
    load_manifest,
    pending_shards,
    published_shards,
)
from hsray.plan import Plan, PlanFile, shard_name
from hsray.store import Store

IDENTITY = Identity(
    model="org/modèle",
    config_digest="c0",
    weights_digest="w0",
    tokenizer_digest="t0",
    num_layers=36,
    hidden_size=128,
    layers=("embed", 9, "final"),
    dtype="bfloat16",
    stored_dtype="bfloat16",
    engine="sglang",
    tensor_parallel=1,
    requests_in_flight=1,
    prefill_tokens=16_384,
    file_format="parquet",
    compression="none",
    engine_args={"seed": 2, "nested": {"names": ["a", "b"]}},
    shard_bytes=1 << 20,
    max_tokens=4096,
    too_long="error",
    prompt_options={"columns": {"id": "uuid"}, "train_on": "all"},
    prompts_digest=None,
    plan_digest=None,
)
PLAN = Plan(
    files=(
        PlanFile(name="plan/000000.parquet", digest="d0", first_shard=0, num_shards=2),
        PlanFile(name="plan/000001.parquet", digest="d1", first_shard=2, num_shards=1),
    ),
    shard_prompts=(4, 3, 1),
    shard_tokens=(40, 30, 10),
    longest_prompt=20,
    num_dropped=1,
    num_truncated=2,
    length_histogram=(0, 3, 5),
    prompts_digest="p0",
)
PLANNING = Manifest(state="planning", identity=IDENTITY)
BUILDING = PLANNING.with_plan(PLAN)
COMPLETE = replace(BUILDING, state="complete", shard_file_bytes=(400, 300, 100), shard_digests=("d0", "d1", "d2"))

DIGESTS = dict(enumerate(COMPLETE.shard_digests))


def text_of(manifest: Manifest) -> str:
    store = Store("memory://test_manifest/text")
    manifest.save(store)
    return store.read("manifest.json").decode()


def load_text(text: str | bytes) -> Manifest | None:
    store = Store("memory://test_manifest/loaded")
    store.publish("manifest.json", text.encode() if isinstance(text, str) else text)
    return load_manifest(store)


def publish_shards(store: Store, *shards: int) -> None:
    for shard in shards:
        store.publish(shard_name(shard), b"x" * (shard + 1))


@pytest.mark.parametrize("manifest", [PLANNING, BUILDING, COMPLETE], ids=lambda manifest: manifest.state)
def test_a_manifest_reads_back_as_it_was_saved(tmp_path, manifest):
    store = Store(tmp_path)
    manifest.save(store)
    assert load_manifest(store) == manifest


@pytest.mark.parametrize("engine_args", [{"sizes": (1, 2)}, {"table": {1: "one"}}])
def test_a_dataset_is_the_one_asked_for_again_in_the_same_words(tmp_path, engine_args):
    identity = replace(IDENTITY, engine_args=engine_args)
    store = Store(tmp_path)
    Manifest(state="planning", identity=identity).with_plan(PLAN).save(store)
    check_identity(load_manifest(store).identity, identity, store)


def test_states_go_from_planning_through_building_to_complete(tmp_path):
    store = Store(tmp_path)
    assert load_manifest(store) is None
    PLANNING.save(store)
    building = load_manifest(store).with_plan(PLAN)
    assert (building.state, building.identity.plan_digest, building.identity.prompts_digest) == (
        "building",
        PLAN.digest,
        "p0",
    )
    building.save(store)
    publish_shards(store, 0, 1, 2)
    complete(load_manifest(store), store, DIGESTS)
    done = load_manifest(store)
    assert (done.state, done.shard_file_bytes, done.shard_digests) == ("complete", (1, 2, 3), ("d0", "d1", "d2"))


def test_the_same_dataset_has_the_same_manifest_byte_for_byte(tmp_path):
    for name in ("first", "second"):
        store = Store(tmp_path / name)
        BUILDING.save(store)
        publish_shards(store, 0, 1, 2)
        complete(BUILDING, store, DIGESTS)
    assert (tmp_path / "first/manifest.json").read_bytes() == (tmp_path / "second/manifest.json").read_bytes()


CHANGED = {
    "model": "org/other",
    "config_digest": "c1",
    "weights_digest": "w1",
    "tokenizer_digest": "t1",
    "num_layers": 37,
    "hidden_size": 256,
    "layers": ("embed", 10, "final"),
    "dtype": "float16",
    "stored_dtype": "float8_e4m3",
    "engine": "transformers",
    "engine_args": {},
    "tensor_parallel": 2,
    "requests_in_flight": 4,
    "prefill_tokens": 8192,
    "file_format": "arrow",
    "compression": "zstd:1",
    "shard_bytes": 1 << 21,
    "max_tokens": 8192,
    "too_long": "drop",
    "prompt_options": {"columns": {"id": "uuid"}, "train_on": "last"},
    "prompts_digest": "p1",
    "plan_digest": "q1",
}


@pytest.mark.parametrize("name", [item.name for item in fields(Identity) if item.name != "prompt_options"])
def test_a_difference_is_shown_from_both_sides_and_alone(tmp_path, name):
    there, here = getattr(BUILDING.identity, name), CHANGED[name]
    with pytest.raises(ManifestError) as caught:
        check_identity(BUILDING.identity, replace(BUILDING.identity, **{name: here}), Store(tmp_path))
    first, *differences, last = str(caught.value).splitlines()
    assert str(tmp_path) in first
    assert differences == [f"  {name}: the dataset has {there!r}, this build asks for {here!r}"]
    assert "give another out=" in last


def test_a_different_prompt_option_is_shown_by_its_own_name(tmp_path):
    wanted = replace(BUILDING.identity, prompt_options=CHANGED["prompt_options"])
    with pytest.raises(ManifestError) as caught:
        check_identity(BUILDING.identity, wanted, Store(tmp_path))
    assert str(caught.value).splitlines()[1:-1] == ["  train_on: the dataset has 'all', this build asks for 'last'"]


def test_all_differences_are_shown_at_once(tmp_path):
    with pytest.raises(ManifestError) as caught:
        check_identity(BUILDING.identity, Identity(**CHANGED), Store(tmp_path))
    assert len(re.findall("the dataset has", str(caught.value))) == len(CHANGED)


def test_what_a_request_does_not_know_yet_is_no_difference(tmp_path):
    check_identity(BUILDING.identity, IDENTITY, Store(tmp_path))


def changed(manifest: Manifest, *path: str | int, to: object) -> str:
    """A manifest's text with one value replaced, or removed where `to` is Ellipsis."""
    content = json.loads(text_of(manifest))
    place = content
    for step in path[:-1]:
        place = place[step]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(content)


DAMAGED = {
    "empty": "",
    "no JSON": "hello",
    "a list": "[]",
    "another JSON file": '{"name": "something else"}',
    "not UTF-8": b'{"format": "\xff"}',
    "another format": changed(COMPLETE, "format", to="hsrax"),
    "no version": changed(COMPLETE, "format_version", to=...),
    "no identity": changed(COMPLETE, "identity", to=...),
    "an unknown state": changed(COMPLETE, "state", to="done"),
    "an unknown identity": changed(COMPLETE, "identity", "colour", to="red"),
    "half an identity": changed(COMPLETE, "identity", "weights_digest", to=...),
    "an empty identity": changed(COMPLETE, "identity", "weights_digest", to=None),
    "building without a plan": changed(BUILDING, "plan", to=None),
    "another plan": changed(BUILDING, "plan", "files", 0, "digest", to="d9"),
    "a plan file less": changed(BUILDING, "plan", "files", 1, to=...),
    "a shard less in a plan file": changed(BUILDING, "plan", "files", 1, "num_shards", to=0),
    "a count of prompts less": changed(BUILDING, "plan", "shard_prompts", 2, to=...),
    "a count of tokens less": changed(BUILDING, "plan", "shard_tokens", 2, to=...),
    "a shard whose prompts are gone": changed(BUILDING, "plan", "shard_prompts", 1, to=0),
    "a shard of a prompt more": changed(BUILDING, "plan", "shard_prompts", 1, to=4),
    "a shard of more prompts than tokens": changed(BUILDING, "plan", "shard_tokens", 1, to=2),
    "building with an inventory": changed(BUILDING, "shard_file_bytes", to=[1, 2]),
    "building with digests": changed(BUILDING, "shard_digests", to=[]),
    "a plan file of other shards": changed(BUILDING, "plan", "files", 1, "first_shard", to=1),
    "complete without an inventory": changed(COMPLETE, "shard_file_bytes", to=None),
    "complete with half an inventory": changed(COMPLETE, "shard_file_bytes", 2, to=...),
    "complete without digests": changed(COMPLETE, "shard_digests", to=None),
    "complete with half the digests": changed(COMPLETE, "shard_digests", 2, to=...),
    "digests of something else": changed(COMPLETE, "shard_digests", 0, to=7),
    "an inventory of something else": changed(COMPLETE, "shard_file_bytes", to="abc"),
    "layers of something else": changed(COMPLETE, "identity", "layers", to="embed"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_manifest_is_refused_with_its_place_and_a_way_out(tmp_path, damage):
    text = DAMAGED[damage]
    path = tmp_path / "manifest.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(
        ManifestError, match=rf"{re.escape(str(path))} is damaged .*restore it, or build to another out="
    ):
        load_manifest(Store(tmp_path))


@pytest.mark.parametrize("version", [1, 99, "3"])
def test_a_manifest_of_another_version_says_which(version):
    with pytest.raises(ManifestError, match=rf"is a dataset of format version {version!r}, and this hsray's is \d+"):
        load_text(changed(COMPLETE, "format_version", to=version))


TEXT = text_of(COMPLETE)


@given(st.integers(0, len(TEXT) - 2))
def test_a_truncated_manifest_is_refused(length):
    with pytest.raises(ManifestError, match="manifest.json is damaged"):
        load_text(TEXT[:length])


@given(st.integers(0, len(TEXT.encode()) - 1), st.integers(0, 1), st.binary(max_size=1))
def test_a_manifest_with_a_byte_changed_is_refused_or_says_what_its_bytes_say(position, removed, added):
    data = TEXT.encode()
    data = data[:position] + added + data[position + removed :]
    try:
        manifest = load_text(data)
    except ManifestError:
        return
    assert json.loads(text_of(manifest)) == json.loads(data)


def test_an_empty_or_absent_folder_holds_no_dataset(tmp_path):
    assert load_manifest(Store(tmp_path)) is None
    assert load_manifest(Store(tmp_path / "absent")) is None


def test_what_a_killed_writer_left_is_not_something_else(tmp_path):
    (tmp_path / ".hsray-tmp-0123").write_text("{")
    assert load_manifest(Store(tmp_path)) is None


@pytest.mark.parametrize("name", ["thesis.tex", "shards/000000.parquet", ".git/config"])
def test_a_folder_with_something_else_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    found = Path(name).parts[0]
    with pytest.raises(
        ManifestError, match=rf"is not empty and holds no manifest.json \(found {found}\); give an out="
    ):
        load_manifest(Store(tmp_path))


@pytest.mark.parametrize("name", ["notes.txt", "000000.parquet.tmp", "0000000.parquet", "part-0.parquet", "old"])
def test_a_file_among_the_shards_that_is_none_is_refused_by_name(tmp_path, name):
    store = Store(tmp_path)
    publish_shards(store, 0)
    store.publish(f"shards/{name}", b"x")
    with pytest.raises(ManifestError, match=rf"shards/{re.escape(name)} is not of this dataset; move it away"):
        published_shards(store, "parquet")


def test_published_shards_are_numbers_with_their_bytes(tmp_path):
    store = Store(tmp_path)
    assert published_shards(store, "parquet") == {}
    publish_shards(store, 2, 0, 1_000_000)
    (tmp_path / "shards/.hsray-tmp-0123").write_text("half")
    assert published_shards(store, "parquet") == {0: 1, 2: 3, 1_000_000: 1_000_001}


@given(st.sets(st.integers(0, 2)))
def test_pending_shards_are_the_planned_ones_that_are_not_there(published):
    pending = pending_shards(PLAN, published)
    assert sorted([*pending, *published]) == [0, 1, 2]
    assert pending == sorted(pending)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([0, 2], "1 planned shards are missing (['shards/000001.parquet']), 0 were not planned ([])"),
        ([], "3 planned shards are missing"),
        ([0, 1, 2, 7], "0 planned shards are missing ([]), 1 were not planned (['shards/000007.parquet'])"),
        (
            [0, 1, 3],
            "1 planned shards are missing (['shards/000002.parquet']), 1 were not planned (['shards/000003.parquet'])",
        ),
    ],
)
def test_only_a_dataset_with_every_planned_shard_and_no_other_is_complete(tmp_path, shards, message):
    store = Store(tmp_path)
    BUILDING.save(store)
    publish_shards(store, *shards)
    with pytest.raises(ManifestError, match=re.escape(message)):
        complete(BUILDING, store, DIGESTS)
    assert load_manifest(store).state == "building"


def test_a_shard_of_another_size_than_its_writer_said_leaves_the_dataset_incomplete(tmp_path):
    store = Store(tmp_path)
    BUILDING.save(store)
    publish_shards(store, 0, 1, 2)
    with pytest.raises(ManifestError, match=r"shards/000001.parquet is 2 bytes, and was 5 when it was published"):
        complete(BUILDING, store, DIGESTS, num_bytes=(1, 5, 3))
    assert load_manifest(store).state == "building"
    assert complete(BUILDING, store, DIGESTS, num_bytes=(0, 2, 0)).state == "complete"
