"""Messages to `(input_ids, loss_mask)`, masked as they are rendered.

The loss mask marks the tokens of each assistant turn: those that cover text between the render up to that turn, with
the generation prompt, and the render including it (the render-boundary method). Both renders must be prefixes of the
whole conversation's text; a template that rewrites history breaks that, and is refused rather than masked wrongly.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]


def tokenize_chat(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Renders a conversation with the model's chat template.

    Returns:
        `input_ids` and, of the same length, `loss_mask`: True where a token belongs to an assistant turn.

    Raises:
        ValueError: no template, a malformed message, or a template whose earlier turns depend on later ones.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; give 'text' or 'input_ids' rows, or another model")
    _check_messages(messages)
    text = _render(tokenizer, messages, generation_prompt=False)
    spans = [
        _turn_span(tokenizer, text, messages, turn)
        for turn, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    # The template writes the special tokens, BOS too; the tokenizer must not add its own.
    if not tokenizer.is_fast:
        return _mask_by_prefixes(tokenizer, text, spans)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    loss_mask = [False] * len(encoding["input_ids"])
    for token, (first, last) in enumerate(encoding["offset_mapping"]):
        loss_mask[token] = any(first < stop and start < last for start, stop in spans)
    return encoding["input_ids"], loss_mask


def tokenize_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[list[int], list[bool]]:
    """Tokenises plain text, with the special tokens that the tokenizer itself adds; every token is trained on."""
    input_ids = tokenizer(check_unicode(text))["input_ids"]
    return input_ids, [True] * len(input_ids)


def check_unicode(text: str) -> str:
    """Returns a text; raises ValueError if it holds half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not Unicode text: half a surrogate pair at character {error.start}") from None
    return text


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError("'messages' must be a list of at least one {'role': .., 'content': ..}")
    for turn, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {turn} must be an object with a 'role'; found {message!r:.80}")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"message {turn} ({message['role']}) must have a text as its 'content'")


def _turn_span(
    tokenizer: "PreTrainedTokenizerBase", text: str, messages: Sequence[Message], turn: int
) -> tuple[int, int]:
    """Where an assistant turn starts and stops in the conversation's text, in characters."""
    if turn == 0:
        raise ValueError(
            "message 0 is the assistant's: what the template writes before it cannot be told from it; begin with a "
            "system or user message"
        )
    before = _render(tokenizer, messages[:turn], generation_prompt=True)
    through = _render(tokenizer, messages[: turn + 1], generation_prompt=False)
    for part in (before, through):
        if not text.startswith(part):
            at = len(os.path.commonprefix([text, part]))
            raise ValueError(
                f"the chat template renders what comes up to message {turn} (assistant) otherwise within the whole "
                f"conversation, from character {at} on ({part[at : at + 40]!r} alone, {text[at : at + 40]!r} within), so "
                "the turn's loss mask is not defined; split the conversation into one row for each assistant turn, or "
                "give 'input_ids' with 'loss_mask'"
            )
    return len(before), len(through)


def _render(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], *, generation_prompt: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation_prompt)
    except Exception as error:  # a template is a program: it may raise anything
        raise ValueError(
            f"the chat template refuses the conversation's first {len(messages)} messages: {error}"
        ) from error
    return check_unicode(text)


def _mask_by_prefixes(
    tokenizer: "PreTrainedTokenizerBase", text: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[bool]]:
    """The mask of a tokenizer that cannot say which characters a token covers: boundaries must be token boundaries."""
    input_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    loss_mask = [False] * len(input_ids)
    for span in spans:
        parts = [tokenizer(text[:end], add_special_tokens=False)["input_ids"] for end in span]
        if any(input_ids[: len(part)] != part for part in parts):
            raise ValueError(
                f"a token runs across the boundary of the assistant turn at characters {span[0]}..{span[1]}, and this "
                "tokenizer cannot say which; give 'input_ids' with 'loss_mask'"
            )
        start, stop = map(len, parts)
        loss_mask[start:stop] = [True] * (stop - start)
    return input_ids, loss_mask
