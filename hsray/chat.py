"""Conversations to text, with what of it is trained on.

A template with ``{% generation %}`` tags says itself what the assistant wrote, and is taken at its word. With any other,
an assistant turn is what stands between the render up to it, with the generation prompt, and the render through it (the
render-boundary method). Both must be prefixes of the whole conversation's text: a template that rewrites history (drops
earlier reasoning, moves the system prompt) breaks that, and the conversation is then refused or split, never masked
wrongly. Nothing of a trained turn may be left out by the template: its reasoning, its tool calls, the tools on offer.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from hsray.strict_json import load_json
from hsray.tokens import Rendered, Span, tokenize

if TYPE_CHECKING:
    import jinja2
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

#: A template's own word for what the assistant wrote, as Transformers compiles it.
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

#: What datasets and templates call an assistant's reasoning. A template is given all of them: it reads the one it knows.
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")

#: Who may speak in any conversation; whoever else does must be named in the chat template. A template that writes what it is given
#: would write "asistant" too, and nothing of that would be trained on.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

#: What `hsray` itself tells a template.
OWN_KWARGS = {"messages", "tools", "conversation", "chat_template", "add_generation_prompt", "continue_final_message"}
OWN_KWARGS |= {"tokenize", "return_dict", "return_assistant_tokens_mask", "return_tensors", "tokenizer_kwargs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation becomes tokens and a mask."""

    template_kwargs: Mapping[str, Any]
    """Given to the template, such as ``{"enable_thinking": False}``."""
    train_on: Literal["all", "last"]
    """Which of a conversation's assistant messages are trained on."""
    rewritten_history: Literal["error", "split"]
    """Of a conversation whose earlier turns the template renders otherwise once later ones follow: an error, or one prompt
    for each assistant message that is trained on, which ends with it and trains it alone."""


class _RewrittenHistory(ValueError):
    """A template's earlier turns depend on later ones."""


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | str | None = None,
    options: ChatOptions,
) -> list[Rendered]:
    """Renders a conversation with the tokenizer's chat template: to one text, or several if it had to be split.

    Args:
        messages: As OpenAI writes them: ``role``, ``content`` (a text, or parts of type ``text``), ``tool_calls``,
            ``reasoning_content``; an assistant's ``weight`` of 0 takes it out of the training.
        tools: The functions on offer, as JSON schemas or as their JSON text.

    Raises:
        ValueError: no template, a malformed message, a template that leaves something out or whose earlier turns depend
            on later ones.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template; give chat_template=, or 'text' or 'input_ids' rows, or another model"
        )
    chat = _Chat(tokenizer, _normalised(messages), _parsed_tools(tools), options)
    turns = chat.trained_turns()
    try:
        return [Rendered(text=chat.text, spans=chat.spans_of(turns), add_special_tokens=False)]
    except _RewrittenHistory as error:
        if options.rewritten_history == "error":
            raise ValueError(
                f"{error}; pass rewritten_history='split' (a prompt for each assistant message), train_on='last', or another "
                "chat_template="
            ) from error
    pieces = []
    for turn in turns:
        piece = _Chat(tokenizer, chat.messages[: turn + 1], chat.tools, options)
        try:
            spans = piece.spans_of([turn])
        except _RewrittenHistory as error:
            raise ValueError(
                f"{error}, even where the conversation ends with it: give another chat_template="
            ) from error
        pieces.append(Rendered(text=piece.text, spans=spans, add_special_tokens=False, turn=turn))
    return pieces


def tokenize_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | str | None = None,
    options: ChatOptions,
) -> list[tuple[list[int], list[bool]]]:
    """One conversation's prompts, `(input_ids, loss_mask)` each; raises as `render_chat` does."""
    prompts = []
    for result in tokenize(tokenizer, render_chat(tokenizer, messages, tools=tools, options=options)):
        if isinstance(result, ValueError):
            raise result
        prompts.append((result[0].tolist(), result[1].tolist()))
    return prompts


def check_template_kwargs(template: str, template_kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for a keyword that a chat template does not read, as it would be ignored, or that is hsray's."""
    own = sorted(OWN_KWARGS.intersection(template_kwargs))
    if own:
        raise ValueError(f"template_kwargs={own[0]!r} is what hsray itself says to the template; leave it out")
    for name in template_kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ValueError(f"template_kwargs: the chat template reads no {name!r}; correct it, or leave it out")


def check_unicode(text: str) -> str:
    """Returns a text; raises ValueError if it holds half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not Unicode text: half a surrogate pair at character {error.start}") from None
    return text


@functools.lru_cache(maxsize=2)
def _renderer(tokenizer: "PreTrainedTokenizerBase") -> Callable[..., str]:
    """What the tokenizer's `apply_chat_template` does to make text. Transformers' own would gather the special tokens anew for
    each conversation, and look at all that a template could be given, for half of its time."""
    from transformers import PreTrainedTokenizerBase

    if getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        return functools.partial(tokenizer.apply_chat_template, tokenize=False)
    given = {"documents": None, **tokenizer.special_tokens_map}

    def render(messages: list[Message], *, tools: list[dict[str, Any]] | None, **keywords: Any) -> str:
        template = _compiled(tokenizer.get_chat_template(tools=tools))
        return template.render(messages=messages, tools=tools, **{**given, **keywords})

    return render


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> "jinja2.Template":
    """As Transformers compiles it, which is where a template's own words come from, with its globals as one dict: Jinja copies
    them for each render, and a chain of dicts takes longer than the rest of it."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled = _compile_jinja_template(template)
    compiled.globals = dict(compiled.globals)
    return compiled


@functools.lru_cache(maxsize=8)
def _is_tagged(template: str) -> bool:
    return GENERATION_TAG.search(template) is not None


class _Chat:
    """One conversation and its render."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: ChatOptions,
    ):
        self.tokenizer, self.messages, self.tools, self.options = tokenizer, messages, tools, options
        self._check_roles()
        self.text = self._render(len(messages), generation_prompt=False)

    def trained_turns(self) -> list[int]:
        """The messages to train on."""
        turns = [turn for turn, message in enumerate(self.messages) if message["role"] == "assistant"]
        if self.options.train_on == "last":
            turns = turns[-1:]
        return [turn for turn in turns if self.messages[turn].get("weight") != 0]

    def spans_of(self, turns: Sequence[int]) -> tuple[Span, ...]:
        """Where these assistant turns stand in the text."""
        template = self.tokenizer.get_chat_template(tools=self.tools)
        if _is_tagged(template):
            spans = self._tagged_spans(template, turns)
        else:
            spans = tuple(self._turn_span(turn) for turn in turns)
        self._check_nothing_left_out(turns)
        return spans

    def _check_roles(self) -> None:
        for turn, message in enumerate(self.messages):
            role = message["role"]
            if role not in ROLES and role not in self.tokenizer.get_chat_template(tools=self.tools):
                raise ValueError(
                    f"message {turn} has the role {role!r}, which the chat template does not name; known are "
                    f"{', '.join(sorted(ROLES))}"
                )

    def _render(self, num_messages: int, *, generation_prompt: bool) -> str:
        try:
            text = _renderer(self.tokenizer)(
                self.messages[:num_messages],
                tools=self.tools,
                add_generation_prompt=generation_prompt,
                **self.options.template_kwargs,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise ValueError(
                f"the chat template refuses the conversation's first {num_messages} messages: {error}"
            ) from error
        return check_unicode(text)

    def _tagged_spans(self, template: str, turns: Sequence[int]) -> tuple[Span, ...]:
        spans = self._tags(template, len(self.messages))
        if len(turns) == sum(message["role"] == "assistant" for message in self.messages):
            return spans
        # What a message adds to the count of tagged spans is its own.
        counts = {n: len(self._tags(template, n)) for turn in turns for n in (turn, turn + 1)}
        return tuple(span for turn in turns for span in spans[counts[turn] : counts[turn + 1]])

    def _tags(self, template: str, num_messages: int) -> tuple[Span, ...]:
        """What the template's generation tags enclose in the render of the first messages."""
        if num_messages == 0:
            return ()
        from transformers.utils.chat_template_utils import render_jinja_template

        [text], [spans] = render_jinja_template(
            [self.messages[:num_messages]],
            tools=self.tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.options.template_kwargs},
        )
        if num_messages == len(self.messages) and text != self.text:
            raise ValueError(
                "the tokenizer renders the conversation otherwise than its template says, so the template's generation tags "
                "do not say where the assistant's turns are; give another chat_template="
            )
        return tuple((start, stop) for start, stop in spans if start < stop)

    def _turn_span(self, turn: int) -> Span:
        if turn == 0:
            raise ValueError(
                "message 0 is the assistant's: what the template writes before it cannot be told from it; begin with a "
                "system or user message"
            )
        before = self._render(turn, generation_prompt=True)
        self._check_prefix(before, turn)
        through = self.text
        if turn + 1 < len(self.messages):
            through = self._render(turn + 1, generation_prompt=False)
        eos = self.tokenizer.eos_token
        if eos and through.endswith(eos) and self._closes_with(eos, turn, before):
            through = through.removesuffix(eos)
        self._check_prefix(through, turn)
        return len(before), len(through)

    def _closes_with(self, eos: str, turn: int, before: str) -> bool:
        """Whether the template ends a conversation with EOS whoever spoke last, as Phi-3's does: it is no part of a turn."""
        alone = self._render(turn, generation_prompt=False)
        return alone.endswith(eos) and not before.startswith(alone)

    def _check_prefix(self, part: str, turn: int) -> None:
        if self.text.startswith(part):
            return
        alone, within = (self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (part, self.text))
        at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, within, strict=False)))
        shown = [
            repr(self.tokenizer.decode(ids[at : at + 1])) if at < len(ids) else "the end" for ids in (alone, within)
        ]
        after = self.tokenizer.decode(within[max(0, at - 8) : at])
        raise _RewrittenHistory(
            f"the chat template renders what comes up to message {turn} (assistant) otherwise within the whole "
            f"conversation: token {at} is {shown[0]} alone and {shown[1]} within, after {after!r}"
        )

    def _check_nothing_left_out(self, turns: Sequence[int]) -> None:
        for tool in self.tools or []:
            name = tool.get("function", tool).get("name")
            if isinstance(name, str) and name not in self.text:
                raise ValueError(
                    f"the chat template leaves out the tool {name!r}; give a chat_template= that writes tools"
                )
        for turn in turns:
            message = self.messages[turn]
            reasoning = message.get(REASONING_NAMES[0], "").strip()
            if reasoning not in self.text:
                raise _RewrittenHistory(f"the chat template leaves out the reasoning of message {turn} (assistant)")
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] not in self.text:
                    raise ValueError(
                        f"the chat template leaves out message {turn}'s call of {call['function']['name']!r}; give a "
                        "chat_template= that writes tool calls"
                    )


def _normalised(messages: Any) -> list[dict[str, Any]]:
    """Messages as templates expect them: texts as contents, objects as arguments, and nothing that is null."""
    if not isinstance(messages, (list, Sequence)) or isinstance(messages, str) or not messages:
        raise ValueError("'messages' must be a list of at least one {'role': .., 'content': ..}")
    return [_normalised_message(turn, message) for turn, message in enumerate(messages)]


def _normalised_message(turn: int, message: Any) -> dict[str, Any]:
    # `dict` first: to look for a `Mapping` takes as long as the rest.
    if not isinstance(message, (dict, Mapping)) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {turn} must be an object with a 'role'; found {message!r:.80}")
    place = f"message {turn} ({message['role']})"
    # Columns of a table have nulls where JSON has no key, and templates ask for keys.
    normalised = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in normalised:
        normalised["tool_calls"] = _tool_calls(normalised["tool_calls"], place)
        if not normalised["tool_calls"]:
            del normalised["tool_calls"]
    normalised["content"] = _content(normalised.get("content", "" if "tool_calls" in normalised else None), place)
    if normalised.get("weight", 1) not in (0, 1):
        raise ValueError(f"{place} has weight {normalised['weight']!r}; wanted 0 (not trained on) or 1")
    named = [name for name in REASONING_NAMES if normalised.get(name) not in (None, "")]
    for name in named:
        if normalised[name] != normalised[named[0]] or not isinstance(normalised[name], str):
            raise ValueError(f"{place}: its {name!r} must be a text, and the only one of {', '.join(REASONING_NAMES)}")
    if named:
        normalised.update(dict.fromkeys(REASONING_NAMES, normalised[named[0]]))
    return normalised


def _content(content: Any, place: str) -> str:
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise ValueError(f"{place} has a content part of type {kind!r}; only 'text' parts become tokens")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{place} must have a text, or parts of type 'text', as its 'content'")
    return content


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, as serving engines give them to templates; OpenAI's are JSON texts."""
    if not isinstance(calls, list):
        raise ValueError(f"{place}: its 'tool_calls' must be a list; found {type(calls).__name__}")
    normalised = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{place}: a tool call must have a 'function' with a 'name'; found {call!r:.80}")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = load_json(arguments)
            except ValueError as error:
                raise ValueError(
                    f"{place}: the arguments of its call of {function['name']!r} are not JSON: {error}"
                ) from None
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{place}: the arguments of its call of {function['name']!r} must be an object")
        rest = {name: value for name, value in call.items() if value is not None} if "function" in call else {}
        normalised.append({"type": "function", **rest, "function": {**function, "arguments": arguments}})
    return normalised


def _parsed_tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        try:
            tools = load_json(tools)
        except ValueError as error:
            raise ValueError(f"'tools' is a text but not JSON: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("'tools' must be a list of JSON schemas")
    return tools
