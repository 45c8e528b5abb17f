"""A layer is named once, means one place in the model, and comes out in depth order."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsray.layers import PRESETS, SYSTEMS, boundary, column_name, explain, resolve_layers


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


@pytest.mark.parametrize("preset", [*PRESETS, "dflash:5", "0:32:4"])
def test_a_preset_in_a_list_of_one_is_the_preset(preset):
    assert resolve_layers([preset], num_layers=32) == resolve_layers(preset, num_layers=32)


DRAFTER_PRESETS = ["eagle3", "speculators-v1"]


@pytest.mark.parametrize("preset", DRAFTER_PRESETS)
def test_a_preset_is_three_blocks_in_order_and_final(preset):
    for num_layers in range(7, 200):
        *blocks, last = resolve_layers(preset, num_layers=num_layers)
        assert blocks == sorted({*blocks})
        assert (len(blocks), last) == (3, "final")


@pytest.mark.parametrize("preset", [*DRAFTER_PRESETS, "dflash:5"])
@pytest.mark.parametrize("num_layers", range(1, 7))
def test_a_preset_of_a_model_too_shallow_for_it_is_an_error(preset, num_layers):
    with pytest.raises(ValueError, match=f"layers='{preset}' needs a deeper model: {num_layers} blocks"):
        resolve_layers(preset, num_layers=num_layers)


@pytest.mark.parametrize(
    ("count", "num_layers", "blocks"),
    [
        (5, 36, [1, 9, 17, 25, 33]),
        (5, 28, [1, 7, 13, 19, 25]),
        (1, 36, [18]),
        (2, 36, [1, 33]),
        (6, 32, [1, 7, 12, 18, 23, 29]),
    ],
)
def test_dflash_layers_are_those_of_its_own_checkpoints_and_final(count, num_layers, blocks):
    assert resolve_layers(f"dflash:{count}", num_layers=num_layers) == (*blocks, "final")


def test_all_is_every_state_there_is():
    assert resolve_layers("all", num_layers=3) == ("embed", 0, 1, 2, "final")
    assert resolve_layers("all", num_layers=1) == ("embed", 0, "final")


@given(
    st.tuples(*[st.one_of(st.none(), st.integers(-36, 36))] * 2, st.one_of(st.none(), st.integers(1, 40))).filter(
        lambda parts: range(36)[slice(*parts)]
    )
)
def test_a_range_is_the_blocks_that_python_slices(parts):
    start, stop, step = ("" if part is None else str(part) for part in parts)
    assert resolve_layers(f"{start}:{stop}:{step}", num_layers=36) == tuple(range(36)[slice(*parts)])
    if not step:
        assert resolve_layers([f"{start}:{stop}"], num_layers=36) == tuple(range(36)[slice(*parts)])


def test_ranges_stand_beside_other_layers():
    assert resolve_layers(["0:36:12", -1, "embed", "final"], num_layers=36) == ("embed", 0, 12, 24, 35, "final")


#: Every EAGLE-3 default of a trainer, as that trainer numbers it: all but speculators' first format name one set of states.
EAGLE3_DEFAULTS = {
    "EAGLE: block entered": [2, 18, 33],
    "vLLM: eagle_aux_hidden_state_layer_ids": [2, 18, 33],
    "speculators from v0.5: target_layer_ids": [2, 18, 33],
    "SpecForge, TorchSpec: aux layer ids": [1, 17, 32],
    "Model-Optimizer, HF dump: --aux-layers": [1, 17, 32],
}


def numbers_of(text: str, system: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(system)]
    return line.removeprefix(system).split()


@pytest.mark.parametrize("system", EAGLE3_DEFAULTS)
def test_explain_gives_each_trainers_own_eagle3_default_for_the_same_states(system):
    *numbers, _final = numbers_of(explain("eagle3", num_layers=36), system)
    assert numbers == [str(number) for number in EAGLE3_DEFAULTS[system]]


def test_explain_gives_speculators_first_default_for_its_preset():
    text = explain("speculators-v1", num_layers=61)
    assert numbers_of(text, "speculators to v0.4: layer_ids") == ["2", "30", "58", "-"]
    assert numbers_of(text, "vLLM: eagle_aux_hidden_state_layer_ids") == ["3", "31", "59", "-"]


def test_explain_tells_the_ends_apart():
    text = explain("all", num_layers=2)
    assert numbers_of(text, "hsray") == ["embed", "0", "1", "final"]
    assert numbers_of(text, "Hugging Face: hidden_states[..]") == ["0", "1", "-", "2"]
    assert numbers_of(text, "vLLM: eagle_aux_hidden_state_layer_ids") == ["0", "1", "2", "-"]
    assert numbers_of(text, "DeepSpec: target_layer_ids") == ["-1", "0", "1", "-"]


@given(st.lists(st.sampled_from(["embed", *range(8), "final"]), min_size=1, unique=True))
def test_explain_has_a_number_or_a_dash_for_each_layer_in_each_system(layers):
    text = explain(layers, num_layers=8)
    assert len(text.splitlines()) == 1 + len(SYSTEMS)
    assert all(len(numbers_of(text, system)) == len(layers) for system in SYSTEMS)


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
            "layer 'last' is not known; wanted 0..35, 'embed', 'final', a range such as '0:36:4', or alone one of 'eagle3', "
            "'speculators-v1', 'all', 'dflash:5'",
        ),
        ("", "layer '' is not known"),
        (None, "layer None is not known"),
        (b"0", "layer b'0' is not known"),
        (["1_0"], "layer '1_0' is not known"),
        ("9,final", "layer '9,final' is not known"),
        (["1.0"], "layer '1.0' is not known"),
        (["eagle3", 9], "layer 'eagle3' is not known"),
        (["dflash:5", 9], "layer 'dflash:5' is not known"),
        ("dflash:0", "layer 'dflash:0' is not known"),
        ("dflash:40", "layers='dflash:40' needs a deeper model: 36 blocks"),
        ("0:37", "layers '0:37' are out of range: the model has 36 blocks, 0:36"),
        ("-37:", "layers '-37:' are out of range"),
        ("5:5", "layers '5:5' are none of the model's 36 blocks"),
        ("9:0:-1", "layers '9:0:-1' go by steps of -1; give a step of 1 or more"),
        ("0:9:0", "layers '0:9:0' go by steps of 0"),
        ("0:9:1:1", "layer '0:9:1:1' is not known"),
        (["0:9", 8], "layer 8 is named twice in ['0:9', 8] (N=36)"),
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
