"""What is in a dataset is shown at a glance, and on a page that needs nothing else."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from hsray.summary import summarize
from pipelines.inspect_dataset import main
from tests.synthetic import LENGTHS, make_prompts, plan_prompts, publish_shard, write_dataset


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    return make_prompts(LENGTHS)


@pytest.fixture(autouse=True)
def model_without_a_tokenizer(tmp_path, monkeypatch) -> None:
    """Otherwise ``m``, as the datasets call their model, would be looked for on a hub."""
    (tmp_path / "models/m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models")


def test_counts_are_the_datasets_and_norms_those_of_its_states(tmp_path, prompts):
    write_dataset(prompts, tmp_path / "out")
    summary = summarize(tmp_path / "out", sample=100)
    assert (summary.prompts, summary.tokens, summary.shards, summary.complete) == (len(LENGTHS), sum(LENGTHS), 4, True)
    assert summary.nbytes == sum(path.stat().st_size for path in tmp_path.glob("out/shards/*"))
    assert summary.length_histogram == {1: 2, 2: 2, 8: 3, 32: 1, 64: 1, 128: 1}
    norms_S = torch.cat([prompt["hidden_states"][3] for prompt in prompts]).float().norm(dim=1)
    least, _, median, _, largest = summary.norms[3]
    assert (least, largest) == pytest.approx((norms_S.min().item(), norms_S.max().item()))
    assert median == pytest.approx(norms_S.quantile(0.5).item(), rel=1e-4)


def test_a_sample_is_spread_over_the_dataset_and_shows_what_is_trained_on(tmp_path, prompts):
    write_dataset(prompts, tmp_path / "out", stored_dtype="float8_e4m3")
    summary = summarize(tmp_path / "out", sample=4, show=2)
    assert [text.plain.split("  ")[:2] for text in summary.samples] == [["prompt 0", "p0"], ["prompt 3", "p3"]]
    trained = {token for token, on in zip(prompts[0]["input_ids"], prompts[0]["loss_mask"], strict=True) if on}
    green = [
        summary.samples[0].plain[span.start : span.end] for span in summary.samples[0].spans if span.style == "green"
    ]
    assert {int(token) for run in green for token in run.split()} == {int(token) for token in trained}
    assert 0.01 < summary.rounding["3"].mean < summary.rounding["3"].worst < 0.07


def test_the_script_shows_it_and_writes_one_page(tmp_path, prompts, capsys):
    write_dataset(prompts, tmp_path / "out", stored_dtype="float8_e4m3")
    page = tmp_path / "report.html"
    assert main([str(tmp_path / "out"), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "stored in float8_e4m3",
        "4 of 4 shards",
        "10, 175 tokens",
        "prompts by length",
        "rounding, mean",
        "so prompts are token ids",
        "p0",
    ):
        assert words in shown
    text = page.read_text()
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.feed(text)
    assert [tag for tag, _ in tags].count("svg") == 2
    assert [tag for tag, _ in tags].count("rect") == 6 + 3
    assert not [name for _, attributes in tags for name in attributes if name in ("src", "href")]
    assert not re.search(r"\{\{|\}\}|@import|url\(", text)
    assert "175 tokens" in text
    assert main([str(tmp_path / "nothing")]) == 1
    assert "holds no dataset that can be read yet" in capsys.readouterr().err


def test_a_dataset_being_built_is_shown_as_far_as_it_goes(tmp_path: Path, prompts):
    store, manifest = plan_prompts(prompts, tmp_path / "out")
    assert summarize(tmp_path / "out").norms == {}
    publish_shard(store, manifest, prompts, 1)
    summary = summarize(tmp_path / "out")
    assert (summary.shards, summary.planned_shards, summary.complete) == (1, 4, False)
    assert summary.prompts == manifest.plan.shard_prompts[1]
