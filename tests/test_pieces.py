"""Texts tokenised in pieces have the tokens that whole texts have, for every pre-tokenizer that is cut so; no other is."""

import copy
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hsray.pieces
from hsray.pieces import PieceEncoder, piece_encoder

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

PROSE = Path(__file__).parents[1] / "README.md"

UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"

#: The patterns of families of models, as their tokenizer.json has them.
PATTERNS = {
    "llama-3": [SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL],
    "qwen": [SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL],
    "gpt-oss": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL
    ],
    "mistral": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL
    ],
    "deepseek": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
        + TAIL,
    ],
    "gpt-2": [],
}

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|im_end|>!", "<|im|>"]

#: What a boundary may stand between, and what it must not be mistaken in.
PARTS = st.sampled_from(
    [
        *SPECIAL,
        "!",
        " the",
        "the",
        " a",
        "A",
        " B",
        "'s",
        " 's",
        "'S b",
        ", and",
        ". ",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\u00a0",
        "\u3000",
    ]
    + [
        "12345",
        " 7 up",
        "é",
        "e\u0301",
        " \u0301x",
        "中文",
        " 中",
        "かな",
        "🙂",
        " x",
        "x y",
        "/ a",
        "/\n b",
        "_ c",
        "\ufeff",
        "<|im",
        "|> a",
    ]
)
TEXTS = st.lists(st.lists(PARTS | st.text(max_size=4), max_size=12).map("".join), min_size=1, max_size=4)


def byte_tokenizer(
    patterns: list[str],
    *,
    normalizer: object = None,
    special: list[object] = SPECIAL,
    alphabet: bool = True,
    model: dict[str, str] | None = None,
) -> object:
    """A tokenizer trained on prose, which cuts by patterns."""
    splits = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(**(model or {})))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = tokenizers.decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=letters, show_progress=False, special_tokens=[*(model or {}).values()]
    )
    backend.train_from_iterator(PROSE.read_text().splitlines(), trainer)
    backend.add_special_tokens(special)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def whole(tokenizer: object, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def in_pieces(encoder: PieceEncoder, texts: list[str]) -> list[list[int]]:
    return [ids_T.tolist() for ids_T in encoder.encode(texts)]


@pytest.fixture(scope="module", params=PATTERNS)
def family(request):
    """A family's tokenizer, and what encodes its texts in pieces."""
    tokenizer = byte_tokenizer(PATTERNS[request.param])
    encoder = piece_encoder(tokenizer)
    assert encoder is not None
    return tokenizer, encoder


@settings(max_examples=300, deadline=None)
@given(texts=TEXTS)
def test_pieces_have_the_tokens_of_whole_texts(family, texts):
    tokenizer, encoder = family
    assert in_pieces(encoder, texts) == whole(tokenizer, texts)


def test_prose_has_the_tokens_that_it_has_whole(family):
    tokenizer, encoder = family
    texts = [*PROSE.read_text().split("\n\n"), PROSE.read_text()]
    assert in_pieces(encoder, texts) == whole(tokenizer, texts)


@settings(max_examples=200, deadline=None)
@given(texts=TEXTS)
def test_a_text_that_the_tokenizer_normalises_is_cut_as_it_is(texts):
    tokenizer = normalising()
    assert in_pieces(piece_encoder(tokenizer), texts) == whole(tokenizer, texts)


_made = {}


def normalising() -> object:
    if not _made:
        _made[0] = byte_tokenizer(PATTERNS["qwen"], normalizer=tokenizers.normalizers.NFC())
    return _made[0]


def test_the_demo_models_own_tokenizer_is_cut(demo_tokenizer):
    texts = [json.dumps(part) for part in PROSE.read_text().split("\n")]
    assert in_pieces(piece_encoder(demo_tokenizer), texts) == whole(demo_tokenizer, texts)


def test_what_is_remembered_is_bounded(family, monkeypatch):
    tokenizer, _ = family
    encoder = piece_encoder.__wrapped__(tokenizer)
    monkeypatch.setattr(hsray.pieces, "MOST_PIECES", 100)
    for number in range(50):
        texts = [f"word{number} has a name{number}x y{'z' * 60}", "has a name"]
        assert in_pieces(encoder, texts) == whole(tokenizer, texts)
        assert len(encoder._known) < 120
    assert not any("zzz" in piece for piece in encoder._known)


def added(content: str, **flags: bool) -> object:
    return tokenizers.AddedToken(content, special=True, normalized=False, **flags)


@pytest.mark.parametrize(
    "changes",
    [
        {"patterns": [r"\w+|\s+"]},
        {"patterns": [r" ?\p{L}+|[a-z] [a-z]|\s+"]},
        {"patterns": [r"\p{N}{1,3}"]},
        {"patterns": [], "normalizer": tokenizers.normalizers.Strip()},
        {"patterns": [], "normalizer": tokenizers.normalizers.Lowercase()},
        {"patterns": [], "special": [added("<a>"), added("<mask>", lstrip=True)]},
        {"patterns": [], "special": [added("<a>"), added("<mask>", rstrip=True)]},
        {"patterns": [], "special": [added("<a>"), added("word", single_word=True)]},
        {"patterns": [], "special": [added("<a>"), added("two words")]},
        {"patterns": [], "special": [tokenizers.AddedToken(". ", normalized=True)]},
        {"patterns": [], "special": [tokenizers.AddedToken("x \u212a")], "normalizer": tokenizers.normalizers.NFC()},
        {"patterns": [], "special": [f"<|s_{number}|>" for number in range(600)]},
    ],
    ids=str,
)
def test_a_tokenizer_that_may_look_across_a_cut_is_left_whole(changes):
    assert piece_encoder(byte_tokenizer(**changes)) is None


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True),
        tokenizers.pre_tokenizers.Metaspace(),
        tokenizers.pre_tokenizers.Sequence([]),
        tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\s+"), "removed"),
                tokenizers.pre_tokenizers.ByteLevel(False),
            ]
        ),
    ],
    ids=["prefix", "metaspace", "nothing", "removed"],
)
def test_another_pre_tokenizer_is_left_whole(demo_tokenizer, pre_tokenizer):
    tokenizer = copy.deepcopy(demo_tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
    assert piece_encoder(tokenizer) is None


@pytest.mark.parametrize(
    "special", [["<unk>", "<s>"], ["<unk>"], ["<a>", "<a>b"], ["<s>", "a<"], ["\u0120the", "<s>"], []], ids=str
)
def test_special_tokens_may_be_any(special):
    tokenizer = byte_tokenizer(
        [], special=special, alphabet=False, model={"unk_token": "<unk>"} if "<unk>" in special else {}
    )
    texts = ["hello zebra Q\u00e9", "Q", "a<s> b<a>b the b", "<a> the a<", "".join(special)]
    assert in_pieces(piece_encoder(tokenizer), texts) == whole(tokenizer, texts)


def test_threads_share_an_encoder(family):
    tokenizer, _ = family
    encoder = piece_encoder.__wrapped__(tokenizer)
    texts = [[f"thread {thread} says {'z' * 60}{number} to all" for number in range(20)] for thread in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for found, wanted in zip(threads.map(encoder.encode, texts * 5), texts * 5, strict=True):
                assert [ids_T.tolist() for ids_T in found] == whole(tokenizer, wanted)
    finally:
        sys.setswitchinterval(interval)


def test_special_tokens_that_are_to_be_read_as_text_are(demo_tokenizer):
    tokenizer = copy.deepcopy(demo_tokenizer)
    tokenizer.split_special_tokens = True
    assert piece_encoder(tokenizer) is None
