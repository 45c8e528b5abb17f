"""A state comes back bit for bit, without a copy on the way, from a file that anything opens.

Shapes: T tokens of a prompt, S tokens of a shard, D hidden size.
"""

import gc
import io
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsray.layers import Layer
from hsray.shard import (
    ROW_GROUP_BYTES,
    ShardError,
    ShardPrompts,
    layer_columns,
    shard_schema,
    shard_table,
    to_tensor,
    write_table,
)
from tests.reference import counted_calls

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def prompts_of(lengths: Sequence[int]) -> ShardPrompts:
    return ShardPrompts(
        shard=7,
        prompt_ids=pa.array([f"p{number}" for number in range(len(lengths))], pa.string()),
        input_ids=pa.array([list(range(num_tokens)) for num_tokens in lengths], pa.list_(pa.int32())),
        loss_masks=pa.array(
            [[token % 3 == 0 for token in range(num_tokens)] for num_tokens in lengths], pa.list_(pa.bool_())
        ),
    )


def random_states(lengths: Sequence[int], layers: Sequence[Layer], hidden_size: int, dtype: torch.dtype) -> dict:
    chosen = torch.Generator().manual_seed(0)
    return {layer: torch.randn(sum(lengths), hidden_size, generator=chosen).to(dtype) for layer in layers}


def table_of(lengths: Sequence[int], states: Mapping[Layer, torch.Tensor]) -> pa.Table:
    hidden_SD = next(iter(states.values()))
    schema = shard_schema(list(states), hidden_size=hidden_SD.shape[1], dtype=name_of(hidden_SD.dtype))
    return shard_table(prompts_of(lengths), states, schema)


def file_of(table: pa.Table) -> pq.ParquetFile:
    return pq.ParquetFile(io.BytesIO(bytes_of(table)))


def bytes_of(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    write_table(table, sink)
    return sink.getvalue()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def finite_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every finite number of a 16-bit type; of float32 the special ones and many at random."""
    if dtype == torch.float32:
        special = [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800001]
        patterns = np.concatenate(
            [np.array(special, np.uint32), np.random.default_rng(0).integers(0, 2**32, 50_000, np.uint32)]
        )
        numbers = torch.from_numpy(patterns.view(np.int32)).view(dtype)
    else:
        numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    return numbers[numbers.isfinite()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_finite_number_comes_back_bit_for_bit(dtype):
    numbers = finite_numbers(dtype)
    hidden_SD = numbers[: len(numbers) // 8 * 8].view(-1, 8)
    lengths = [1, 10, len(hidden_SD) - 11]
    table = file_of(table_of(lengths, {"final": hidden_SD})).read().combine_chunks()
    for row, (num_tokens, wanted_TD) in enumerate(zip(lengths, hidden_SD.split(lengths), strict=True)):
        found_TD = to_tensor(table["layer_final"].chunk(0).slice(row, 1), table.schema.field("layer_final"), num_tokens)
        assert found_TD.dtype == dtype
        assert torch.equal(bits(found_TD), bits(wanted_TD))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.sampled_from(DTYPES), st.integers(1, 5))
def test_each_prompt_gets_its_own_rows_of_each_layer(lengths, dtype, hidden_size):
    layers: list[Layer] = ["embed", 0, 12, "final"]
    states = random_states(lengths, layers, hidden_size, dtype)
    table = file_of(table_of(lengths, states)).read().combine_chunks()
    assert layer_columns(table.schema) == {"embed": "layer_embed", 0: "layer_0", 12: "layer_12", "final": "layer_final"}
    for layer, name in layer_columns(table.schema).items():
        for row, wanted_TD in enumerate(states[layer].split(lengths)):
            found_TD = to_tensor(table[name].chunk(0).slice(row, 1), table.schema.field(name), lengths[row])
            assert torch.equal(bits(found_TD), bits(wanted_TD))


def test_ids_tokens_and_masks_come_back(tmp_path):
    lengths = [3, 1, 5]
    prompts = prompts_of(lengths)
    table = file_of(table_of(lengths, random_states(lengths, [0], 4, torch.bfloat16))).read()
    assert table["prompt_id"].to_pylist() == prompts.prompt_ids.to_pylist()
    assert table["num_tokens"].to_pylist() == lengths
    assert table["input_ids"].to_pylist() == prompts.input_ids.to_pylist()
    assert table["loss_mask"].to_pylist() == prompts.loss_masks.to_pylist()


def test_python_does_the_same_work_for_a_token_as_for_ten_thousand():
    def calls(num_tokens: int) -> int:
        lengths = [num_tokens, num_tokens, 2]
        states = random_states(lengths, [0, "final"], 4, torch.bfloat16)
        schema = shard_schema(list(states), hidden_size=4, dtype="bfloat16")
        listed = prompts_of(lengths)
        plan = pa.table(
            {
                "shard": [7],
                "prompt_id": pa.array([listed.prompt_ids.to_pylist()]),
                "input_ids": pa.array([listed.input_ids.to_pylist()], pa.list_(pa.list_(pa.int32()))),
                "loss_mask": pa.array([listed.loss_masks.to_pylist()]),
            }
        )

        def run() -> None:
            prompts = ShardPrompts.from_plan(plan, 0)
            assert [len(ids_T) for ids_T in prompts.tokens] == lengths
            write_table(shard_table(prompts, states, schema), io.BytesIO())

        run()
        return counted_calls(run)

    assert calls(10_000) == calls(1)


def test_the_table_is_a_view_of_the_captured_states():
    lengths = [3, 4]
    states = random_states(lengths, [0, "final"], 16, torch.bfloat16)
    table = table_of(lengths, states)
    for layer, name in layer_columns(table.schema).items():
        values = table[name].chunk(0).buffers()[2]
        assert (values.address, values.size) == (states[layer].data_ptr(), states[layer].nbytes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_read_is_a_view_of_arrows_memory(dtype):
    lengths = [3, 4, 2]
    table = file_of(table_of(lengths, random_states(lengths, [0], 16, dtype))).read().combine_chunks()
    column = table["layer_0"].chunk(0)
    start = column.buffers()[2].address
    for row, num_tokens in enumerate(lengths):
        hidden_TD = to_tensor(column.slice(row, 1), table.schema.field("layer_0"), num_tokens)
        assert hidden_TD.data_ptr() == start
        start += hidden_TD.nbytes


def test_a_tensor_outlives_the_table_it_was_read_from():
    lengths = [4096]
    states = random_states(lengths, [0], 512, torch.bfloat16)
    file = file_of(table_of(lengths, states))
    table = file.read().combine_chunks()
    hidden_TD = to_tensor(table["layer_0"].chunk(0).slice(0, 1), table.schema.field("layer_0"), 4096)
    in_use = pa.total_allocated_bytes()
    del table, file
    gc.collect()
    assert in_use - pa.total_allocated_bytes() < hidden_TD.nbytes
    overwriting = [pa.array(np.zeros(4096 * 256, np.int32)) for _ in range(4)]
    assert torch.equal(hidden_TD, states[0])
    del overwriting, hidden_TD
    gc.collect()
    assert in_use - pa.total_allocated_bytes() >= states[0].nbytes


def test_a_slice_of_a_table_gives_its_own_rows():
    lengths = [2, 3, 4]
    states = random_states(lengths, [0], 4, torch.float32)
    table = table_of(lengths, states).slice(1)
    for row in range(2):
        hidden_TD = to_tensor(table["layer_0"].chunk(0).slice(row, 1), table.schema.field("layer_0"), lengths[row + 1])
        assert torch.equal(hidden_TD, states[0].split(lengths)[row + 1])


def test_a_value_of_another_length_than_its_tokens_is_refused():
    table = table_of([2, 3], random_states([2, 3], [0], 4, torch.float32))
    with pytest.raises(ShardError, match=r"column 'layer_0': 48 bytes; 64 are 4 x 4 float32"):
        to_tensor(table["layer_0"].chunk(0).slice(1, 1), table.schema.field("layer_0"), 4)


def test_short_prompts_share_a_row_group_and_a_long_one_has_its_own():
    layers: list[Layer] = [0, "final"]
    tokens = ROW_GROUP_BYTES // (len(layers) * 2048 * 2)  # in one full group
    lengths = [tokens // 2, tokens // 2, 1, tokens * 2, 1, 1, tokens - 1, tokens - 1]
    table = table_of(lengths, {layer: torch.zeros(sum(lengths), 2048, dtype=torch.bfloat16) for layer in layers})
    metadata = file_of(table).metadata
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [2, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("row", "prompt_id"), [(0, "p0"), (1, "p0"), (2, "p1"), (5, "p2")])
def test_a_number_that_is_not_finite_is_refused_with_its_prompt_and_layer(number, row, prompt_id):
    states = random_states([2, 3, 1], [0, 9, "final"], 4, torch.float16)
    states[9][row, 3] = number
    message = rf"layer 9 of shard 7 has NaN or infinite numbers in 1 rows of the prompts '{prompt_id}'; .*try dtype="
    with pytest.raises(ShardError, match=message):
        table_of([2, 3, 1], states)


def test_states_with_more_or_fewer_rows_than_tokens_are_refused():
    states = random_states([2, 4], ["final"], 4, torch.float16)
    for lengths in ([2, 3], [2, 5]):
        with pytest.raises(ShardError, match=rf"'final' of shard 7: .*\[6, 4\].*\b{sum(lengths)}\b.* wanted"):
            table_of(lengths, states)


def test_states_whose_memory_is_not_row_after_row_are_refused():
    with pytest.raises(ShardError, match="layer 0 of shard 7"):
        table_of([4], {0: torch.zeros(6, 4).T})


def test_states_of_another_width_than_the_schemas_are_refused():
    schema = shard_schema([0], hidden_size=8, dtype="float32")
    with pytest.raises(ShardError, match="layer 0 of shard 7"):
        shard_table(prompts_of([2]), {0: torch.zeros(2, 4)}, schema)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_states_of_another_dtype_than_the_schemas_are_refused(dtype):
    schema = shard_schema([0], hidden_size=8, dtype="bfloat16")
    with pytest.raises(ShardError, match="layer 0 of shard 7"):
        shard_table(prompts_of([2]), {0: torch.zeros(2, 8, dtype=dtype)}, schema)


def test_states_land_in_the_column_of_their_own_layer_in_whatever_order_they_come():
    states = random_states([2], [0, "final"], 4, torch.float32)
    schema = shard_schema([0, "final"], hidden_size=4, dtype="float32")
    table = shard_table(prompts_of([2]), dict(reversed(states.items())), schema)
    found_TD = to_tensor(table["layer_0"].chunk(0).slice(0, 1), schema.field("layer_0"), 2)
    assert torch.equal(found_TD, states[0])


def test_two_writes_of_one_shard_are_the_same_bytes():
    lengths = [3, 2000, 5]
    states = random_states(lengths, [0, "final"], 64, torch.bfloat16)
    copies = {layer: hidden_SD.clone() for layer, hidden_SD in states.items()}
    assert bytes_of(table_of(lengths, states)) == bytes_of(table_of(lengths, copies))


def test_a_file_says_what_its_columns_hold():
    schema = shard_schema([9, "final"], hidden_size=4, dtype="bfloat16", metadata={"model": "org/name"})
    states = random_states([2], [9, "final"], 4, torch.bfloat16)
    found = file_of(shard_table(prompts_of([2]), states, schema)).schema_arrow
    assert found.metadata[b"hsray.model"] == b"org/name"
    for layer in ("9", "final"):
        field = found.field(f"layer_{layer}")
        assert field.type == pa.large_binary()
        assert {key: value for key, value in field.metadata.items() if key.startswith(b"hsray.")} == {
            b"hsray.layer": layer.encode(),
            b"hsray.dtype": b"bfloat16",
            b"hsray.hidden_size": b"4",
        }


def test_states_are_stored_uncompressed_as_they_are():
    lengths = [100, 200]
    states = random_states(lengths, [0], 64, torch.bfloat16)
    data = bytes_of(table_of(lengths, states))
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    assert {group.column(index).compression for index in range(group.num_columns)} == {"UNCOMPRESSED"}
    for hidden_TD in states[0].split(lengths):
        assert bits(hidden_TD).numpy().tobytes() in data


READERS = """
import json, sys
path, expected = sys.argv[1:]
import duckdb, pandas, polars, pyarrow.parquet as pq, torch

wanted = torch.load(expected)

def rebuild(value, dtype, hidden_size):
    return torch.frombuffer(bytearray(value), dtype=getattr(torch, dtype)).view(-1, int(hidden_size))

def check(name, rows, dtype, hidden_size):
    found = [[rebuild(value, dtype, hidden_size) for value in row] for row in rows]
    same = all(
        a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))
        for row, wanted_row in zip(found, wanted, strict=True) for a, b in zip(row, wanted_row, strict=True)
    )
    print(json.dumps([name, same]))

columns = ["layer_9", "layer_final"]
table = pq.read_table(path)
about = table.schema.field("layer_9").metadata
check("pyarrow", zip(*[table[name].to_pylist() for name in columns]), about[b"hsray.dtype"].decode(), about[b"hsray.hidden_size"])

frame, file = pandas.read_parquet(path), pq.read_metadata(path).metadata
check("pandas", frame[columns].itertuples(index=False), file[b"hsray.dtype"].decode(), file[b"hsray.hidden_size"])

rows = duckdb.sql(f"SELECT layer_9, layer_final FROM '{path}'").fetchall()
file = dict(duckdb.sql(f"SELECT key, value FROM parquet_kv_metadata('{path}')").fetchall())
check("DuckDB", rows, file[b"hsray.dtype"].decode(), file[b"hsray.hidden_size"])

file = polars.read_parquet_metadata(path)
check("Polars", polars.read_parquet(path).select(columns).rows(), file["hsray.dtype"], file["hsray.hidden_size"])

assert "hsray" not in sys.modules
"""


def test_a_shard_opens_in_four_readers_that_know_nothing_of_hsray(tmp_path: Path):
    lengths = [3, 700, 1]
    states = random_states(lengths, [9, "final"], 64, torch.bfloat16)
    about = {"dtype": "bfloat16", "hidden_size": "64"}
    schema = shard_schema([9, "final"], hidden_size=64, dtype="bfloat16", metadata=about)
    path = tmp_path / "000007.parquet"
    with path.open("wb") as file:
        write_table(shard_table(prompts_of(lengths), states, schema), file)
    split = [hidden_SD.split(lengths) for hidden_SD in states.values()]
    torch.save([[hidden_TD.clone() for hidden_TD in row] for row in zip(*split, strict=True)], tmp_path / "states.pt")
    command = [sys.executable, "-c", READERS, str(path), str(tmp_path / "states.pt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [["pyarrow", True], ["pandas", True], ["DuckDB", True], ["Polars", True]]


def test_no_extension_type_is_on_disk():
    data = bytes_of(table_of([2], random_states([2], [0], 4, torch.bfloat16)))
    for field in pq.read_schema(io.BytesIO(data)):
        assert not isinstance(field.type, pa.BaseExtensionType)
        assert b"ARROW:extension:name" not in (field.metadata or {})
