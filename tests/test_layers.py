"""A layer is named once, means one place in the model, and comes out in depth order."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsray.layers import PRESETS, boundary, column_name, resolve_layers


@pytest.mark.parametrize(("num_layers", "blocks"), [(32, [1, 15, 28]), (36, [1, 17, 32]), (61, [1, 29, 57])])
def test_eagle3_is_what_enters_blocks_2_half_and_third_from_the_end(num_layers, blocks):
    layers = resolve_layers("eagle3", num_layers=num_layers)
    assert layers == (*blocks, "final")
    entered = [boundary(layer, num_layers=num_layers) for layer in layers]
    assert entered == [2, num_layers // 2, num_layers - 3, None]


@pytest.mark.parametrize(("num_layers", "blocks"), [(32, [2, 16, 29]), (36, [2, 18, 33]), (61, [2, 30, 58])])
def test_speculators_v1_is_what_leaves_blocks_2_half_and_third_from_the_end(num_layers, blocks):
    assert resolve_layers("speculators-v1", num_layers=num_layers) == (*blocks, "final")


def test_sglang_counts_the_block_that_is_entered():
    layers = resolve_layers("speculators-v1", num_layers=61)
    assert [boundary(layer, num_layers=61) for layer in layers] == [3, 31, 59, None]


def test_boundary_counts_from_embed_to_the_final_norm():
    layers = resolve_layers(["final", 3, 0, "embed"], num_layers=4)
    assert [boundary(layer, num_layers=4) for layer in layers] == [0, 1, 4, None]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_in_a_list_of_one_is_the_preset(preset):
    assert resolve_layers([preset], num_layers=32) == resolve_layers(preset, num_layers=32)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_three_blocks_in_order_and_final(preset):
    for num_layers in range(7, 200):
        *blocks, last = resolve_layers(preset, num_layers=num_layers)
        assert blocks == sorted({*blocks})
        assert (len(blocks), last) == (3, "final")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("num_layers", range(1, 7))
def test_a_preset_of_a_model_too_shallow_for_it_is_an_error(preset, num_layers):
    with pytest.raises(ValueError, match=f"layers='{preset}' needs a deeper model: {num_layers} blocks"):
        resolve_layers(preset, num_layers=num_layers)


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        (0, (0,)),
        ([35], (35,)),
        (-1, (35,)),
        ([-36], (0,)),
        ("embed", ("embed",)),
        ("final", ("final",)),
        ([-1, "final"], (35, "final")),
        (["final", -1, 9, "embed", 0], ("embed", 0, 9, 35, "final")),
        ((10, 9), (9, 10)),
        ("9", (9,)),
        (["-1", "9", "final"], (9, 35, "final")),
    ],
)
def test_layers_come_out_in_depth_order_with_ends_counted(spec, layers):
    assert resolve_layers(spec, num_layers=36) == layers


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "layers is empty; name at least one"),
        (36, "layer 36 is out of range: the model has 36 blocks, so 0..35 (or -36..-1)"),
        ([0, -37], "layer -37 is out of range"),
        ("36", "layer 36 is out of range"),
        (
            "last",
            "layer 'last' is not known; wanted 0..35, 'embed', 'final', or alone one of 'eagle3', 'speculators-v1'",
        ),
        ("", "layer '' is not known"),
        ("9,final", "layer '9,final' is not known"),
        (["1.0"], "layer '1.0' is not known"),
        (["eagle3", 9], "layer 'eagle3' is not known"),
        ([9, 9], "layer 9 is named twice in [9, 9] (N=36)"),
        ([35, -1], "layer 35 is named twice in [35, -1]"),
        (["9", 9], "layer 9 is named twice"),
        (["final", 3, "final"], "layer 'final' is named twice"),
    ],
)
def test_what_names_no_layer_or_one_twice_is_an_error(spec, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_layers(spec, num_layers=36)


@pytest.mark.parametrize("spec", [[1.7], [None], [[1, 2]]])
def test_what_is_neither_an_integer_nor_a_name_is_not_rounded_to_one(spec):
    with pytest.raises((ValueError, TypeError)):
        resolve_layers(spec, num_layers=36)


NAMES = st.one_of(st.integers(-20, 19), st.sampled_from(["embed", "final"]))


@given(st.lists(NAMES, min_size=1, max_size=8, unique_by=lambda name: name % 20 if isinstance(name, int) else name))
def test_the_order_and_the_spelling_of_names_change_nothing(names):
    layers = resolve_layers(names, num_layers=20)
    assert len(layers) == len(names)
    assert layers == resolve_layers(names[::-1], num_layers=20)
    assert layers == resolve_layers([str(name) for name in names], num_layers=20)
    assert layers == resolve_layers(layers, num_layers=20)
    entered = [boundary(layer, num_layers=20) for layer in layers if layer != "final"]
    assert entered == sorted(entered)


def test_columns_are_named_by_layer():
    assert [column_name(layer) for layer in ("embed", 0, 12, "final")] == [
        "layer_embed",
        "layer_0",
        "layer_12",
        "layer_final",
    ]
