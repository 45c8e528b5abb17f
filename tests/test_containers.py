"""A dataset is the same in Parquet and in Arrow files, and goes from one to the other digest by digest."""

import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch

import hsray
from hsray.converter import ConvertReport
from hsray.manifest import ManifestError, load_manifest
from hsray.shard import ShardError
from hsray.store import Store
from pipelines.convert import main
from tests.synthetic import LAYERS, LENGTHS, assert_same, make_prompts, write_dataset
from tests.test_hostile import FUZZ, with_manifest
from tests.test_reader import WatchedFileSystem


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    return make_prompts(LENGTHS)


@pytest.fixture
def out(prompts, tmp_path) -> Path:
    """A dataset of Arrow files."""
    write_dataset(prompts, tmp_path / "arrow", file_format="arrow")
    return tmp_path / "arrow"


@pytest.mark.parametrize("where", ["local", "memory://test_containers"])
def test_every_prompt_of_arrow_files_is_read_as_it_was_stored(tmp_path, prompts, where):
    target = tmp_path if where == "local" else where
    write_dataset(prompts, target, file_format="arrow")
    assert min(Store(target).list("shards")) == "000000.arrow"
    dataset = hsray.read(target)
    for index, prompt in enumerate(prompts):
        assert_same(dataset[index], prompt)
    streamed = list(dataset.stream(batch_tokens=sum(LENGTHS)))
    for layer in LAYERS:
        wanted_SD = torch.cat([prompt["hidden_states"][layer] for prompt in prompts])
        assert torch.equal(streamed[0]["hidden_states"][layer][0], wanted_SD)


def test_an_arrow_file_has_a_record_batch_a_prompt_and_the_schema_of_parquet(out, prompts, tmp_path):
    write_dataset(prompts, tmp_path / "parquet")
    file = pa.ipc.open_file(str(out / "shards/000000.arrow"))
    assert file.num_record_batches == load_manifest(Store(out)).plan.shard_prompts[0]
    assert {file.get_batch(number).num_rows for number in range(file.num_record_batches)} == {1}
    parquet = hsray.read(tmp_path / "parquet").open_shard(0).schema
    assert [(f.name, f.type, f.metadata) for f in file.schema] == [(f.name, f.type, f.metadata) for f in parquet]
    assert set(file.schema.metadata) == set(parquet.metadata)
    assert file.schema.metadata[b"hsray.digest"] == parquet.metadata[b"hsray.digest"]


def test_states_of_arrow_files_are_the_files_pages_and_a_readers_own(out, prompts):
    before = (out / "shards/000001.arrow").read_bytes()
    dataset = hsray.read(out)
    hidden_TD = dataset[5]["hidden_states"]["final"]
    ranges = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".arrow")]
    ends = [[int(end, 16) for end in fields[0].split("-")] for fields in ranges]
    assert any(start <= hidden_TD.data_ptr() < end for start, end in ends)
    hidden_TD.zero_()
    assert (out / "shards/000001.arrow").read_bytes() == before
    assert_same(hsray.read(out)[5], prompts[5])


def test_of_arrow_files_elsewhere_only_the_record_batch_and_the_columns_asked_for_are_read(tmp_path):
    layer_bytes = 4096 * 1024 * 2
    prompts = make_prompts([4096, 4096, 4096], hidden_size=1024)
    write_dataset(prompts, tmp_path, shard_tokens=3 * 4096, file_format="arrow")
    for layers in ([], ["final"], [3, "final"]):
        dataset = hsray.read(f"watched://{tmp_path}", layers=layers)
        before = WatchedFileSystem.num_read
        dataset[1]
        read_bytes = WatchedFileSystem.num_read - before
        assert len(layers) * layer_bytes <= read_bytes < (len(layers) + 0.1) * layer_bytes


def hostile(out: Path, change: Callable[[pa.Schema, list], tuple[pa.Schema, list]], **options: object) -> None:
    """Writes the first shard again, changed, with a manifest that says it is right."""
    path = out / "shards/000000.arrow"
    file = pa.ipc.open_file(pa.py_buffer(path.read_bytes()))
    schema, batches = change(file.schema, [file.get_batch(number) for number in range(file.num_record_batches)])
    with pa.ipc.new_file(str(path), schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    with_manifest(out, "shard_file_bytes", 0, to=path.stat().st_size)


def with_an_extension(schema: pa.Schema, batches: list) -> tuple[pa.Schema, list]:
    about = {b"ARROW:extension:name": b"ray.data.arrow_tensor", b"ARROW:extension:metadata": b"\x80"}
    field = schema.field("layer_3")
    schema = schema.set(5, field.with_metadata({**field.metadata, **about}))
    return schema, [pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in batches]


def unchanged(schema: pa.Schema, batches: list) -> tuple[pa.Schema, list]:
    return schema, batches


def two_in_one(schema: pa.Schema, batches: list) -> tuple[pa.Schema, list]:
    both = pa.Table.from_batches(batches[:2]).combine_chunks().to_batches()
    return schema, [*both, *batches[2:], batches[0]]


HOSTILE = {
    "compressed": (unchanged, {"compression": "zstd"}, "record batch 0 is compressed"),
    "an extension type": (with_an_extension, {}, "an extension type"),
    "two prompts in one": (two_in_one, {}, "record batch 0 holds 2 prompts; 1 wanted"),
    "a prompt less": (lambda schema, batches: (schema, batches[1:]), {}, r"holds \d+ prompts; the plan says"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_arrow_file_that_is_not_what_it_claims_is_refused(out, name):
    change, options, message = HOSTILE[name]
    hostile(out, change, **options)
    with pytest.raises(ShardError, match=rf"{re.escape(str(out))}/shards/000000\.arrow.*{message}"):
        hsray.read(out)[0]


def test_offsets_that_overrun_their_values_are_refused(out):
    path, num_bytes = out / "shards/000000.arrow", LENGTHS[0] * 16 * 2
    data, offsets = path.read_bytes(), struct.pack("<qq", 0, num_bytes)
    assert data.count(offsets) >= len(LAYERS)
    path.write_bytes(data.replace(offsets, struct.pack("<qq", 1 << 40, (1 << 40) + num_bytes)))
    with pytest.raises(ShardError, match=r"000000\.arrow is damaged: .*out of bounds"):
        hsray.read(out)[0]


def test_any_bytes_give_an_error_of_ours_or_rows_of_the_right_shape(tmp_path):
    write_dataset(make_prompts([5, 1, 3]), tmp_path, shard_tokens=1000, file_format="arrow")
    script = FUZZ.replace("000000.parquet", "000000.arrow")
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert 25 < int(ended.stdout) < 250


def test_arrow_files_are_never_compressed():
    with pytest.raises(ValueError, match="compression='zstd:1' with file_format='arrow'.*leave one of them out"):
        hsray.convert("x", to="y", file_format="arrow", compression="zstd:1")
    with pytest.raises(ValueError, match="file_format='csv'; wanted 'parquet' or 'arrow'"):
        hsray.convert("x", to="y", file_format="csv")


def converted(out: Path, to: Path, **options: object) -> ConvertReport:
    return hsray.convert(out, to=to, progress=False, **options)


def test_a_dataset_goes_through_every_container_and_stays_as_it_is(ray_session, tmp_path, prompts):
    write_dataset(prompts, tmp_path / "0")
    for number, options in enumerate(
        [{"compression": "zstd:1"}, {"file_format": "arrow"}, {"file_format": "parquet"}], start=1
    ):
        report = converted(tmp_path / str(number - 1), tmp_path / str(number), **options)
        assert report.new_shards == report.shards == 4
        assert hsray.check(str(tmp_path / str(number)), deep=True, progress=False).ok
        for found, wanted in zip(hsray.read(tmp_path / str(number)), prompts, strict=True):
            assert_same(found, wanted)
    manifests = [load_manifest(Store(tmp_path / str(number))) for number in range(4)]
    assert len({manifest.shard_digests for manifest in manifests}) == 1
    assert manifests[0] == manifests[3]
    for path in (tmp_path / "0/plan").iterdir():
        assert (tmp_path / "3" / path.relative_to(tmp_path / "0")).read_bytes() == path.read_bytes()


def test_a_conversion_goes_on_where_it_ended(ray_session, out, tmp_path, capsys):
    to = tmp_path / "parquet"
    converted(out, to)
    whole = {path.name: path.read_bytes() for path in to.rglob("*.*")}
    load_manifest(Store(to)).reopened().save(Store(to))
    (to / "shards/000002.parquet").unlink()
    kept = (to / "shards/000001.parquet").stat().st_ino
    assert main([str(out), "--to", str(to), "--no-progress"]) == 0
    assert "4 shards, 1 of them written in this run" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in to.rglob("*.*")} == whole
    assert (to / "shards/000001.parquet").stat().st_ino == kept
    assert main([str(out), "--to", str(to), "--no-progress", "--compression", "zstd:3"]) == 1
    assert "compression: the dataset has 'none', this build asks for 'zstd:3'" in capsys.readouterr().err


def test_what_is_not_whole_is_not_converted(ray_session, out, tmp_path):
    damaged = shutil.copytree(out, tmp_path / "damaged")
    path = damaged / "shards/000001.arrow"
    data = bytearray(path.read_bytes())
    place = data.index(hsray.read(out)[5]["hidden_states"][3].view(torch.uint8).numpy().tobytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardError, match=r"000001\.arrow: its content's digest is .*; .* wanted"):
        converted(damaged, tmp_path / "to")
    load_manifest(Store(damaged)).reopened().save(Store(damaged))
    with pytest.raises(ManifestError, match="holds no complete dataset"):
        converted(damaged, tmp_path / "other")
