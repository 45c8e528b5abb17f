"""Conversations to write in a line, and what becomes of them to read in one."""

import copy
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsray.chat import ChatOptions, tokenize_chat
from hsray.prompts import PromptOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def chat_options(**changes: Any) -> ChatOptions:
    return ChatOptions(**{"template_kwargs": {}, "train_on": "all", "rewritten_history": "error"} | changes)


#: SmolLM2's.
VOCAB_SIZE = 49152


def prompt_options(model: Path) -> PromptOptions:
    return PromptOptions(
        model=str(model),
        trust_remote_code=False,
        chat_template=None,
        columns={},
        chat=chat_options(),
        vocab_size=VOCAB_SIZE,
        max_tokens=64,
        too_long="error",
        untrained="error",
        sort="input",
    )


def with_template(
    tokenizer: "PreTrainedTokenizerBase", template: str, special: tuple[str, ...] = ()
) -> "PreTrainedTokenizerBase":
    """The tokenizer with another template, and with a token for each of `special`."""
    changed = copy.deepcopy(tokenizer) if special else copy.copy(tokenizer)
    changed.chat_template = template
    if special:
        changed.add_special_tokens({"additional_special_tokens": list(special)})
    return changed


def decoded_runs(tokenizer: "PreTrainedTokenizerBase", messages: list[dict], **options: Any) -> list[tuple[bool, str]]:
    """The conversation as text, cut where the mask changes."""
    [prompt] = tokenize_chat(tokenizer, messages, options=chat_options(**options))
    return runs_of(tokenizer, *prompt)


def runs_of(
    tokenizer: "PreTrainedTokenizerBase", input_ids: list[int], loss_mask: list[bool]
) -> list[tuple[bool, str]]:
    assert len(input_ids) == len(loss_mask)
    runs = groupby(zip(loss_mask, input_ids, strict=True), key=lambda pair: pair[0])
    return [(trained, tokenizer.decode([token for _, token in run])) for trained, run in runs]


def trained_texts(tokenizer: "PreTrainedTokenizerBase", messages: list[dict], **options: Any) -> list[str]:
    return [text for trained, text in decoded_runs(tokenizer, messages, **options) if trained]


def shown(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict], tools: Any = None, **options: Any
) -> str | list[str]:
    """A conversation as text, what is trained in «»; a list of such where it was split."""
    prompts = tokenize_chat(tokenizer, messages, tools=tools, options=chat_options(**options))
    texts = ["".join(f"«{text}»" if on else text for on, text in runs_of(tokenizer, *prompt)) for prompt in prompts]
    return texts[0] if len(texts) == 1 else texts
