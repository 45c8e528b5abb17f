"""Token ids of texts, with each distinct piece of them tokenised once.

A tokenizer of bytes cuts special tokens out of a text, and the rest into words, before it merges bytes; what stands on one
side of such a cut has no say in the other's tokens. Conversations repeat their words, and what a chat template writes. So
texts are cut here where their tokenizer is known to cut them, around special tokens and before the space of " word", and a
piece that was there before costs a look into a dict.

Whether a tokenizer cuts there is read off its own description, never tried out. One of which that is not known is left to
tokenise whole texts.
"""

import functools
import json
import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

#: Before " x" that follows something visible.
WORD_BOUNDARY = re.compile(r"(?<=[!-~])(?= [A-Za-z])")

#: Pieces remembered, and the most characters of such a one.
MOST_PIECES = 1 << 16
MOST_CHARACTERS = 48

#: New pieces that are tokenised as one text, with a special token between them: one by one they take half as long again.
JOINED_PIECES = 64

#: A tokenizer with more special tokens is left whole: for each that a text has, all of them may be tried.
MOST_SPECIAL = 512

VISIBLE = re.compile(r"[!-~]+")

#: What a token has that may reach over a `WORD_BOUNDARY`.
ACROSS_BOUNDARY = re.compile(r"[!-~] (?:[A-Za-z]|\Z)")

_SUFFIXES = "'s|'t|'re|'ve|'m|'ll|'d"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

#: Of these are the patterns by which pre-tokenizers cut. None matches something visible with the space and the letter that
#: follow it, and none looks past them.
ALTERNATIVES = frozenset(
    [*_SUFFIXES.split("|"), f"(?i:{_SUFFIXES})", "'(?i:[sdmt]|ll|ve|re)"]
    + [r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"]
    + [r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""]
    + [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{more}" for more in (f"*{_LOWER}+", f"+{_LOWER}*")]
    + [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{more}(?i:{_SUFFIXES})?" for more in (f"*{_LOWER}+", f"+{_LOWER}*")]
    + [r"\p{N}", r" ?\p{N}+", r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+"]
    + [r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"]
    + [r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"]
    + [r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
)


class PieceEncoder:
    """Tokenises texts without a tokenizer's own additions, such as BOS. Made by `piece_encoder`."""

    def __init__(self, backend: "tokenizers.Tokenizer", special: dict[str, int], separator: str | None):
        """Args: separator: Of `special`, one that stays itself whatever stands beside it, and is not made of anything else."""
        self._backend, self._lock = backend, threading.Lock()
        self._separator, self._separator_id = separator, special.get(separator, -1)
        self._special = {content: np.int32(token_id).tobytes() for content, token_id in special.items()}
        longest_first = sorted(special, key=len, reverse=True)
        self._cut_special = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})").split
        # As int32: lists of numbers Python would walk through, again and again, in search of garbage.
        self._known = dict(self._special)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Each text's token ids, int32 [T]."""
        cut_special, cut_words = self._cut_special, WORD_BOUNDARY.split
        pieces_of = [[piece for part in cut_special(text) for piece in cut_words(part)] for text in texts]
        with self._lock:
            known = self._known
            new = [piece for piece in set().union(*pieces_of) if piece not in known]
            known.update(zip(new, self._encode_new(new), strict=True))
            found = [np.frombuffer(bytearray().join(map(known.__getitem__, pieces)), np.int32) for pieces in pieces_of]
            for piece in new:
                if len(piece) > MOST_CHARACTERS:  # it will hardly come again
                    del known[piece]
            if len(known) > MOST_PIECES:
                self._known = dict(self._special)
        return found

    def _encode_new(self, pieces: list[str]) -> list[bytes]:
        size = JOINED_PIECES if self._separator else 1
        groups = [pieces[at : at + size] for at in range(0, len(pieces), size)]
        texts = [(self._separator or "").join(group) for group in groups]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        found = []
        for group, encoding in zip(groups, encodings, strict=True):
            ids_T = np.array(encoding.ids, np.int32)
            between = np.flatnonzero(ids_T == self._separator_id).tolist()
            parts = zip([0, *(at + 1 for at in between)], [*between, len(ids_T)], strict=True)
            found += [ids_T[start:stop].tobytes() for _, (start, stop) in zip(group, parts, strict=True)]
        return found

    def _forget(self) -> None:
        """What will hardly come again, or everything where it is too much."""
        for piece in self._long:
            del self._known[piece]
        self._long.clear()
        if len(self._known) > MOST_PIECES:
            self._known = dict(self._special)


@functools.lru_cache(maxsize=2)
def piece_encoder(tokenizer: "PreTrainedTokenizerBase") -> PieceEncoder | None:
    """What tokenises a fast tokenizer's texts in pieces; None if that is not known to give what whole texts do."""
    from tokenizers.models import BPE

    backend = tokenizer.backend_tokenizer
    tokenizer("")  # has the backend cut, pad and split special tokens as the tokenizer does
    added = backend.get_added_tokens_decoder()
    if not isinstance(backend.model, BPE) or backend.model.dropout or backend.encode_special_tokens:
        return None
    if not _cuts_words(backend.pre_tokenizer) or not _keeps_cuts(backend.normalizer):
        return None
    if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return None  # it takes, or looks at, what stands beside it
    contents = {token.content for token in added.values()}
    if backend.normalizer is not None:
        contents |= {backend.normalizer.normalize_str(content) for content in contents}
    if any(map(ACROSS_BOUNDARY.search, contents)):
        return None
    special = {token.content: token_id for token_id, token in added.items() if token.content and not token.normalized}
    if len(special) > MOST_SPECIAL:
        return None
    separator = next((content for content in special if _stays_apart(content, contents, backend.model.unk_token)), None)
    return PieceEncoder(backend, special, separator)


def _stays_apart(content: str, contents: set[str], unknown: str | None) -> bool:
    """Whether a special token is found wherever it is written, beside anything, and its id nowhere else."""
    if content == unknown or not VISIBLE.fullmatch(content):  # other bytes are written otherwise, perhaps as it is
        return False
    ends = [content[at:] for at in range(len(content))], [content[: at + 1] for at in range(len(content))]
    return not any(
        content in other or other.startswith(tuple(ends[0])) or other.endswith(tuple(ends[1]))
        for other in contents - {content}
    )


def _state(component: Any) -> dict[str, Any] | None:
    """A part of a tokenizer as tokenizer.json describes it."""
    return None if component is None else json.loads(component.__getstate__())


def _keeps_cuts(normalizer: "tokenizers.normalizers.Normalizer | None") -> bool:
    state = _state(normalizer)
    return state is None or state["type"] == "NFC"  # which leaves ASCII as it is, and composes nothing across it


def _cuts_words(pre_tokenizer: "tokenizers.pre_tokenizers.PreTokenizer | None") -> bool:
    """Whether it cuts at each `WORD_BOUNDARY` whatever stands on either side."""
    state = _state(pre_tokenizer)
    all_steps = [] if state is None else state["pretokenizers"] if state["type"] == "Sequence" else [state]
    if not all_steps:
        return False
    *steps, last = all_steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    cuts = last["use_regex"]  # GPT-2's pattern, which is made of `ALTERNATIVES`
    for step in steps:
        if step["type"] == "Digits":
            continue
        if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
            return False
        alternatives = _alternatives(step["pattern"].get("Regex", ""))
        if alternatives is None:
            return False
        cuts |= r"\s+" in alternatives  # so something matches from the space on, and nothing across it
    return cuts


def _alternatives(pattern: str) -> set[str] | None:
    """The alternatives of a pattern; None if one is not among `ALTERNATIVES`."""
    found = set()
    while pattern:
        for alternative in ALTERNATIVES:
            if pattern == alternative or pattern.startswith(alternative + "|"):
                found.add(alternative)
                pattern = pattern[len(alternative) + 1 :]
                break
        else:
            return None
    return found or None
