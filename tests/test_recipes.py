"""The README's recipes open a dataset's files with other tools, as they stand there."""

import re
from pathlib import Path

import pytest
import torch

from tests.synthetic import LENGTHS, make_prompts, write_dataset

README = (Path(__file__).parent.parent / "README.md").read_text()
ON_DISK = README[README.index("## On disk") : README.index("## Is it right?")]
RECIPES = {
    re.search(r"import (\w+)", recipe)[1]: recipe for recipe in re.findall(r"```python\n(.*?)```", ON_DISK, re.DOTALL)
}


def test_there_is_a_recipe_of_at_most_five_lines_for_each_tool():
    assert list(RECIPES) == ["pyarrow", "duckdb", "polars", "datasets"]
    assert all(len(recipe.splitlines()) <= 5 for recipe in RECIPES.values())


@pytest.mark.parametrize("compression", ["none", "zstd:1"])
@pytest.mark.parametrize("tool", RECIPES)
def test_a_recipe_reads_the_first_prompts_states(tool, compression, tmp_path, monkeypatch):
    prompts = make_prompts(LENGTHS)
    write_dataset(prompts, tmp_path, compression=compression)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(RECIPES[tool], names)
    assert torch.equal(names["states"], prompts[0]["hidden_states"]["final"])
