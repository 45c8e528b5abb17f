"""A row becomes the prompt that it says, whatever its shape, and a row that cannot is named with its file and line."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hsray.chat import tokenize_chat
from hsray.plan import Plan, PlanOptions, write_plan
from hsray.prompts import PROMPTS_SCHEMA, PromptOptions, tokenize_batch
from hsray.shapes import check_columns
from hsray.sources import PromptError, in_tables, list_rows, read_file
from hsray.store import Store
from tests.chats import VOCAB_SIZE, assistant, chat_options, prompt_options, runs_of, user


@pytest.fixture(scope="module")
def options(demo_model: Path) -> PromptOptions:
    return prompt_options(demo_model)


PLAN_OPTIONS = PlanOptions(bytes_per_token=8, value_bytes_per_token=8, shard_bytes=100, duplicates="keep")


def prompts_of(dataset: list | Path, options: PromptOptions) -> list[dict]:
    """A list's or a file's, as a worker makes them."""
    rows = list_rows(dataset) if isinstance(dataset, list) else in_tables(read_file(str(dataset), None))
    return tokenize_batch(pa.concat_tables(rows), options=options).to_pylist()


def planned(dataset: list | Path, options: PromptOptions, out: Path) -> Plan:
    return write_plan(
        [pa.Table.from_pylist(prompts_of(dataset, options), schema=PROMPTS_SCHEMA)], Store(out), PLAN_OPTIONS
    )


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]

GOOD_ROWS = [
    {"text": "Once upon a time"},
    {"messages": MESSAGES},
    {"input_ids": [5, 6, 7]},
    {"input_ids": [5, 6, 7], "loss_mask": [0, 1, True]},
    {"id": "a17", "text": "Once upon a time"},
    {"prompt_id": "b3", "id": "not this", "text": "x"},
    {"id": 12, "text": "y"},
    {"text": "no", "input_ids": [1], "messages": None},
    {"text": "no", "messages": MESSAGES, "input_ids": None, "unknown": {"a": [1]}},
    {"input_ids": [0, VOCAB_SIZE - 1]},
    {"input_ids": [1] * 64},
]


@pytest.fixture(scope="module")
def prompts(options: PromptOptions) -> list[dict]:
    return prompts_of(GOOD_ROWS, options)


class TestPrompts:
    """What a row's prompt is."""

    def test_tokens_and_masks_are_those_of_the_row(self, prompts: list[dict], demo_tokenizer):
        [chat] = tokenize_chat(demo_tokenizer, MESSAGES, options=chat_options())
        texts = [demo_tokenizer(text)["input_ids"] for text in ("Once upon a time", "x", "y")]
        story, x, y = [(input_ids, [True] * len(input_ids)) for input_ids in texts]
        assert [prompt["error"] for prompt in prompts] == [None] * len(GOOD_ROWS)
        assert [(prompt["input_ids"], prompt["loss_mask"]) for prompt in prompts] == [
            story,
            chat,
            ([5, 6, 7], [True, True, True]),
            ([5, 6, 7], [False, True, True]),
            story,
            x,
            y,
            ([1], [True]),
            chat,
            ([0, VOCAB_SIZE - 1], [True, True]),
            ([1] * 64, [True] * 64),
        ]
        assert {prompt["dropped"] for prompt in prompts} == {None}

    def test_a_rows_own_id_is_kept(self, prompts: list[dict]):
        assert [prompts[index]["prompt_id"] for index in (4, 5, 6)] == ["a17", "b3", "12"]

    def test_without_one_the_id_is_that_of_tokens_and_mask(self, prompts: list[dict]):
        ids = [prompt["prompt_id"] for prompt in prompts]
        assert all(ids[index].startswith("#") for index in (0, 1, 2, 3, 7, 8))
        assert ids[1] == ids[8]
        assert len({ids[0], ids[1], ids[2], ids[3], ids[7]}) == 5

    def test_a_model_without_a_tokenizer_serves_token_ids_alone(self, options: PromptOptions, tiny_llama: Path):
        rows = [{"input_ids": [1, 2]}, {"text": "a"}, {"messages": MESSAGES}]
        found = prompts_of(rows, replace(options, model=str(tiny_llama)))
        error = "the model's folder has no tokenizer; give 'input_ids', or a model with one"
        assert [prompt["error"] for prompt in found] == [None, error, error]

    def test_a_prompt_over_max_tokens_is_kept_to_be_dropped_where_that_is_allowed(self, options: PromptOptions):
        rows = [{"id": "just", "input_ids": [1] * 64}, {"id": "over", "input_ids": [1] * 65}]
        just, over = prompts_of(rows, replace(options, too_long="drop"))
        assert (just["dropped"], just["error"]) == (None, None)
        assert (over["dropped"], over["error"], over["prompt_id"]) == ("65 tokens, over max_tokens=64", None, "over")

    def test_a_prompt_is_shortened_only_where_that_is_asked_for(self, options: PromptOptions):
        rows = [{"id": "a", "input_ids": list(range(70)), "loss_mask": [0] * 60 + [1] * 10}]
        [dropped] = prompts_of(rows, replace(options, too_long="drop"))
        assert len(dropped["input_ids"]) == 70
        [cut] = prompts_of(rows, replace(options, too_long="truncate"))
        assert (cut["input_ids"], cut["loss_mask"]) == (list(range(64)), [False] * 60 + [True] * 4)
        assert (cut["truncated"], cut["dropped"], cut["error"]) == (True, None, None)

    def test_a_shortened_prompt_of_which_nothing_trained_is_left_is_dropped(self, options: PromptOptions):
        rows = [{"id": "a", "input_ids": list(range(70)), "loss_mask": [0] * 64 + [1] * 6}]
        [prompt] = prompts_of(rows, replace(options, too_long="truncate"))
        assert prompt["dropped"] == "70 tokens, of which none of the first max_tokens=64 is trained on"
        assert (prompt["truncated"], len(prompt["input_ids"])) == (False, 70)

    @pytest.mark.parametrize("policy", ["error", "drop", "keep"])
    def test_an_untrained_prompt_is_an_error_dropped_or_kept_as_was_said(self, options: PromptOptions, policy: str):
        rows = [{"id": "a", "messages": [user("Hi")]}]
        [prompt] = prompts_of(rows, replace(options, untrained=policy))
        num_tokens = 0 if policy == "error" else len(prompt["input_ids"])
        error = "no token of it is trained on: all 27 of its loss mask are 0; pass untrained='drop' or 'keep'"
        assert prompt["error"] == (error if policy == "error" else None)
        assert prompt["dropped"] == ("no token of it is trained on" if policy == "drop" else None)
        assert (num_tokens > 0) == (policy != "error")

    def test_a_kept_untrained_prompt_that_is_too_long_is_shortened(self, options: PromptOptions):
        rows = [{"input_ids": [1] * 70, "loss_mask": [0] * 70}]
        [prompt] = prompts_of(rows, replace(options, too_long="truncate", untrained="keep"))
        assert (prompt["truncated"], prompt["dropped"], len(prompt["input_ids"])) == (True, None, 64)

    def test_a_conversation_that_is_split_makes_a_prompt_for_each_answer(self, options: PromptOptions, tmp_path: Path):
        template = (
            "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}\n{% endif %}{% endfor %}"
        )
        changed = replace(options, chat_template=template, chat=chat_options(rewritten_history="split"))
        chat = [user("a"), assistant("b"), user("c"), assistant("d")]
        rows = [{"id": "x", "messages": chat}, {"messages": chat}, {"messages": chat[:2]}]
        found = prompts_of(rows, changed)
        assert [prompt["error"] for prompt in found] == [None] * 5
        assert [prompt["prompt_id"] for prompt in found[:2]] == ["x@1", "x@3"]
        assert [prompt["prompt_id"][0] for prompt in found[2:]] == ["#"] * 3
        assert found[2]["prompt_id"] == found[4]["prompt_id"] != found[3]["prompt_id"]
        assert [prompt["row_digest"] is None for prompt in found] == [False, True, False, True, False]
        plan, unsplit = planned(rows, changed, tmp_path / "split"), planned(rows, options, tmp_path / "whole")
        assert plan.prompts_digest == unsplit.prompts_digest


IN_ANY_SHAPE: list[tuple[dict, dict]] = [
    ({"messages": MESSAGES}, {}),
    ({"messages": MESSAGES, "text": "no", "prompt": "no", "completion": "no"}, {}),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}, {}),
    ({"conversations": MESSAGES}, {}),
    ({"instruction": "Hi", "input": "", "output": "Hello!"}, {}),
    ({"instruction": "Hi", "output": "Hello!"}, {}),
    ({"question": "Hi", "answer": "Hello!"}, {}),
    ({"prompt": "Hi", "completion": "Hello!"}, {}),
    ({"prompt": "Hi", "response": "Hello!"}, {}),
    ({"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}, {}),
    ({"prompt": MESSAGES[:1], "completion": "Hello!"}, {}),
    ({"query": "Hi", "reply": "Hello!"}, {"question": "query", "answer": "reply"}),
    ({"chat": MESSAGES, "messages": "no"}, {"messages": "chat"}),
    ({"messages": "no", "question": "Hi", "answer": "Hello!"}, {"question": "question"}),
]


def test_one_conversation_is_the_same_prompt_in_any_shape(options: PromptOptions, demo_tokenizer):
    [wanted] = tokenize_chat(demo_tokenizer, MESSAGES, options=chat_options())
    for row, columns in IN_ANY_SHAPE:
        [prompt] = prompts_of([row], replace(options, columns=columns))
        assert prompt["error"] is None, row
        assert (prompt["input_ids"], prompt["loss_mask"]) == wanted, row


@pytest.mark.parametrize(
    ("row", "columns", "runs"),
    [
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, {}, "«user\nAdd.\n\n1, 2»"),
        ({"system": "Be brief.", "question": "Hi", "answer": "Yo"}, {}, "«system\nBe brief.»"),
        ({"system": "Be brief.", "conversations": [{"from": "human", "value": "a"}]}, {}, "«system\nBe brief.»"),
    ],
)
def test_what_else_a_shape_has_is_in_the_prompt(options: PromptOptions, demo_tokenizer, row, columns, runs):
    [prompt] = prompts_of([row], replace(options, columns=columns, untrained="keep"))
    text = demo_tokenizer.decode(prompt["input_ids"]).replace("<|im_start|>", "«").replace("<|im_end|>", "»")
    assert runs in text


def test_a_plain_completion_continues_its_text_and_is_trained_on_alone(options: PromptOptions, demo_tokenizer):
    rows = [{"text": "Once upon", "completion": " a time"}]
    pair = {"prompt": "<|im_start|>user\nHi<|im_end|>\n", "completion": "Hello!"}
    [plain] = prompts_of(rows, options)
    assert runs_of(demo_tokenizer, plain["input_ids"], plain["loss_mask"]) == [(False, "Once upon"), (True, " a time")]
    [refused] = prompts_of([pair], options)
    assert refused["error"].startswith("its 'prompt' holds '<|im_start|>', so it is rendered already")
    [taken] = prompts_of([pair], replace(options, columns={"text": "prompt", "completion": "completion"}))
    assert runs_of(demo_tokenizer, taken["input_ids"], taken["loss_mask"]) == [
        (False, pair["prompt"]),
        (True, "Hello!"),
    ]


def test_answers_within_a_prompt_of_messages_are_not_trained_on(options: PromptOptions, demo_tokenizer):
    row = {"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d")]}
    [prompt] = prompts_of([row], options)
    trained = [text for on, text in runs_of(demo_tokenizer, prompt["input_ids"], prompt["loss_mask"]) if on]
    assert trained == ["d<|im_end|>\n"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"messges": "chat"}, "columns='messges': 'chat' is not known; it names columns for answer, completion"),
        ({"text": 7}, "columns='text': 7 is not known"),
        ({"text": "a", "question": "b"}, "no shape of row has all of these columns"),
    ],
)
def test_columns_that_name_nothing_are_an_error(columns, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_columns(columns)


def test_an_id_may_be_in_a_column_of_another_name(options: PromptOptions):
    rows = [{"uuid": "a", "id": "no", "text": "x"}, {"id": "b", "text": "x"}]
    named, missing = prompts_of(rows, replace(options, columns={"id": "uuid"}))
    assert named["prompt_id"] == "a"
    assert missing["error"] == "has no 'uuid', which columns= names as its id; found ['id', 'text']"


NO_COLUMN = (
    "has the columns of no known shape of row ('input_ids', 'messages', 'conversations', 'instruction' and 'output', "
    "'question' and 'answer', 'prompt' and 'completion', 'prompt' and 'response', 'text'); found {}: rename some, or pass "
    "columns="
)
NO_INTEGERS = "'input_ids' must be a list of integers"
EMPTY = "an empty prompt: it has no tokens; remove the row"
VOCABULARY = (
    f"token id {{}} is outside the model's vocabulary 0..{VOCAB_SIZE - 1}; was it made with another model's tokenizer?"
)
MASK = "'loss_mask' must be {} values of 0 or 1, one for each of 'input_ids'"
CONTENT = "message {} must have a text, or parts of type 'text', as its 'content'"
UNTRAINED = "no token of it is trained on: all {} of its loss mask are 0; pass untrained='drop' or 'keep'"
MESSAGES_WANTED = "'messages' must be a list of at least one {'role': .., 'content': ..}"

TWICE = "an object has the key '{}' twice, and only one value can be meant: leave one out"

#: A line of a JSONL file, and the whole error it gives; more lines with the results of `IN_ANY_SHAPE` and `GOOD_ROWS`.
ODD_LINES: list[tuple[str | bytes, str]] = [
    (
        '{"text": "a", "loss_mask": [1]}',
        "has a 'loss_mask', which goes with 'input_ids'; the mask of a row of shape 'text' is made: leave it out",
    ),
    (
        '{"text": "a"',
        "not JSON: Expecting ',' delimiter: line 1 column 13 (char 12); each line must be one JSON object",
    ),
    (
        "[" * 100_000,
        "not JSON: maximum recursion depth exceeded while decoding a JSON array from a unicode string; each line must be one "
        "JSON object",
    ),
    ('{"text": "a", "id": 1, "text": "b"}', TWICE.format("text")),
    ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', TWICE.format("content")),
    (
        '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '
        '"{\\"x\\": 1, \\"x\\": 2}"}}]}]}',
        "message 0 (assistant): the arguments of its call of 'f' are not JSON: " + TWICE.format("x"),
    ),
    ("hello", "not JSON: Expecting value: line 1 column 1 (char 0); each line must be one JSON object"),
    (
        '{"text": "a"} {"text": "b"}',
        "not JSON: Extra data: line 1 column 15 (char 14); each line must be one JSON object",
    ),
    (b'{"text": "a"}\xff', "not UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 13: invalid start byte"),
    ('["text", "a"]', 'a row must be a JSON object; found ["text", "a"]'),
    ('"text"', 'a row must be a JSON object; found "text"'),
    ("{}", NO_COLUMN.format([])),
    ('{"prompt": "a", "body": 1}', NO_COLUMN.format(["body", "prompt"])),
    ('{"text": null, "messages": null}', NO_COLUMN.format(["messages (null)", "text (null)"])),
    ('{"text": ""}', EMPTY),
    ('{"input_ids": []}', EMPTY),
    ('{"text": 5}', "'text' must be a text; found int"),
    ('{"text": ["a"]}', "'text' must be a text; found list"),
    (f'{{"input_ids": [1, {VOCAB_SIZE}]}}', VOCABULARY.format(VOCAB_SIZE)),
    ('{"input_ids": [1, -1, 99999]}', VOCABULARY.format(-1)),
    ('{"input_ids": [99999999999999999999]}', VOCABULARY.format(99999999999999999999)),
    ('{"input_ids": [1, 2.0]}', NO_INTEGERS),
    ('{"input_ids": [true, 2]}', NO_INTEGERS),
    ('{"input_ids": ["1"]}', NO_INTEGERS),
    ('{"input_ids": [[1, 2]]}', NO_INTEGERS),
    ('{"input_ids": "1 2"}', NO_INTEGERS),
    ('{"input_ids": 7}', NO_INTEGERS),
    ('{"input_ids": [1, 2], "loss_mask": [1]}', MASK.format(2)),
    ('{"input_ids": [1, 2], "loss_mask": [1, 1, 1]}', MASK.format(2)),
    ('{"input_ids": [1, 2], "loss_mask": [1, 2]}', MASK.format(2)),
    ('{"input_ids": [1, 2], "loss_mask": [1, null]}', MASK.format(2)),
    ('{"input_ids": [1, 2], "loss_mask": "01"}', MASK.format(2)),
    ('{"messages": []}', MESSAGES_WANTED),
    ('{"messages": {"role": "user", "content": "a"}}', MESSAGES_WANTED),
    ('{"messages": ["a"]}', "message 0 must be an object with a 'role'; found 'a'"),
    ('{"messages": [{"role": "user"}]}', CONTENT.format("0 (user)")),
    (
        '{"messages": [{"role": 7, "content": "a"}]}',
        "message 0 must be an object with a 'role'; found {'role': 7, 'content': 'a'}",
    ),
    ('{"messages": [{"role": "user", "content": {"text": "a"}}]}', CONTENT.format("0 (user)")),
    (
        '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        "message 0 (user) has a content part of type 'image_url'; only 'text' parts become tokens",
    ),
    ('{"messages": [{"role": "user", "content": "a"}]}', UNTRAINED.format(27)),
    ('{"input_ids": [1, 2], "loss_mask": [0, 0]}', UNTRAINED.format(2)),
    (
        '{"messages": [{"role": "assistant", "content": "a"}]}',
        "message 0 is the assistant's: what the template writes before it cannot be told from it; begin with a system or user "
        "message",
    ),
    (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": "{"}',
        "'tools' is a text but not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ),
    (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": [1]}',
        "'tools' must be a list of JSON schemas",
    ),
    ('{"conversations": []}', "'conversations' must be a list of at least one {'from': .., 'value': ..}"),
    ('{"conversations": "Hi"}', "'conversations' must be a list of at least one {'from': .., 'value': ..}"),
    (
        '{"conversations": [{"from": "human"}]}',
        "turn 0 of 'conversations' must have a 'from' and a text as 'value'; found {'from': 'human'}",
    ),
    (
        '{"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "b"}]}',
        "turn 1 of 'conversations' is from 'function_call'; known are human, user, gpt, assistant, chatgpt, bing, bard, system, "
        "tool, observation, function_response",
    ),
    ('{"instruction": "a", "input": "b"}', NO_COLUMN.format(["input", "instruction"])),
    ('{"instruction": ["a"], "output": "b"}', "'instruction' must be a text; found list"),
    ('{"instruction": "a", "input": 7, "output": "b"}', "'input' must be a text; found int"),
    ('{"question": "a", "answer": 7}', "'answer' must be a text; found int"),
    ('{"question": "a", "answer": null}', NO_COLUMN.format(["answer (null)", "question"])),
    ('{"question": "a", "answer": "b", "system": 7}', "'system' must be a text; found int"),
    ('{"prompt": "a"}', NO_COLUMN.format(["prompt"])),
    ('{"prompt": ["a"], "completion": "b"}', "'prompt' must be a text; found list"),
    (
        '{"prompt": [{"role": "user", "content": "a"}], "completion": 7}',
        "'completion' must be a text or a list of messages; found int",
    ),
    (
        '{"prompt": "<|im_start|>user", "response": "b"}',
        "its 'prompt' holds '<|im_start|>', so it is rendered already, and as chat it would be so twice; for text that is taken as "
        "it is, pass columns={'text': 'prompt', 'completion': 'response'}",
    ),
    ('{"text": "a", "completion": 7}', "'completion' must be a text; found int"),
    ('{"text": "a", "completion": ""}', UNTRAINED.format(1)),
    ('{"text": "a", "id": ""}', "its id '' must be a text or an integer; give it another, or none"),
    ('{"text": "a", "id": 1.5}', "its id 1.5 must be a text or an integer; give it another, or none"),
    ('{"text": "a", "prompt_id": true}', "its prompt_id True must be a text or an integer; give it another, or none"),
    ('{"text": "a", "id": "#1"}', "its id '#1' begins with '#', as do ids made of content; give it another"),
    (
        json.dumps({"input_ids": [1] * 65}),
        "65 tokens, over max_tokens=64; shorten it, or pass too_long='drop' or 'truncate'",
    ),
]


@pytest.fixture(scope="module")
def odd_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The odd lines, a good one before each."""
    path = tmp_path_factory.mktemp("odd") / "odd.jsonl"
    odd = [line if isinstance(line, bytes) else line.encode() for line, _ in ODD_LINES]
    path.write_bytes(b"".join(b'{"input_ids": [1]}\n' + line + b"\n" for line in odd))
    return path


@pytest.fixture(scope="module")
def odd_prompts(odd_file: Path, options: PromptOptions) -> list[dict]:
    return prompts_of(odd_file, options)


@pytest.mark.parametrize("number", range(len(ODD_LINES)), ids=[str(line)[:60] for line, _ in ODD_LINES])
def test_an_odd_row_gives_its_error_at_its_line(odd_prompts, odd_file, number):
    prompt, error = odd_prompts[2 * number + 1], ODD_LINES[number][1]
    assert (prompt["source"], prompt["error"]) == (f"{odd_file}:{2 * number + 2}", error)
    assert (prompt["prompt_id"], prompt["input_ids"], prompt["loss_mask"]) == (None, None, None)


def test_an_odd_row_disturbs_no_other(odd_prompts):
    assert len(odd_prompts) == 2 * len(ODD_LINES)
    assert {prompt["error"] for prompt in odd_prompts[::2]} == {None}
    assert all(prompt["input_ids"] == [1] for prompt in odd_prompts[::2])


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "a\xffb"}',
        b'{"text": "a\xc3"}',
        b'{"id": "a\xff", "input_ids": [1]}',
        rb'{"text": "\ud800"}',
        rb'{"id": "\ud800", "input_ids": [1]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
    ],
)
def test_a_text_that_is_no_unicode_is_an_error_at_its_line(tmp_path, options, line):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'{"input_ids": [1]}\n' + line + b"\n")
    good, bad = prompts_of(path, options)
    assert good["error"] is None
    assert bad["source"] == f"{path}:2"
    assert bad["error"]


def test_bytes_are_no_text(tmp_path, options):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"text": b"hello"}]), path)
    [from_file], [from_list] = prompts_of(path, options), prompts_of([{"text": b"hello"}], options)
    assert from_file["source"] == f"{path}: row 0"
    assert from_file["error"] and from_list["error"]


def test_the_first_odd_row_ends_the_plan_and_is_named(odd_file, options, tmp_path):
    with pytest.raises(ValueError) as caught:
        planned(odd_file, options, tmp_path / "out")
    assert str(caught.value) == f"{odd_file}:2: {ODD_LINES[0][1]}"


@pytest.mark.parametrize("ids", [["a", "b", "a"], ["#a", "b", "#a"], [7, 8, "7"], ["#a", "#a-2", "#a"]])
def test_one_own_id_for_two_rows_ends_the_plan(options, tmp_path, ids):
    rows = [{"id": own_id, "input_ids": [number]} for number, own_id in enumerate(ids)]
    with pytest.raises(PromptError, match=r"^dataset\[\d\]: .*id"):
        planned(rows, options, tmp_path / "out")


def test_prompts_have_the_schema_that_the_plan_wants(options):
    assert tokenize_batch(list_rows([{"input_ids": [1]}])[0], options=options).schema.equals(PROMPTS_SCHEMA)
