"""An estimate counts what a build will cost; a preview shows what it trains on."""

import json
import re

import pytest

import hsray
from hsray.estimator import Estimate
from tests.chats import assistant, user


def test_an_estimate_counts_hours_and_money(ray_session, model_without_weights):
    rows = [{"input_ids": [1] * 500, "id": number} for number in range(10)]
    asked = {"model": str(model_without_weights), "layers": [0, 1], "dtype": "bfloat16", "compression": "zstd:1"}
    found = hsray.estimate(rows, tokens_per_s=2.5, gpu_hour_price=3.0, gb_month_price=20.0, tensor_parallel=4, **asked)
    assert found.gpu_hours == pytest.approx(5000 / 2.5 / 3600 * 4)
    assert found.gpu_price == pytest.approx(3 * found.gpu_hours)
    assert found.stored_bytes == int(found.raw_bytes * 0.79)
    assert found.storage_price_per_month == pytest.approx(found.stored_bytes / 1e9 * 20)
    assert found.length_histogram == {500: 10}
    assert hsray.estimate(rows, ratio=0.5, **asked).stored_bytes == found.raw_bytes // 2


def test_an_estimate_prints_its_histogram():
    found = Estimate(
        prompts=7, tokens=100, longest_prompt=40, length_histogram={1: 1, 16: 4, 40: 2}, dropped=0, truncated=3, shards=2,
        raw_bytes=1_500_000, stored_bytes=1_200, plan_bytes=999, host_bytes=5 * 10**12, object_store_bytes=0,
    )  # fmt: skip
    assert str(found).splitlines() == [
        "7 prompts, 100 tokens, the longest 40; 0 dropped, 3 truncated",
        f"          1 to         1 tokens             1  {'#' * 10}",
        f"          2 to        16 tokens             4  {'#' * 40}",
        f"         17 to        40 tokens             2  {'#' * 20}",
        "2 shards, 1.5 MB, 1.2 kB as stored; plan 999 bytes",
        "each engine: 5.0 TB of memory, 0 bytes of object store",
    ]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"tokens_per_s": 0}, "tokens_per_s=0; give a number above 0"),
        ({"gpu_hour_price": 2}, "gpu_hour_price= needs tokens_per_s="),
        ({"train_on": "some"}, "train_on='some'; wanted 'all' or 'last'"),
        ({"chat_template": "/nowhere"}, "chat_template='/nowhere' cannot be read"),
        ({"template_kwargs": {"a": 1}}, "the chat template reads no 'a'"),
        ({"columns": {"a": "b"}}, "columns='a': 'b' is not known"),
    ],
)
def test_a_wrong_keyword_is_an_error_before_anything_starts(model_without_weights, keywords, message):
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        hsray.estimate([], model=str(model_without_weights), layers=[0], **keywords)


def test_a_preview_shows_what_is_trained_on_and_the_special_tokens(ray_session, demo_model, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"id": f"r{n}", "messages": [user("Hi"), assistant("Hello\nyou! 🙂")]} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = hsray.preview(str(path), model=str(demo_model), count=2)
    assert first.plain.startswith(f"{path}:1  r0  ")
    assert "<|im_start|>assistant↵\nHello↵\nyou! 🙂<|im_end|>↵\n" in first.plain
    assert second.plain.startswith(f"{path}:2  r1  ")
    styled = [(str(span.style), first.plain[span.start : span.end]) for span in first.spans]
    assert [part for style, part in styled if style.startswith("green")] == ["Hello↵\nyou! 🙂", "<|im_end|>", "↵\n"]
    assert ("green reverse", "<|im_end|>") in styled
    assert ("default reverse", "<|im_start|>") in styled
