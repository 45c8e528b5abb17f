"""A drafter trained on a dataset's stream finds what its states say of the next token; damaged, they are worth less.

Shapes: T tokens of a prompt, D hidden size.
"""

import shutil
from pathlib import Path

import pytest
import torch

from hsray.shard import ShardPrompts
from pipelines.train_toy_drafter import choose_layers, main
from tests.datasets import States, make_dataset, rewrite
from tests.reference import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = [1, 2, 4, 5]
NUM_SECRETS = 8
FLAGS = ["--epochs", "6", "--batch-tokens", "256", "--width", "64"]


@pytest.fixture(scope="module")
def foretelling(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in which the states of a token, each layer in its own code, say what is chosen after the next token."""
    out = tmp_path_factory.mktemp("foretelling") / "x"
    make_dataset(tiny_llama, out, lengths=[40] * 40, layers=[*LAYERS, "final"], shard_tokens=400)
    head = load_model(str(tiny_llama)).get_output_embeddings().weight.detach()
    chosen = torch.Generator().manual_seed(0)
    codes = {layer: torch.randn(NUM_SECRETS, head.shape[1], generator=chosen) for layer in LAYERS[1:]}

    def foretell(states: list[States], _prompts: ShardPrompts) -> None:
        for prompt in states:
            secrets_T = torch.randint(NUM_SECRETS, (len(prompt["final"]),), generator=chosen)
            for layer, code in codes.items():
                prompt[layer].copy_(code[secrets_T])
            prompt["final"][1:] = 300 * head[10 * secrets_T[:-1]]

    rewrite(out, foretell)
    return out


def shares_of(shown: str) -> dict[str, float]:
    """The table's first word -> the share in its last column."""
    rows = [line.strip("│ ").split() for line in shown.splitlines() if line.startswith("│")]
    return {row[0].rstrip(":"): float(row[-1].rstrip("%")) / 100 for row in rows}


def test_right_states_are_worth_more_than_damaged_ones_and_bigrams(foretelling, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["--out", str(foretelling), *FLAGS]) == 0
    shown = capsys.readouterr().out
    shares = shares_of(shown)
    assert shares["layers"] > 0.9
    # Each of the others knows no more than how often a secret comes: 1 in 8.
    assert max(shares[name] for name in ("shifted", "shuffled", "bigrams")) < 0.5
    assert "layers [2, 4, 5] as they are" in shown and "shifted: layers [1, 2, 4]" in shown
    assert shown.endswith("right\n")


def test_states_of_the_wrong_tokens_are_found_out(foretelling, tmp_path, capsys):
    """A dataset whose rows are one token late: they tell nothing of the token that is drafted."""
    late = shutil.copytree(foretelling, tmp_path / "late")

    def delay(states: list[States], _prompts: ShardPrompts) -> None:
        for prompt in states:
            for layer in LAYERS:
                prompt[layer] = prompt[layer].roll(1, dims=0)

    rewrite(late, delay)
    assert main(["--out", str(late), *FLAGS]) == 1
    assert "WRONG: the first is not ahead of the rest by 2%" in capsys.readouterr().out


def test_layers_are_the_last_three_that_have_one_before_them():
    assert choose_layers(["embed", 9, 19, 29, "final"], None) == ([9, 19, 29], ["embed", 9, 19])
    assert choose_layers([1, 2, 4, 5, "final"], [5, 2]) == ([5, 2], [4, 1])


@pytest.mark.parametrize(("held", "wanted"), [([1, 2, 4], None), (["final"], None), ([1, 2, "final"], [1])])
def test_what_a_drafter_needs_and_a_dataset_lacks_is_named(held, wanted):
    with pytest.raises(ValueError, match=r"the dataset has layers \[.*needs 'final', its layers, and one before each"):
        choose_layers(held, wanted)


def test_no_dataset_is_an_error_that_says_how_to_build_one(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "holds no dataset; build one with pipelines/demo.py" in capsys.readouterr().err
