"""A check finds what is wrong with which shard, and a repair leaves the next build only that to do."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import hsray
from hsray.audit import CheckReport
from hsray.manifest import ManifestError, load_manifest
from hsray.plan import shard_name
from hsray.shard import write_table
from hsray.store import Store
from pipelines.check import main
from tests.synthetic import LENGTHS, make_prompts, plan_prompts, publish_shard, write_dataset


@pytest.fixture(scope="module")
def whole(ray_session, tmp_path_factory) -> Path:
    """A finished dataset of several shards."""
    out = tmp_path_factory.mktemp("whole") / "out"
    write_dataset(make_prompts(LENGTHS), out)
    return out


@pytest.fixture
def out(whole, tmp_path) -> Path:
    """A copy, to damage."""
    return shutil.copytree(whole, tmp_path / "out")


def check(out: Path, **options: bool) -> CheckReport:
    return hsray.check(str(out), progress=False, **options)


@pytest.mark.parametrize("compression", ["none", "zstd:1"])
def test_a_whole_dataset_is_found_whole(ray_session, tmp_path, compression):
    write_dataset(make_prompts(LENGTHS), tmp_path, compression=compression)
    report = check(tmp_path, deep=True)
    assert report.ok, str(report)
    assert report.file_bytes == sum(path.stat().st_size for path in tmp_path.glob("shards/*"))
    assert f"all {report.shards} shards are as they must be" in str(report)


def rewritten(path: Path, change: Callable[[dict], None]) -> None:
    """Writes a shard again with its first prompt changed, and its metadata kept."""
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows[0])
    with path.open("wb") as sink:
        write_table(pa.Table.from_pylist(rows, schema=table.schema), sink)


def make_infinite(row: dict) -> None:
    row["layer_3"] = (
        torch.tensor([float("inf")], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes() + row["layer_3"][2:]
    )


def change_a_token(row: dict) -> None:
    row["input_ids"][0] += 1


def byte_flipped(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


DAMAGE = {
    "missing": (lambda path: path.unlink(), "is not there"),
    "short": (lambda path: path.write_bytes(path.read_bytes()[:-9]), r"has \d+ bytes; the inventory says \d+"),
    "another shard": (
        lambda path: path.write_bytes(path.with_name("000001.parquet").read_bytes()),
        r"has \d+ bytes; the inventory says \d+",
    ),
    "a damaged footer": (
        lambda path: byte_flipped(path, path.stat().st_size - 1),
        "is damaged",
    ),
    "another token": (lambda path: rewritten(path, change_a_token), r"column 'input_ids': not what the plan says"),
    "a number not finite": (
        lambda path: rewritten(path, make_infinite),
        r"layer 3: NaN or infinite numbers",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_damage_is_found_and_said_of_its_shard_alone(out, damage):
    act, message = DAMAGE[damage]
    act(out / shard_name(0))
    report = check(out)
    assert list(report.bad_shards) == [0]
    assert re.match(rf"{re.escape(str(out))}/shards/000000\.parquet.*({message})", report.bad_shards[0])


def test_one_bit_of_a_state_is_found_by_its_digest(out):
    path = out / shard_name(2)
    value = pq.read_table(path)["layer_3"][0].as_py()
    byte_flipped(path, path.read_bytes().index(value) + 5)
    assert check(out).ok
    assert re.search(r"000002\.parquet: its content's digest is \S+; \S+ wanted", check(out, deep=True).bad_shards[2])


def test_a_file_that_was_not_planned_and_a_changed_plan_are_reported_and_left(out):
    (out / "shards/notes.txt").write_text("mine")
    (out / "plan/000000.parquet").write_bytes(b"changed")
    report = check(out, repair=True)
    assert not report.ok
    assert (report.bad_shards, report.removed) == ({}, [])
    assert "shards/notes.txt was not planned; move it away" in report.other_problems[0]
    assert "000000.parquet is changed" in report.other_problems[1]
    assert (out / "shards/notes.txt").exists()


def test_a_repair_removes_bad_shards_and_the_next_build_has_only_those_to_make(out):
    untouched = (out / shard_name(0)).stat().st_ino
    rewritten(out / shard_name(1), change_a_token)
    (out / shard_name(2)).unlink()
    report = check(out, repair=True)
    assert (list(report.bad_shards), report.removed) == ([1, 2], [1])
    assert "removed 1 shards; build again" in str(report)
    assert load_manifest(Store(out)).state == "building"
    assert sorted(path.name for path in (out / "shards").iterdir()) == ["000000.parquet", "000003.parquet"]
    assert (out / shard_name(0)).stat().st_ino == untouched
    assert len(hsray.read(out)) > 0


def test_a_dataset_being_built_is_checked_for_what_is_there(ray_session, tmp_path):
    prompts = make_prompts(LENGTHS)
    store, manifest = plan_prompts(prompts, tmp_path)
    publish_shard(store, manifest, prompts, 1)
    report = check(tmp_path, deep=True)
    assert sorted(report.bad_shards) == [0, *range(2, manifest.plan.num_shards)]


def test_the_script_says_what_is_wrong_with_its_exit_status(out, tmp_path, capsys):
    assert main([str(out), "--no-progress", "--deep"]) == 0
    (out / shard_name(0)).unlink()
    assert main([str(out), "--no-progress"]) == 1
    assert "shards/000000.parquet is not there" in capsys.readouterr().out
    assert main([str(tmp_path / "nothing")]) == 1
    assert "holds no dataset with a plan" in capsys.readouterr().err


def test_a_folder_without_a_plan_is_an_error(tmp_path):
    with pytest.raises(ManifestError, match="holds no dataset with a plan; build it first"):
        check(tmp_path)
