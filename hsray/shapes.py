"""The shapes of row that datasets have: which one a row has, and the text, conversation or tokens that it stands for.

| shape | columns | becomes |
| --- | --- | --- |
| `input_ids` | input_ids; loss_mask | these tokens; without a mask, every one is trained on |
| `messages` | messages; tools | a conversation in OpenAI's words |
| `conversations` | conversations; tools, system | one in ShareGPT's: `from`, `value` |
| `instruction/output` | instruction, output; input, system | a question (with its input below it) and an answer, as chat |
| `question/answer` | question, answer; system | the same |
| `prompt/completion`, `prompt/response` | those two; system | the same; or two lists of messages, of which the second alone is trained on |
| `text` | text; completion | text as it is; with a completion, that continues it and is trained on alone |

A row has the first shape whose columns it has, null counting as absent.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hsray.chat import ChatOptions, Message, Rendered, check_unicode, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of row."""

    name: str
    needs: tuple[str, ...]
    takes: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """All it reads."""
        return (*self.needs, *self.takes)


SHAPES = (
    Shape(name="input_ids", needs=("input_ids",), takes=("loss_mask",)),
    Shape(name="messages", needs=("messages",), takes=("tools",)),
    Shape(name="conversations", needs=("conversations",), takes=("tools", "system")),
    Shape(name="instruction/output", needs=("instruction", "output"), takes=("input", "system")),
    Shape(name="question/answer", needs=("question", "answer"), takes=("system",)),
    Shape(name="prompt/completion", needs=("prompt", "completion"), takes=("system",)),
    Shape(name="prompt/response", needs=("prompt", "response"), takes=("system",)),
    Shape(name="text", needs=("text",), takes=("completion",)),
)

#: A row's own id is in the first of these that it has.
ID_COLUMNS = ("prompt_id", "id")

#: What `columns` may give another name.
COLUMN_NAMES = frozenset(name for shape in SHAPES for name in shape.columns) | {"id"}

#: ShareGPT's speakers, as chat templates call them.
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTokens:
    """A row that is tokens already."""

    input_ids: list[int]
    loss_mask: list[bool]


def check_columns(columns: Mapping[str, str]) -> None:
    """Raises ValueError for column names that `find_shape` could not use."""
    for name, column in columns.items():
        if name not in COLUMN_NAMES or not isinstance(column, str):
            raise ValueError(
                f"columns={name!r}: {column!r} is not known; it names columns for {', '.join(sorted(COLUMN_NAMES))}"
            )
    if not _shapes_of(columns):
        raise ValueError(f"columns={dict(columns)!r}: no shape of row has all of these columns; see hsray.shapes")


def find_shape(row: Mapping[str, Any], columns: Mapping[str, str]) -> Shape:
    """The row's shape.

    Args:
        columns: What the row calls the columns of a shape, where not by their own name; only shapes that have all of these
            are looked for.

    Raises:
        ValueError: it has none; its columns are named.
    """
    shapes = _shapes_of(columns)
    for shape in shapes:
        for name in shape.needs:
            if row.get(columns.get(name, name)) is None:
                break
        else:
            return shape
    found = [name if row[name] is not None else f"{name} (null)" for name in sorted(row)]
    wanted = ", ".join(" and ".join(repr(columns.get(name, name)) for name in shape.needs) for shape in shapes)
    raise ValueError(
        f"has the columns of no known shape of row ({wanted}); found {found}: rename some, or pass columns="
    )


def read_row(
    row: Mapping[str, Any],
    shape: Shape,
    columns: Mapping[str, str],
    tokenizer: "PreTrainedTokenizerBase | None",
    options: ChatOptions,
) -> GivenTokens | list[Rendered]:
    """What a row of a shape stands for; several texts where its conversation had to be split.

    Raises:
        ValueError: a column's value is not what it must be, or the chat template refuses the conversation.
    """
    values = {name: row.get(columns.get(name, name)) for name in shape.columns}
    if shape.name == "input_ids":
        return _given_tokens(values["input_ids"], values["loss_mask"])
    if row.get("loss_mask") is not None and "loss_mask" not in columns.values():
        raise ValueError(
            f"has a 'loss_mask', which goes with 'input_ids'; the mask of a row of shape {shape.name!r} is made: leave it out"
        )
    if tokenizer is None:
        raise ValueError("the model's folder has no tokenizer; give 'input_ids', or a model with one")
    if shape.name == "text":
        return [_plain_text(values["text"], values["completion"])]
    if shape.name == "messages":
        messages = values["messages"]
    elif shape.name == "conversations":
        messages = _from_sharegpt(values["conversations"])
    else:
        messages = _from_pair(values, shape, tokenizer)
    if values.get("system"):
        messages = [{"role": "system", "content": _text("system", values["system"])}, *messages]
    return render_chat(tokenizer, messages, tools=values.get("tools"), options=options)


def own_id(row: Mapping[str, Any], columns: Mapping[str, str]) -> str | None:
    """The row's own id, if it has one.

    Raises:
        ValueError: it is no text or integer, or begins with "#", as do ids made of content; or `columns` names it, and it is
            not there.
    """
    names = (columns["id"],) if "id" in columns else ID_COLUMNS
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        if "id" in columns:
            raise ValueError(f"has no {columns['id']!r}, which columns= names as its id; found {sorted(row)}")
        return None
    if type(row[name]) not in (str, int) or row[name] == "":
        raise ValueError(f"its {name} {row[name]!r} must be a text or an integer; give it another, or none")
    given = check_unicode(str(row[name]))
    if given.startswith("#"):
        raise ValueError(f"its id {given!r} begins with '#', as do ids made of content; give it another")
    return given


def _shapes_of(columns: Mapping[str, str]) -> tuple[Shape, ...]:
    return _shapes_with(frozenset(columns) - {"id"})


@functools.cache
def _shapes_with(columns: frozenset[str]) -> tuple[Shape, ...]:
    return tuple(shape for shape in SHAPES if columns <= set(shape.columns))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name!r} must be a text; found {type(value).__name__}")
    return check_unicode(value)


def _given_tokens(input_ids: Any, loss_mask: Any) -> GivenTokens:
    if not isinstance(input_ids, list) or any(type(token) is not int for token in input_ids):
        raise ValueError("'input_ids' must be a list of integers")
    if loss_mask is None:
        return GivenTokens(input_ids=input_ids, loss_mask=[True] * len(input_ids))
    if not isinstance(loss_mask, list) or len(loss_mask) != len(input_ids) or any(m not in (0, 1) for m in loss_mask):
        raise ValueError(f"'loss_mask' must be {len(input_ids)} values of 0 or 1, one for each of 'input_ids'")
    return GivenTokens(input_ids=input_ids, loss_mask=[bool(value) for value in loss_mask])


def _plain_text(text: Any, completion: Any) -> Rendered:
    text = _text("text", text)
    if completion is None:
        return Rendered(text=text, spans=None, add_special_tokens=True)
    whole = text + _text("completion", completion)
    return Rendered(text=whole, spans=((len(text), len(whole)),), add_special_tokens=True)


def _from_sharegpt(conversation: Any) -> list[Message]:
    if not isinstance(conversation, list) or not conversation:
        raise ValueError("'conversations' must be a list of at least one {'from': .., 'value': ..}")
    if all(isinstance(turn, Mapping) and turn.get("role") is not None for turn in conversation):
        return conversation  # OpenAI's words under ShareGPT's name
    messages = []
    for number, turn in enumerate(conversation):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            raise ValueError(
                f"turn {number} of 'conversations' must have a 'from' and a text as 'value'; found {turn!r:.80}"
            )
        speaker = turn.get("from")
        if speaker not in SHAREGPT_ROLES:
            raise ValueError(
                f"turn {number} of 'conversations' is from {speaker!r}; known are {', '.join(SHAREGPT_ROLES)}"
            )
        messages.append({"role": SHAREGPT_ROLES[speaker], "content": turn["value"]})
    return messages


def _from_pair(values: Mapping[str, Any], shape: Shape, tokenizer: "PreTrainedTokenizerBase") -> list[Message]:
    """A question and its answer, as a conversation of two."""
    asked, answered = shape.needs
    if isinstance(values[asked], list) and all(isinstance(message, Mapping) for message in values[asked]):
        answer = values[answered]
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        if not isinstance(answer, list):
            raise ValueError(f"{answered!r} must be a text or a list of messages; found {type(answer).__name__}")
        return [*({**message, "weight": 0} for message in values[asked]), *answer]
    question, answer = _text(asked, values[asked]), _text(answered, values[answered])
    special = next((token for token in tokenizer.all_special_tokens if token in question), None)
    if special is not None:
        raise ValueError(
            f"its {asked!r} holds {special!r}, so it is rendered already, and as chat it would be so twice; for text that "
            f"is taken as it is, pass columns={{'text': {asked!r}, 'completion': {answered!r}}}"
        )
    if values.get("input"):
        question = f"{question}\n\n{_text('input', values['input'])}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
