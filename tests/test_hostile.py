"""A dataset from a stranger runs no code, takes no memory for what it only claims, and gives no wrong rows."""

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hsray
from hsray.manifest import ManifestError
from hsray.plan import shard_name
from hsray.shard import ShardError
from tests.synthetic import HIDDEN_SIZE, LENGTHS, make_prompts, write_dataset


@pytest.fixture
def out(tmp_path) -> Path:
    """A finished dataset of one shard, which a test may change at will, as a stranger can."""
    write_dataset(make_prompts(LENGTHS), tmp_path, shard_tokens=1000)
    return tmp_path


def hostile(out: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Writes the shard again, changed, with a manifest that says it is right."""
    path = out / shard_name(0)
    table = change(pq.read_table(path))
    pq.write_table(table, path)
    with_manifest(out, "shard_file_bytes", 0, to=path.stat().st_size)


def with_manifest(out: Path, *place: str | int, to: object) -> None:
    path = out / "manifest.json"
    content = json.loads(path.read_text())
    inner = content
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = to
    path.write_text(json.dumps(content))


def with_values(name: str, values: Callable[[list], list]) -> Callable[[pa.Table], pa.Table]:
    """A table with a column's values changed, of the type that it has."""

    def change(table: pa.Table) -> pa.Table:
        field = table.schema.field(name)
        column = pa.array(values(table[name].to_pylist()), field.type)
        return table.set_column(table.schema.get_field_index(name), field, column)

    return change


def with_field(name: str, field: Callable[[pa.Field], pa.Field]) -> Callable[[pa.Table], pa.Table]:
    """A table with a column of another type, or that says something else of itself."""

    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index(name)
        schema = table.schema.set(index, field(table.schema.field(name)))
        return table.set_column(index, schema.field(index), table[name].cast(schema.field(index).type)).cast(schema)

    return change


def of_width(hidden_size: int) -> Callable[[pa.Field], pa.Field]:
    return lambda field: field.with_metadata({**field.metadata, b"hsray.hidden_size": str(hidden_size).encode()})


def with_bad_utf8(table: pa.Table) -> pa.Table:
    ids = pa.array([b"\xf0("] * len(table), pa.binary()).view(pa.string())
    return table.set_column(table.schema.get_field_index("prompt_id"), table.schema.field("prompt_id"), ids)


HOSTILE = {
    "a width of half": (with_field("layer_3", of_width(HIDDEN_SIZE // 2)), "column 'layer_3'.*wanted"),
    "a width below nothing": (with_field("layer_3", of_width(-1)), "column 'layer_3'.*wanted"),
    "no width": (with_field("layer_3", lambda field: field.remove_metadata()), "column 'layer_3'.*wanted"),
    "another type": (
        with_field("prompt_id", lambda field: field.with_type(pa.large_binary())),
        "column 'prompt_id': large_binary",
    ),
    "nulls": (with_field("layer_3", lambda field: field.with_nullable(True)), "column 'layer_3'"),
    "a column less": (lambda table: table.drop_columns(["layer_3"]), "has the columns"),
    "a column more": (lambda table: table.append_column("layer_4", table["layer_3"]), "has the columns"),
    "a negative length": (
        with_values("num_tokens", lambda values: [-1, *values[1:]]),
        "5 values; -1 are a prompt's of -1 tokens",
    ),
    "a length that overruns": (
        with_values("num_tokens", lambda values: [2**31 - 1, *values[1:]]),
        "are a prompt's of 2147483647 tokens",
    ),
    "rows that make up for each other": (
        with_values("layer_3", lambda values: [values[0][:-32], values[1] + values[0][-32:], *values[2:]]),
        "column 'layer_3': 128 bytes; 160 are",
    ),
    "tokens less": (
        with_values("input_ids", lambda values: [values[0][1:], *values[1:]]),
        "column 'input_ids': 4 values",
    ),
    "masks more": (
        with_values("loss_mask", lambda values: [values[0] * 2, *values[1:]]),
        "column 'loss_mask': 10 values; 5 are",
    ),
    "an id of half a character": (with_bad_utf8, "is damaged: .*UTF8"),
    "prompts less": (lambda table: table.slice(1), "holds 9 prompts; the plan says 10"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_shard_that_is_not_what_it_claims_is_refused(out, name):
    change, message = HOSTILE[name]
    hostile(out, change)
    with pytest.raises(ShardError, match=rf"{re.escape(str(out))}/shards/000000\.parquet.*{message}"):
        hsray.read(out)[0]


MANIFESTS = {
    "a plan file elsewhere": (("plan", "files", 0, "name"), "../../etc/passwd"),
    "a plan file at the root": (("plan", "files", 0, "name"), "/etc/passwd"),
    "a plan file on another target": (("plan", "files", 0, "name"), "s3://bucket/x"),
    "a layer elsewhere": (("identity", "layers", 1), "../../x"),
    "a layer out of range": (("identity", "layers", 1), 6),
    "a type that is not known": (("identity", "dtype"), "object"),
    "a negative width": (("identity", "hidden_size"), -16),
    "a count beyond 64 bits": (("plan", "shard_tokens", 0), 1 << 70),
    "a count of words": (("plan", "shard_prompts", 0), "10"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_points_elsewhere_or_claims_nonsense_is_refused(out, name):
    place, value = MANIFESTS[name]
    with_manifest(out, *place, to=value)
    with pytest.raises(ManifestError, match=r"manifest\.json is damaged"):
        hsray.read(out)


def test_a_manifest_without_a_bottom_is_refused(out):
    (out / "manifest.json").write_text('{"format": ' + "[" * 200_000)
    with pytest.raises(ManifestError, match="is damaged"):
        hsray.read(out)


@pytest.mark.parametrize("compression", ["none", "zstd:1"])
def test_a_small_file_that_claims_gigabytes_is_refused_before_they_are_allocated(tmp_path, compression):
    write_dataset(make_prompts([5]), tmp_path, compression=compression)
    with_manifest(tmp_path, "plan", "shard_tokens", 0, to=10**10 // (2 * HIDDEN_SIZE))
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(ShardError, match=r"of \d+ bytes claims 1 prompts, 312500000 tokens of 32 bytes"):
        hsray.read(tmp_path)[0]
    assert pa.default_memory_pool().max_memory() - before < 1 << 20


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


EXTENSIONS = [
    "ray.data.arrow_tensor",
    "ray.data.arrow_tensor_v2",
    "ray.data.arrow_pickled_object",
    "arrow.py_extension_type",
]

READ_EACH = """
import sys, ray.data, hsray
for out in sys.argv[1:]:
    try:
        hsray.read(out)[0]
    except ValueError as error:
        print("an extension type" in str(error))
"""


def test_extension_types_are_refused_and_their_pickles_stay_closed(tmp_path):
    blown = tmp_path / "blown"
    outs = [str(tmp_path / name) for name in EXTENSIONS]
    for name, out in zip(EXTENSIONS, outs, strict=True):
        write_dataset(make_prompts([5, 1]), out)
        about = {b"ARROW:extension:name": name.encode(), b"ARROW:extension:metadata": pickle.dumps(Bomb(str(blown)))}
        hostile(
            Path(out),
            with_field("layer_3", lambda field, about=about: field.with_metadata({**field.metadata, **about})),
        )
    ended = subprocess.run([sys.executable, "-c", READ_EACH, *outs], capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("True\n" * len(outs), 0), ended.stderr
    assert not blown.exists()


FUZZ = """
import random, resource, sys
import hsray, torch
from hsray.shard import ShardError

used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), used + (4 << 30)))
chosen = random.Random(0)
for out in sys.argv[1:]:
    refused, path = 0, out + "/shards/000000.parquet"
    whole = open(path, "rb").read()
    wanted = [{layer: t.shape for layer, t in prompt["hidden_states"].items()} for prompt in hsray.read(out)]
    for _ in range(250):
        data = bytearray(whole)
        for _ in range(chosen.choice([1, 1, 2, 8])):
            data[chosen.randrange(len(data))] = chosen.randrange(256)
        open(path, "wb").write(data)
        try:
            for prompt, shapes in zip(hsray.read(out), wanted, strict=True):
                assert {layer: t.shape for layer, t in prompt["hidden_states"].items()} == shapes
                assert len(prompt["input_ids"]) == len(prompt["loss_mask"]) == shapes["final"][0]
        except ShardError:
            refused += 1
    print(refused)
"""


def test_any_bytes_give_an_error_of_ours_or_rows_of_the_right_shape(tmp_path):
    outs = [str(tmp_path / compression) for compression in ("none", "zstd:1")]
    for out in outs:
        write_dataset(make_prompts([5, 1, 3]), out, shard_tokens=1000, compression=Path(out).name)
    ended = subprocess.run([sys.executable, "-c", FUZZ, *outs], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert [25 < int(refused) < 250 for refused in ended.stdout.split()] == [True, True]


FLIPPING = """
import sys
from pathlib import Path
from hsray.manifest import load_manifest
from hsray.shard import ShardError
from hsray.shard_file import ShardFile
from hsray.store import Store

store = Store(sys.argv[1])
expected, path = load_manifest(store).expected(0), Path(store.path("shards/000000.parquet"))

def content():
    file = ShardFile(store, expected)
    return [file.column(name) for name in file.schema.names]

whole, right = path.read_bytes(), content()
footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
flips = [(place, 1 << bit) for place in range(footer, len(whole) - 8) for bit in range(8)]
said = []
for place, bit in flips[:: int(sys.argv[2])]:
    path.unlink()  # what is open stays as it is
    path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1:])
    try:
        assert content() == right, (place, bit)
    except ShardError as error:
        said.append(str(error))
print(len(said), sum("histogram size mismatch" in words for words in said))
"""


def test_a_flipped_bit_of_a_footer_is_damage_or_does_no_harm(out):
    """PyArrow 26 ends the process over one of some 1,000, if it is asked for a column chunk by itself."""
    done = subprocess.run([sys.executable, "-c", FLIPPING, out, "3"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-1000:]
    num_damaged, num_histograms = map(int, done.stdout.split())
    assert num_damaged > 1000 and num_histograms > 1
