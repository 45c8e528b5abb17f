"""States in eight bits are within their rounding of what they were, wherever they go.

Shapes: T tokens of a prompt, D hidden size.
"""

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hsray
from hsray.float8 import LARGEST, from_float8, to_float8
from hsray.manifest import ManifestError, load_manifest
from hsray.report import BuildReport
from hsray.shard import ShardError
from hsray.store import Store
from tests.builds import build_tiny, unique_prompts
from tests.synthetic import LENGTHS, make_prompts, write_dataset

WIDTH = 256
BUILT = {
    "dataset": unique_prompts(8, longest=30),
    "shard_bytes": 1 << 14,
    "dtype": "float8_e4m3",
    "layers": [1, 5, "final"],
    "file_format": "arrow",
}


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    return make_prompts(LENGTHS, hidden_size=WIDTH)


@given(st.integers(0, 2**32), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), st.floats(-30, 30))
def test_each_number_is_off_by_its_rounding_alone(seed, dtype, exponent):
    numbers = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    hidden_SD = numbers.clamp(-6e4, 6e4).to(dtype)
    stored_SD, scale_S, rounding = to_float8(hidden_SD)
    found_SD = from_float8(stored_SD.view(torch.float8_e4m3fn), scale_S, torch.float32)
    off_SD = (found_SD - hidden_SD.float()).abs()
    # Half of a unit in the last place: of three bits of mantissa, or of the smallest numbers, 2^-9.
    allowed_SD = torch.maximum(hidden_SD.float().abs() / 16, scale_S[:, None] / 1024)
    assert (off_SD <= allowed_SD * 1.0001).all()
    of_token = off_SD.norm(dim=1) / hidden_SD.float().norm(dim=1).clamp_min(1e-38)
    assert rounding.mean == pytest.approx(of_token.mean().item(), abs=1e-5)
    assert rounding.worst == pytest.approx(of_token.max().item(), abs=1e-5)


def test_zeros_the_smallest_and_the_largest_numbers_are_finite():
    for value in (0.0, 1e-45, 1e-38, 3e38):
        hidden_SD = torch.full((2, 3), value)
        stored_SD, scale_S, _ = to_float8(hidden_SD)
        found_SD = from_float8(stored_SD.view(torch.float8_e4m3fn), scale_S, torch.float32)
        assert found_SD.isfinite().all()
        assert torch.allclose(found_SD, hidden_SD, rtol=1e-5, atol=1e-37)
    [[largest]], _, _ = to_float8(torch.tensor([[7.0]]))
    assert largest.view(torch.float8_e4m3fn).float() == LARGEST


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_a_dataset_of_half_the_size_reads_as_bfloat16(tmp_path, prompts, file_format):
    write_dataset(prompts, tmp_path / "whole", file_format=file_format)
    write_dataset(prompts, tmp_path / "half", file_format=file_format, stored_dtype="float8_e4m3")
    sizes = [sum(load_manifest(Store(tmp_path / name)).shard_file_bytes) for name in ("half", "whole")]
    assert sizes[0] < 0.6 * sizes[1]
    for found, exact, wanted in zip(
        hsray.read(tmp_path / "half"), hsray.read(tmp_path / "half", dtype="float32"), prompts, strict=True
    ):
        for layer, wanted_TD in wanted["hidden_states"].items():
            found_TD, exact_TD = found["hidden_states"][layer], exact["hidden_states"][layer]
            assert (found_TD.dtype, exact_TD.dtype) == (torch.bfloat16, torch.float32)
            assert torch.equal(found_TD, exact_TD.bfloat16())
            off_T = (exact_TD - wanted_TD.float()).norm(dim=1) / wanted_TD.float().norm(dim=1)
            assert 0.005 < off_T.mean() < 0.04
            stored_TD, scale_T, _ = to_float8(wanted_TD)
            assert torch.equal(exact_TD, from_float8(stored_TD.view(torch.float8_e4m3fn), scale_T, torch.float32))
    batch = next(iter(hsray.read(tmp_path / "half", layers=[3]).stream(batch_tokens=5)))
    assert torch.equal(batch["hidden_states"][3][0], hsray.read(tmp_path / "half")[0]["hidden_states"][3])


def test_a_reader_gives_another_dtype_if_asked(tmp_path, prompts):
    write_dataset(prompts, tmp_path)
    found = hsray.read(tmp_path, dtype="float32")[5]["hidden_states"][3]
    assert torch.equal(found, prompts[5]["hidden_states"][3].float())
    with pytest.raises(ValueError, match="dtype='float64'; wanted 'bfloat16', 'float16', 'float32', or none"):
        hsray.read(tmp_path, dtype="float64")


def test_the_columns_say_what_they_are(tmp_path, prompts):
    write_dataset(prompts, tmp_path, stored_dtype="float8_e4m3")
    table = hsray.read(tmp_path, layers=[3]).to_arrow(5)
    assert table.column_names == ["prompt_id", "num_tokens", "input_ids", "loss_mask", "layer_3", "scale_3"]
    assert table.schema.field("layer_3").metadata[b"hsray.dtype"] == b"float8_e4m3"
    assert table.schema.field("scale_3").type == pa.list_(pa.float32())
    assert (len(table["layer_3"][0].as_py()), len(table["scale_3"][0])) == (80 * WIDTH, 80)


def test_a_prompt_that_is_not_finite_is_named_before_it_is_rounded(tmp_path):
    prompts = make_prompts(LENGTHS)
    prompts[3]["hidden_states"][3][1, 5] = float("nan")
    with pytest.raises(
        ShardError, match="layer 3 of shard 0 has NaN or infinite numbers in 1 rows of the prompts 'p3'"
    ):
        write_dataset(prompts, tmp_path, stored_dtype="float8_e4m3")


@pytest.fixture(scope="module")
def built(ray_session, tiny_llama, tmp_path_factory) -> BuildReport:
    """Of a build in eight bits and Arrow files, as `BUILT` asks for."""
    return build_tiny(tiny_llama, **BUILT, out=tmp_path_factory.mktemp("built") / "out")


def test_a_build_makes_arrow_files_and_knows_them_again(built, tiny_llama):
    assert built.new_shards == built.shards == len(list(Path(built.out).glob("shards/*.arrow")))
    assert hsray.check(built.out, deep=True, progress=False).ok
    assert build_tiny(tiny_llama, **BUILT, out=built.out).new_shards == 0
    with pytest.raises(ManifestError, match="file_format: the dataset has 'arrow', this build asks for 'parquet'"):
        build_tiny(tiny_llama, **(BUILT | {"file_format": "parquet"}), out=built.out)


def test_a_build_in_eight_bits_says_how_far_off_it_is_and_is_right(built, one_thread, tmp_path):
    assert list(built.rounding) == ["1", "5", "final"]
    assert all(0.01 < rounding.mean < rounding.worst < 0.06 for rounding in built.rounding.values())
    assert sum(rounding.num_tokens for rounding in built.rounding.values()) == 3 * built.tokens
    assert "layer final in eight bits: off by 2." in str(built)
    found = hsray.verify(built.out, sample=8)
    assert found.right, str(found)
    assert all(0.01 < layer.mean_error < 0.05 for layer in found.layers)
    hsray.export(built.out, "safetensors", to=tmp_path / "exported", progress=False)
    assert len(list((tmp_path / "exported").rglob("*.safetensors"))) == built.prompts
