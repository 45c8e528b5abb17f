"""Texts, with what of each is trained on, to token ids and loss masks.

A token is trained on if any character of it is. Which characters a token covers is told by the bytes that it stands for,
where a token is always the same bytes; by the tokenizer's offsets, where it has such; else by tokenising up to each boundary.

Shapes: T tokens of a text.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hsray.pieces import piece_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: In characters: where something starts and stops.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A text to tokenise."""

    text: str
    spans: tuple[Span, ...] | None
    """What is trained on, ascending; None for every token, the tokenizer's own too."""
    add_special_tokens: bool
    """Whether the tokenizer adds its own; a chat template writes them itself, BOS too."""
    turn: int | None = None
    """The message that it ends with, where its conversation was split."""


#: A text's ids, int32 [T], and its mask, bool [T].
Tokens = tuple[np.ndarray, np.ndarray]


def tokenize(tokenizer: "PreTrainedTokenizerBase", rendered: Sequence[Rendered]) -> list[Tokens | ValueError]:
    """Tokenises texts together: for each its ids and its mask, or why there is none.

    BOS is never doubled: where a text that the tokenizer gives one begins with it already, one stays.
    """
    results: dict[int, Tokens | ValueError] = {}
    for add_special_tokens in (False, True):
        chosen = [at for at, item in enumerate(rendered) if item.add_special_tokens == add_special_tokens]
        left = []
        for at, tokens in zip(chosen, _by_bytes(tokenizer, [rendered[at] for at in chosen]), strict=True):
            if tokens is None:
                left.append(at)
            else:
                results[at] = tokens
        results.update(zip(left, _by_text(tokenizer, [rendered[at] for at in left]), strict=True))
    for at, item in enumerate(rendered):
        if item.add_special_tokens and not isinstance(results[at], ValueError):
            input_ids, loss_mask = results[at]
            if input_ids[:2].tolist() == [tokenizer.bos_token_id] * 2:
                results[at] = input_ids[1:], loss_mask[1:]
    return [results[at] for at in range(len(rendered))]


def _by_bytes(tokenizer: "PreTrainedTokenizerBase", rendered: Sequence[Rendered]) -> list[Tokens | None]:
    """Without offsets, which cost the tokenizer half as much again; None for a text of which tokens' bytes do not tell."""
    num_bytes = _token_bytes(tokenizer) if rendered and tokenizer.is_fast else None
    if num_bytes is None:
        return [None] * len(rendered)
    backend, add_special_tokens = tokenizer.backend_tokenizer, rendered[0].add_special_tokens
    texts = [item.text for item in rendered]
    encoder = None if add_special_tokens else piece_encoder(tokenizer)
    if encoder is not None:
        ids = encoder.encode(texts)
    else:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
    masks = _masks_by_bytes(ids, num_bytes, rendered)
    normalizer, found = backend.normalizer, []
    for item, input_ids, loss_mask in zip(rendered, ids, masks, strict=True):
        if item.spans is None:
            loss_mask = np.ones(len(input_ids), bool)
        elif normalizer is not None and normalizer.normalize_str(item.text) != item.text:
            loss_mask = None
        found.append(None if loss_mask is None else (input_ids, loss_mask))
    return found


def _by_text(tokenizer: "PreTrainedTokenizerBase", rendered: Sequence[Rendered]) -> Iterator[Tokens | ValueError]:
    """With the tokenizer's offsets, or by tokenising up to each boundary."""
    if not rendered:
        return
    encoded = tokenizer(
        [item.text for item in rendered],
        add_special_tokens=rendered[0].add_special_tokens,
        return_offsets_mapping=tokenizer.is_fast,
    )
    for place, item in enumerate(rendered):
        input_ids = encoded["input_ids"][place]
        try:
            if item.spans is None:
                loss_mask = np.ones(len(input_ids), bool)
            elif tokenizer.is_fast:
                loss_mask = _mask_by_offsets(encoded["offset_mapping"][place], item.spans)
            else:
                loss_mask = _mask_by_prefixes(tokenizer, input_ids, item)
        except ValueError as error:
            yield error
        else:
            yield np.array(input_ids, np.int32), loss_mask


@functools.lru_cache(maxsize=2)
def _token_bytes(tokenizer: "PreTrainedTokenizerBase") -> np.ndarray | None:
    """How many bytes of text each token stands for, by its id; None for a tokenizer not made of bytes."""
    from tokenizers.decoders import ByteLevel

    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.decoder, ByteLevel):
        return None
    tokenizer("")  # has the backend cut, pad and split special tokens as the tokenizer does
    vocab = backend.get_vocab(with_added_tokens=False)
    num_bytes = np.zeros(max([*vocab.values(), *backend.get_added_tokens_decoder()]) + 1, np.int64)
    for token, token_id in vocab.items():
        num_bytes[token_id] = len(token)  # it is written with a character for each byte
    for token_id, token in backend.get_added_tokens_decoder().items():
        num_bytes[token_id] = len(token.content.encode())
    return num_bytes


def _masks_by_bytes(
    ids: Sequence[np.ndarray], num_bytes: np.ndarray, rendered: Sequence[Rendered]
) -> list[np.ndarray | None]:
    """The masks of texts, given how many bytes each token id stands for; None where those are not the text's: the tokenizer
    lacks a byte, adds a token of its own, or a special token takes spaces with it.

    All texts are looked at as one of N tokens: numpy, called for each boundary of each text, would take longer than the rest.
    """
    bounds_N1 = np.concatenate([[0], num_bytes[np.concatenate(ids)].cumsum()])  # in bytes, of the tokens
    tops = np.cumsum([len(ids_T) for ids_T in ids]).tolist()  # of the texts, in tokens
    bottoms = [0, *tops[:-1]]
    begins, ends = bounds_N1[bottoms].tolist(), bounds_N1[tops].tolist()
    is_told, spans = [], []
    for item, begin, end in zip(rendered, begins, ends, strict=True):
        text, is_ascii = item.text, item.text.isascii()
        is_told.append(begin < end and end - begin == (len(text) if is_ascii else len(text.encode())))
        if is_told[-1]:
            for span in item.spans or ():
                start, stop = span if is_ascii else (len(text[:at].encode()) for at in span)
                spans.append((begin + start, begin + stop))
    mask_N = np.zeros(len(bounds_N1) - 1, bool)
    if spans:
        starts, stops = np.array(spans).T
        firsts, lasts = bounds_N1[1:].searchsorted(starts, "right"), bounds_N1[:-1].searchsorted(stops, "left")
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            mask_N[first:last] = True
    cut = zip(is_told, bottoms, tops, strict=True)
    return [mask_N[bottom:top] if told else None for told, bottom, top in cut]


def _mask_by_offsets(offsets: Sequence[Span], spans: Iterable[Span]) -> np.ndarray:
    bounds_T2 = np.asarray(offsets, np.int64).reshape(-1, 2)
    loss_mask = np.zeros(len(bounds_T2), bool)
    for start, stop in spans:
        loss_mask |= (bounds_T2[:, 0] < stop) & (bounds_T2[:, 1] > start)
    return loss_mask


def _mask_by_prefixes(tokenizer: "PreTrainedTokenizerBase", input_ids: list[int], item: Rendered) -> np.ndarray:
    """The mask of a tokenizer that cannot say which characters a token covers: boundaries must be token boundaries."""
    loss_mask = np.zeros(len(input_ids), bool)
    for span in item.spans:
        parts = [tokenizer(item.text[:end], add_special_tokens=item.add_special_tokens)["input_ids"] for end in span]
        if any(input_ids[: len(part)] != part for part in parts):
            raise ValueError(
                f"a token runs across the boundary of what is trained on, characters {span[0]}..{span[1]}, and this "
                "tokenizer cannot say which; give 'input_ids' with 'loss_mask'"
            )
        start, stop = map(len, parts)
        loss_mask[start:stop] = True
    return loss_mask
