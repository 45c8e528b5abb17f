"""The log of a build's runs: what it vouches for, whatever has become of it."""

import json

import pytest

from hsray import manifest as manifest_module
from hsray.events import NAME, Events, receipts
from hsray.manifest import check_shards, load_manifest, published_shards
from hsray.report import Receipt
from hsray.shard import ShardError
from hsray.store import Store
from pipelines.random_dataset import receipt_of
from tests.datasets import make_dataset

D, E = (f"xxh3-128:{number:032x}" for number in (13, 14))


def write_runs(store: Store, *runs: tuple[str, list[Receipt]]) -> None:
    for identity_digest, given in runs:
        with Events(store, identity_digest=identity_digest, shards_left=len(given)) as events:
            for item in given:
                events.receipt(item)


def test_receipts_are_those_of_the_same_dataset_and_the_last_counts(tmp_path):
    store = Store(tmp_path)
    assert receipts(store, identity_digest="a") == {}
    write_runs(
        store,
        ("a", [receipt_of(0, 10, D), receipt_of(1, 10, D)]),
        ("b", [receipt_of(2, 10, D)]),
        ("a", [receipt_of(1, 11, E), receipt_of(3, 10, D)]),
    )
    assert receipts(store, identity_digest="a") == {0: (10, D), 1: (11, E), 3: (10, D)}
    assert receipts(store, identity_digest="b") == {2: (10, D)}


def test_a_folder_whose_name_is_not_ascii_has_events_too(ray_session, tmp_path):
    store = Store(tmp_path / "données 数据")
    write_runs(store, ("a", [receipt_of(0, 10, D)]))
    assert receipts(store, identity_digest="a") == {0: (10, D)}


@pytest.mark.parametrize("kept", [1, 30, 200])
def test_a_line_that_a_kill_cut_off_vouches_for_nothing_nor_does_what_follows_it_until_the_next_run(tmp_path, kept):
    store, log = Store(tmp_path), tmp_path / NAME
    write_runs(store, ("a", [receipt_of(0, 10, D)]))
    whole = log.read_bytes()
    write_runs(store, ("a", [receipt_of(1, 10, D)]))
    log.write_bytes(whole + log.read_bytes()[len(whole) :][:kept])
    assert receipts(store, identity_digest="a") == {0: (10, D)}
    write_runs(store, ("a", [receipt_of(2, 10, D)]))
    assert receipts(store, identity_digest="a") == {0: (10, D), 2: (10, D)}
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()[-3:]] == ["build", "receipt", "end"]


WRONG = ["[" * 200_000, '{"event": "receipt"}', "null", "1e999", '"\\ud800"']
WRONG += [
    json.dumps({"event": "receipt", "shard": shard, "nbytes": num_bytes, "digest": digest})
    for shard, num_bytes, digest in [
        (True, 10, D),
        ([1], 10, D),
        (1.0, 10, D),
        (1, "10", D),
        (1, 10, None),
        (1, 10, "d"),
        (1, 10, D + "0"),
        (1, 10, [D]),
    ]
]


@pytest.mark.parametrize("line", WRONG, ids=[line[:80] for line in WRONG])
def test_a_line_that_is_no_receipt_vouches_for_nothing(tmp_path, line):
    store, log = Store(tmp_path), tmp_path / NAME
    write_runs(store, ("a", [receipt_of(0, 10, D)]))
    log.write_text(log.read_text() + line + "\n")
    assert receipts(store, identity_digest="a") == {0: (10, D)}


def test_a_receipt_that_is_not_what_the_shard_says_has_every_shard_looked_at(tiny_llama, tmp_path, monkeypatch):
    make_dataset(tiny_llama, tmp_path / "out", lengths=[40] * 6, layers=[0])
    store = Store(tmp_path / "out")
    manifest = load_manifest(store)
    published = published_shards(store, "parquet")
    monkeypatch.setattr(manifest_module, "VOUCHED_READ", 2)
    wrong = {shard: (num_bytes, D) for shard, num_bytes in published.items()}
    assert check_shards(manifest, published, store, receipts=wrong) == dict(enumerate(manifest.shard_digests))


def test_a_shard_is_looked_at_unless_a_receipt_vouches_for_its_size_and_so_are_some_of_those(
    tiny_llama, tmp_path, monkeypatch
):
    make_dataset(tiny_llama, tmp_path / "out", lengths=[40] * 6, layers=[0])
    store = Store(tmp_path / "out")
    manifest = load_manifest(store)
    published = published_shards(store, "parquet")
    assert len(published) == 6
    known = {shard: (num_bytes, manifest.shard_digests[shard]) for shard, num_bytes in published.items()}
    paths = [tmp_path / "out" / manifest.shard_name(shard) for shard in range(6)]
    paths[4].write_bytes(bytes(published[4]))
    with pytest.raises(ShardError, match="000004.parquet is damaged"):  # of few, each is looked at
        check_shards(manifest, published, store, receipts=known)
    monkeypatch.setattr(manifest_module, "VOUCHED_READ", 2)
    assert check_shards(manifest, published, store, receipts=known) == dict(enumerate(manifest.shard_digests))
    for untold in ({}, {4: (published[4] + 1, D)}):
        told = {shard: value for shard, value in known.items() if shard != 4} | untold
        with pytest.raises(ShardError, match="000004.parquet is damaged"):
            check_shards(manifest, published, store, receipts=told)
    paths[0].write_bytes(bytes(published[0]))
    with pytest.raises(ShardError, match="000000.parquet is damaged"):
        check_shards(manifest, published, store, receipts=known)
