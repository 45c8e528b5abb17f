"""Messages to `(input_ids, loss_mask)`, masked as they are rendered.

The loss mask marks the tokens that each assistant turn adds: those between the render up to that turn, with the
generation prompt, and the render including it (the render-boundary method). Both renders must be token prefixes of
the whole conversation; a template that rewrites history breaks that, and is refused rather than masked wrongly.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]


def tokenize_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]
) -> tuple[list[int], list[bool]]:
    """Renders a conversation with the model's chat template.

    Returns:
        `input_ids` and, of the same length, `loss_mask`: True where a token belongs to an assistant turn.

    Raises:
        ValueError: no template, a malformed message, or a template whose earlier turns depend on later ones.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; give 'text' or 'input_ids' rows, or another model")
    _check_messages(messages)
    input_ids = _render(tokenizer, messages, generation_prompt=False)
    loss_mask = [False] * len(input_ids)
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _render(tokenizer, messages[:turn], generation_prompt=True)
            through = _render(tokenizer, messages[: turn + 1], generation_prompt=False)
            start = _check_prefix(before, input_ids, turn, "before")
            stop = _check_prefix(through, input_ids, turn, "through")
            loss_mask[start:stop] = [True] * (stop - start)
    return input_ids, loss_mask


def tokenize_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[list[int], list[bool]]:
    """Tokenises plain text, with the special tokens that the tokenizer itself adds; every token is trained on."""
    input_ids = tokenizer(text)["input_ids"]
    return input_ids, [True] * len(input_ids)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError("'messages' must be a list of at least one {'role': .., 'content': ..}")
    for turn, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {turn} must be an object with a 'role'; found {message!r:.80}")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"message {turn} ({message['role']}) must have a text as its 'content'")


def _render(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], *, generation_prompt: bool) -> list[int]:
    from jinja2 import TemplateError

    if not messages:
        return []
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation_prompt
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the conversation's first {len(messages)} messages: {error}") from error
    # The template writes the special tokens, BOS too; the tokenizer must not add its own.
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _check_prefix(part: list[int], whole: list[int], turn: int, which: str) -> int:
    if whole[: len(part)] != part:
        at = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), len(whole))
        raise ValueError(
            f"the chat template renders the turns {which} message {turn} (assistant) otherwise within the whole "
            f"conversation, from token {at} on, so its loss mask is not defined; split the conversation into one row "
            "for each assistant turn, or give 'input_ids' with 'loss_mask'"
        )
    return len(part)
