"""A token is trained on if any character of it is, by whichever way that is told."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers
from transformers import PreTrainedTokenizerBase

from hsray import tokens
from hsray.tokens import Rendered, tokenize


def changed(tokenizer: PreTrainedTokenizerBase, **parts: object) -> PreTrainedTokenizerBase:
    """A copy with other parts in its backend."""
    tokenizer = copy.deepcopy(tokenizer)
    for name, part in parts.items():
        setattr(tokenizer.backend_tokenizer, name, part)
    return tokenizer


@pytest.fixture(scope="module")
def by_offsets(demo_tokenizer) -> PreTrainedTokenizerBase:
    """Its tokens are not known to be bytes, so that its offsets are asked for."""
    return changed(demo_tokenizer, decoder=decoders.Fuse())


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str, *spans: tuple[int, int]) -> tuple[list[int], list[bool]]:
    [(input_ids, loss_mask)] = tokenize(tokenizer, [Rendered(text=text, spans=spans, add_special_tokens=False)])
    return input_ids.tolist(), loss_mask.tolist()


PIECES = st.sampled_from(
    [" ", "\n", "a", "Hello", "  x", "é", "e\u0301", "你好", "🙂👩‍👩‍👧", "<|im_end|>", "12", "\u212b", "\U00052000"]
)


@given(st.lists(PIECES, max_size=12).map("".join), st.data())
def test_the_bytes_of_tokens_say_what_their_offsets_say(demo_tokenizer, by_offsets, text, data):
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=6)))
    spans = list(zip(ends[::2], ends[1::2], strict=False))
    assert tokens_of(demo_tokenizer, text, *spans) == tokens_of(by_offsets, text, *spans)


@pytest.mark.parametrize("text", ["e\u0301 e\u0301 e\u0301 \u0958 and the end", "e\u0301 and the end", "plain ASCII"])
def test_a_text_that_the_normalizer_changes_is_masked_where_it_was_written(demo_tokenizer, by_offsets, text):
    normalizer = normalizers.NFC()
    given, wanted = (changed(tokenizer, normalizer=normalizer) for tokenizer in (demo_tokenizer, by_offsets))
    for span in [(0, 2), (4, 6), (len(text) - 3, len(text))]:
        assert tokens_of(given, text, span) == tokens_of(wanted, text, span)


def test_a_special_token_that_takes_spaces_with_it_shifts_no_mask(demo_tokenizer, by_offsets):
    text = "a   <sep>   b c d"
    given, wanted = copy.deepcopy(demo_tokenizer), copy.deepcopy(by_offsets)
    for tokenizer in (given, wanted):
        tokenizer.add_tokens(AddedToken("<sep>", lstrip=True, rstrip=True, special=True))
    for at in range(len(text)):
        assert tokens_of(given, text, (at, at + 1)) == tokens_of(wanted, text, (at, at + 1))


def test_offsets_are_not_asked_for_where_bytes_tell(demo_tokenizer, monkeypatch):
    monkeypatch.setattr(tokens, "_mask_by_offsets", None)
    assert tokens_of(demo_tokenizer, "naïve 你好 end", (6, 8))[1].count(True) >= 1
