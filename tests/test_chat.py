"""What is trained is exactly what the assistant says, with the end of its turn; anything doubtful is refused."""

import copy
import json
import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hsray.chat import check_template_kwargs, tokenize_chat
from hsray.tokens import Rendered, tokenize
from tests.chats import assistant, chat_options, decoded_runs, shown, system, trained_texts, user, with_template

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def test_one_turn_is_trained_from_its_first_word_to_the_end_of_its_turn(demo_tokenizer):
    assert decoded_runs(demo_tokenizer, [user("What is 2 + 2?"), assistant("It is 4.")]) == [
        (False, SYSTEM + "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "It is 4.<|im_end|>\n"),
    ]


def test_every_assistant_turn_is_trained_and_nothing_between(demo_tokenizer):
    messages = [system("Be brief."), user("Hi"), assistant("Hello!"), user("Bye"), assistant("See you."), user("?")]
    assert decoded_runs(demo_tokenizer, messages) == [
        (False, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Hello!<|im_end|>\n"),
        (False, "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"),
        (True, "See you.<|im_end|>\n"),
        (False, "<|im_start|>user\n?<|im_end|>\n"),
    ]


@pytest.mark.parametrize(
    ("messages", "texts"),
    [
        ([user("Say it."), assistant("Yes")], ["Yes<|im_end|>\n"]),
        ([user("Say it."), assistant("")], ["<|im_end|>\n"]),
        ([user("Say it."), assistant("One."), assistant("Two.")], ["One.<|im_end|>\n", "Two.<|im_end|>\n"]),
        ([system("You start."), assistant("Welcome.")], ["Welcome.<|im_end|>\n"]),
        (
            [user("你好 🙂"), assistant("Žluťoučký kůň 👩‍👩‍👧 e\u0301 \u202eabc")],
            ["Žluťoučký kůň 👩‍👩‍👧 e\u0301 \u202eabc<|im_end|>\n"],
        ),
        ([user("x"), assistant("def f():\n\n\treturn 1\n\n")], ["def f():\n\n\treturn 1\n\n<|im_end|>\n"]),
        ([user("Nobody answers.")], []),
        ([user("a"), {"role": "tool", "content": "42"}, assistant("b")], ["b<|im_end|>\n"]),
    ],
)
def test_trained_text_is_the_assistants_own(demo_tokenizer, messages, texts):
    assert trained_texts(demo_tokenizer, messages) == texts


def test_a_conversation_begun_by_the_assistant_never_trains_the_templates_system_prompt(demo_tokenizer):
    try:
        texts = trained_texts(demo_tokenizer, [assistant("How can I help?"), user("Hi"), assistant("Hi!")])
    except ValueError as error:
        assert "message 0" in str(error)
    else:
        assert texts == ["How can I help?<|im_end|>\n", "Hi!<|im_end|>\n"]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(lambda text: not text[:1].isspace())


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_any_text_is_trained_whole_and_alone(demo_tokenizer, pairs):
    messages = [message for asked, said in pairs for message in (user(asked), assistant(said))]
    whole = SYSTEM + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assume(demo_tokenizer.decode(demo_tokenizer(whole)["input_ids"]) == whole)  # SmolLM2 has no token for the byte 0xF1
    runs = decoded_runs(demo_tokenizer, messages)
    assert "".join(text for _, text in runs) == whole
    assert [text for trained, text in runs if trained] == [f"{said}<|im_end|>\n" for _, said in pairs]


def test_a_token_that_holds_the_end_of_the_header_and_the_begin_of_the_answer_is_trained(demo_tokenizer):
    assert decoded_runs(demo_tokenizer, [user("Indent."), assistant("    indented")]) == [
        (False, SYSTEM + "<|im_start|>user\nIndent.<|im_end|>\n<|im_start|>assistant"),
        (True, "\n    indented<|im_end|>\n"),
    ]


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
DROPS_EARLIER_ANSWERS = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}" + TURN + "{% endif %}{% endfor %}" + GENERATION
)
COUNTS_MESSAGES = "{{ messages | length }} messages\n{% for m in messages %}" + TURN + "{% endfor %}" + GENERATION
ENDS_WITH_EOS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if loop.last and not add_generation_prompt %}<|endoftext|>"
    "{% else %}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "token", "alone", "within"),
    [
        (DROPS_EARLIER_ANSWERS, 7, "'ass'", "'user'"),
        (COUNTS_MESSAGES, 0, "'1'", "'4'"),
        (ENDS_WITH_EOS, 8, "'<|endoftext|>'", "'<|im_end|>'"),
    ],
)
def test_a_template_that_rewrites_history_is_refused_at_the_first_token_that_differs(
    demo_tokenizer, template, token, alone, within
):
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    with pytest.raises(ValueError, match=r"up to message 1 \(assistant\) otherwise") as caught:
        tokenize_chat(with_template(demo_tokenizer, template), messages, options=chat_options())
    assert f"token {token} is {alone} alone and {within} within, after " in str(caught.value)
    assert "; pass rewritten_history='split'" in str(caught.value)


def test_a_template_that_drops_earlier_answers_serves_the_last(demo_tokenizer):
    tokenizer = with_template(demo_tokenizer, DROPS_EARLIER_ANSWERS)
    assert trained_texts(tokenizer, [user("a"), assistant("b")]) == ["b<|im_end|>\n"]
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    assert shown(tokenizer, messages, train_on="last") == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n«d<|im_end|>\n»"
    )


def test_a_conversation_whose_history_is_rewritten_is_split_where_that_is_asked_for(demo_tokenizer):
    tokenizer = with_template(demo_tokenizer, DROPS_EARLIER_ANSWERS)
    messages = [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    assert shown(tokenizer, messages, rewritten_history="split") == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«b<|im_end|>\n»",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n«d<|im_end|>\n»",
    ]


def test_a_conversation_whose_history_stands_is_not_split(demo_tokenizer):
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    [whole] = tokenize_chat(demo_tokenizer, messages, options=chat_options())
    assert tokenize_chat(demo_tokenizer, messages, options=chat_options(rewritten_history="split")) == [whole]


def test_a_template_that_leaves_the_turn_itself_out_cannot_be_split_either(demo_tokenizer):
    tokenizer = with_template(
        demo_tokenizer,
        "{% for m in messages %}{% if m.role == 'user' %}" + TURN + "{% endif %}{% endfor %}" + GENERATION,
    )
    with pytest.raises(ValueError, match="even where the conversation ends with it: give another chat_template="):
        tokenize_chat(tokenizer, [user("a"), assistant("b")], options=chat_options(rewritten_history="split"))


def test_the_last_answer_alone_is_trained_where_that_is_asked_for(demo_tokenizer):
    messages = [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    assert trained_texts(demo_tokenizer, messages, train_on="last") == ["d<|im_end|>\n"]


def test_an_answer_of_weight_0_is_not_trained(demo_tokenizer):
    messages = [user("a"), assistant("b", weight=0), user("c"), assistant("d", weight=1)]
    assert trained_texts(demo_tokenizer, messages) == ["d<|im_end|>\n"]
    assert trained_texts(demo_tokenizer, [user("a"), assistant("b", weight=0)]) == []


TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{%- generation -%}{{ m.content }}<|im_end|>{%- endgeneration -%}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    + GENERATION
)


class TestGenerationTags:
    """A template that says what the assistant wrote is taken at its word."""

    MESSAGES = [user("a"), assistant("b 🙂"), user("c"), assistant("d")]

    def test_what_they_enclose_is_trained(self, demo_tokenizer):
        tokenizer = with_template(demo_tokenizer, TAGGED)
        assert shown(tokenizer, self.MESSAGES) == (
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«b 🙂<|im_end|>»\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n«d<|im_end|>»\n"
        )

    def test_a_conversation_may_begin_with_an_answer(self, demo_tokenizer):
        messages = [assistant("b"), user("c"), assistant("d")]
        assert trained_texts(with_template(demo_tokenizer, TAGGED), messages) == ["b<|im_end|>", "d<|im_end|>"]

    def test_of_the_last_answer_alone(self, demo_tokenizer):
        tokenizer = with_template(demo_tokenizer, TAGGED)
        assert trained_texts(tokenizer, self.MESSAGES, train_on="last") == ["d<|im_end|>"]

    def test_but_for_an_answer_of_weight_0(self, demo_tokenizer):
        messages = [user("a"), assistant("b"), user("c"), assistant("d", weight=0), user("e"), assistant("f")]
        assert trained_texts(with_template(demo_tokenizer, TAGGED), messages) == ["b<|im_end|>", "f<|im_end|>"]

    def test_a_tag_around_nothing_trains_nothing(self, demo_tokenizer):
        tokenizer = with_template(
            demo_tokenizer, TURN.replace("m.", "messages[0].") + "{% generation %}{% endgeneration %}"
        )
        assert trained_texts(tokenizer, [user("a"), assistant("b")]) == []


REASONS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.NAME %}<think>{{ m.NAME }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    + GENERATION
)


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_the_template_under_any_of_its_names(demo_tokenizer, given, read):
    tokenizer = with_template(demo_tokenizer, REASONS.replace("NAME", read))
    messages = [user("a"), assistant("b", **{given: "Hm."})]
    assert trained_texts(tokenizer, messages) == ["<think>Hm.</think>b<|im_end|>\n"]


CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"what": "x"}'}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
CALLS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}<|im_end|>\n{% endfor %}"
) + GENERATION


def test_tools_and_calls_are_rendered_and_arguments_are_objects(demo_tokenizer):
    tokenizer = with_template(demo_tokenizer, CALLS)
    messages = [
        user("a"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "7"},
    ]
    as_text = shown(
        tokenizer, [*messages, assistant("It is 7.")], tools='[{"type": "function", "function": {"name": "look_up"}}]'
    )
    assert as_text == (
        '{"type": "function", "function": {"name": "look_up"}}\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n'
        '«look_up({"what": "x"})<|im_end|>\n»<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n«It is 7.<|im_end|>\n»'
    )


@pytest.mark.parametrize(
    ("messages", "tools", "message"),
    [
        ([user("a"), assistant("b", reasoning_content="Hm.")], None, "leaves out the reasoning of message 1"),
        ([user("a"), assistant("", tool_calls=[CALL])], None, "leaves out message 1's call of 'look_up'"),
        ([user("a"), assistant("b")], [TOOL], "leaves out the tool 'look_up'; give a chat_template= that writes tools"),
    ],
)
def test_what_a_template_leaves_out_of_a_trained_turn_is_an_error(demo_tokenizer, messages, tools, message):
    for rewritten_history in ("error", "split"):
        with pytest.raises(ValueError, match=re.escape(message)):
            tokenize_chat(
                demo_tokenizer, messages, tools=tools, options=chat_options(rewritten_history=rewritten_history)
            )


def test_content_in_parts_of_text_is_their_text(demo_tokenizer):
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": " it."}]
    messages = [{"role": "user", "content": parts}, assistant("Yes")]
    assert decoded_runs(demo_tokenizer, messages) == decoded_runs(demo_tokenizer, [user("Say it."), assistant("Yes")])


def test_what_is_null_is_absent(demo_tokenizer):
    """A table has a null where JSON has no key, and templates ask for keys."""
    asks = "{% for m in messages %}{{ 'called' if 'tool_calls' in m else m.content }}\n{% endfor %}"
    tokenizer = with_template(demo_tokenizer, asks)
    assert trained_texts(tokenizer, [user("a"), assistant("b", tool_calls=None, name=None)]) == ["b\n"]


def test_template_kwargs_reach_the_template(demo_tokenizer):
    tokenizer = with_template(
        demo_tokenizer, "{% if loud %}!{% endif %}{% for m in messages %}" + TURN + "{% endfor %}"
    )
    messages = [user("a")]
    assert shown(tokenizer, messages, template_kwargs={"loud": True}) == "!" + shown(tokenizer, messages)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"enable_thinkin": False}, "the chat template reads no 'enable_thinkin'; correct it, or leave it out"),
        ({"add_generation_prompt": True}, "template_kwargs='add_generation_prompt' is what hsray itself says"),
        ({"messages": []}, "template_kwargs='messages' is what hsray itself says"),
    ],
)
def test_a_template_keyword_that_would_do_nothing_is_an_error(kwargs, message):
    template = "{% if enable_thinking %}{% endif %}"
    check_template_kwargs(template, {"enable_thinking": False})
    with pytest.raises(ValueError, match=re.escape(message)):
        check_template_kwargs(template, kwargs)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "'messages' must be a list of at least one"),
        ("Hi", "'messages' must be a list of at least one"),
        (user("Hi"), "'messages' must be a list of at least one"),
        (7, "'messages' must be a list of at least one"),
        (["Hi"], "message 0 must be an object with a 'role'; found 'Hi'"),
        ([user("a"), None], "message 1 must be an object with a 'role'; found None"),
        ([{"content": "a"}], "message 0 must be an object with a 'role'; found {'content': 'a'}"),
        ([{"role": 1, "content": "a"}], "message 0 must be an object with a 'role'"),
        (
            [user("a"), {"role": "asistant", "content": "b"}],
            "message 1 has the role 'asistant', which the chat template does",
        ),
        ([user("a"), {"role": "assistant"}], "message 1 (assistant) must have a text, or parts of type 'text', as its"),
        ([user("a"), {"role": "assistant", "content": None}], "message 1 (assistant) must have a text"),
        ([user("a"), {"role": "assistant", "content": 7}], "message 1 (assistant) must have a text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0 (user) has a content part of type 'image'"),
        ([{"role": "user", "content": ["a"]}], "message 0 (user) has a content part of type 'str'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0 (user) has a content part of type 'text'"),
        ([user("a"), assistant("b", weight=0.5)], "message 1 (assistant) has weight 0.5; wanted 0"),
        (
            [user("a"), assistant("b", reasoning_content=7)],
            "message 1 (assistant): its 'reasoning_content' must be a text",
        ),
        ([user("a"), assistant("b", reasoning="x", thinking="y")], "its 'thinking' must be a text, and the only one"),
        (
            [user("a"), assistant("b", tool_calls="f")],
            "message 1 (assistant): its 'tool_calls' must be a list; found str",
        ),
        ([user("a"), assistant("b", tool_calls=[{"id": "c"}])], "a tool call must have a 'function' with a 'name'"),
        (
            [user("a"), assistant("b", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])],
            "message 1 (assistant): the arguments of its call of 'f' are not JSON",
        ),
        (
            [user("a"), assistant("b", tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}])],
            "message 1 (assistant): the arguments of its call of 'f' must be an object",
        ),
    ],
)
def test_malformed_messages_are_named(demo_tokenizer, messages, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenize_chat(demo_tokenizer, messages, options=chat_options())


def test_a_role_that_the_template_names_is_known(demo_tokenizer):
    template = "{% for m in messages %}{% if m.role == 'critic' %}{% endif %}" + TURN + "{% endfor %}" + GENERATION
    messages = [user("a"), {"role": "critic", "content": "hm"}, assistant("b")]
    assert trained_texts(with_template(demo_tokenizer, template), messages) == ["b<|im_end|>\n"]


def test_a_tokenizer_without_a_template_is_refused(demo_tokenizer):
    with pytest.raises(ValueError, match="no chat template; give chat_template=, or 'text' or 'input_ids' rows"):
        tokenize_chat(with_template(demo_tokenizer, ""), [user("a")], options=chat_options())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "refuses the conversation's first 1 messages: roles must alternate",
        ),
        (
            "{{ messages[0].tools.name }}",
            "refuses the conversation's first 1 messages: 'dict object' has no attribute 'tools'",
        ),
        ("{% for m in messages %}", "refuses the conversation's first 1 messages: .*endfor"),
        ("{{ messages[0].content + 1 }}", "refuses the conversation's first 1 messages: "),
    ],
)
def test_what_a_template_raises_is_said(demo_tokenizer, template, message):
    with pytest.raises(ValueError, match=message):
        tokenize_chat(with_template(demo_tokenizer, template), [user("a")], options=chat_options())


@pytest.fixture
def bos_tokenizer(demo_tokenizer):
    """One that adds BOS to every text, and whose template writes BOS too."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = with_template(
        copy.deepcopy(demo_tokenizer), "{{ bos_token }}{% for m in messages %}" + TURN + "{% endfor %}" + GENERATION
    )
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    return tokenizer


def text_tokens(tokenizer, text, **more):
    [(input_ids, loss_mask)] = tokenize(
        tokenizer, [Rendered(text=text, add_special_tokens=True, **({"spans": None} | more))]
    )
    return input_ids.tolist(), loss_mask.tolist()


def test_bos_stands_once_at_the_head_of_a_conversation(bos_tokenizer):
    assert shown(bos_tokenizer, [user("a"), assistant("b")]) == (
        "<|endoftext|><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«b<|im_end|>\n»"
    )


@pytest.mark.parametrize("written", ["", "<|endoftext|>"])
def test_bos_stands_once_at_the_head_of_a_text_though_it_begins_with_one(bos_tokenizer, written):
    input_ids, loss_mask = text_tokens(bos_tokenizer, written + "Once upon a time")
    assert bos_tokenizer.decode(input_ids) == "<|endoftext|>Once upon a time"
    assert loss_mask == [True] * len(input_ids)


def test_a_text_is_all_trained_and_gets_what_the_tokenizer_adds(demo_tokenizer):
    input_ids, loss_mask = text_tokens(demo_tokenizer, "Once upon a time")
    assert demo_tokenizer.decode(input_ids) == "Once upon a time"
    assert loss_mask == [True] * len(input_ids)


def test_texts_tokenised_together_are_those_tokenised_alone(bos_tokenizer):
    rendered = [
        Rendered(text=f"text {number} <|im_end|>🙂", spans=((2, number + 3),), add_special_tokens=number % 3 == 0)
        for number in range(12)
    ]
    together, alone = tokenize(bos_tokenizer, rendered), [tokenize(bos_tokenizer, [item])[0] for item in rendered]
    for (input_ids, loss_mask), (ids_alone, mask_alone) in zip(together, alone, strict=True):
        assert (input_ids.tolist(), loss_mask.tolist()) == (ids_alone.tolist(), mask_alone.tolist())


class SlowTokenizer:
    """One that cannot say which characters a token covers."""

    is_fast = False

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, text, *, return_offsets_mapping=False, **options):
        assert not return_offsets_mapping
        return self._tokenizer(text, **options)


def test_a_tokenizer_without_offsets_gives_the_same_mask_or_refuses(demo_tokenizer):
    messages = [user("a"), assistant("b 🙂"), user("c"), assistant("d")]
    slow = SlowTokenizer(demo_tokenizer)
    assert tokenize_chat(slow, messages, options=chat_options()) == tokenize_chat(
        demo_tokenizer, messages, options=chat_options()
    )
    with pytest.raises(ValueError, match="a token runs across the boundary of what is trained on"):
        tokenize_chat(slow, [user("a"), assistant("    indented")], options=chat_options())


def conversations(path):
    """Of a file of messages, or of questions and answers."""
    rows = map(json.loads, path.read_text().splitlines())
    return [row.get("messages") or [user(row["question"]), assistant(row["answer"])] for row in rows]


def test_masks_agree_with_those_of_transformers_where_a_tagged_template_says_the_same(demo_tokenizer, pytestconfig):
    """On the demo's prompts, and on the first 500 rows of the file that --conversations names."""
    content = "message['content'] + '<|im_end|>' + '\n'"
    assert content in demo_tokenizer.chat_template
    tags = (
        "{% if message['role'] == 'assistant' %}{% generation %}{{ X }}{% endgeneration %}{% else %}{{ X }}{% endif %}"
    )
    template = demo_tokenizer.chat_template.replace(" + " + content, "}}" + tags.replace("X", content) + "{{ ''")
    tagged = with_template(demo_tokenizer, template)
    chats = conversations(Path(__file__).parent.parent / "pipelines/demo_prompts.jsonl")
    if given := pytestconfig.getoption("conversations"):
        chats += conversations(given)[:500]
    for messages in chats:
        theirs = tagged.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        wanted = [(theirs["input_ids"], [bool(value) for value in theirs["assistant_masks"]])]
        assert any(wanted[0][1])
        for tokenizer in (demo_tokenizer, tagged):
            assert tokenize_chat(tokenizer, messages, options=chat_options()) == wanted
    print(f"{len(chats)} conversations agree")
