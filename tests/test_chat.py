"""What is trained is exactly what the assistant says, with the end of its turn; anything doubtful is refused."""

import copy
import re
from itertools import groupby

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hsray.chat import tokenize_chat, tokenize_text

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def decoded_runs(tokenizer, messages: list[dict]) -> list[tuple[bool, str]]:
    """The conversation as text, cut where the mask changes."""
    input_ids, loss_mask = tokenize_chat(tokenizer, messages)
    assert len(input_ids) == len(loss_mask)
    runs = groupby(zip(loss_mask, input_ids, strict=True), key=lambda pair: pair[0])
    return [(trained, tokenizer.decode([token for _, token in run])) for trained, run in runs]


def trained_texts(tokenizer, messages: list[dict]) -> list[str]:
    return [text for trained, text in decoded_runs(tokenizer, messages) if trained]


def with_template(tokenizer, template: str):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


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
    ("template", "common", "alone", "within"),
    [
        (DROPS_EARLIER_ANSWERS, "<|im_start|>user\na<|im_end|>\n<|im_start|>", "assistant\n", "user\nc<|im_end|>"),
        (COUNTS_MESSAGES, "", "1 messages\n", "4 messages\n"),
        (ENDS_WITH_EOS, "user: a<|im_end|>assistant: b<|", "endoftext|>", "im_end|>user: c"),
    ],
)
def test_a_template_that_rewrites_history_is_refused_where_it_does(demo_tokenizer, template, common, alone, within):
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    with pytest.raises(ValueError, match=r"up to message 1 \(assistant\) otherwise") as caught:
        tokenize_chat(with_template(demo_tokenizer, template), messages)
    assert f"from character {len(common)} on ({repr(alone)[:-1]}" in str(caught.value)
    assert f"alone, {repr(within)[:-1]}" in str(caught.value)


def test_a_template_that_drops_earlier_answers_serves_one_answer(demo_tokenizer):
    tokenizer = with_template(demo_tokenizer, DROPS_EARLIER_ANSWERS)
    assert trained_texts(tokenizer, [user("a"), assistant("b")]) == ["b<|im_end|>\n"]


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
        ([user("a"), {"role": "assistant"}], "message 1 (assistant) must have a text as its 'content'"),
        ([user("a"), {"role": "assistant", "content": None}], "message 1 (assistant) must have a text"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "message 0 (user) must have a text"),
    ],
)
def test_malformed_messages_are_named(demo_tokenizer, messages, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenize_chat(demo_tokenizer, messages)


def test_a_tokenizer_without_a_template_is_refused(demo_tokenizer):
    with pytest.raises(ValueError, match="no chat template; give 'text' or 'input_ids' rows"):
        tokenize_chat(with_template(demo_tokenizer, ""), [user("a")])


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
        tokenize_chat(with_template(demo_tokenizer, template), [user("a")])


@pytest.fixture
def bos_tokenizer(demo_tokenizer):
    """One that adds BOS to every text, and whose template writes BOS too."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = with_template(
        demo_tokenizer, "{{ bos_token }}{% for m in messages %}" + TURN + "{% endfor %}" + GENERATION
    )
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_bos_stands_once_at_the_head_of_a_conversation(bos_tokenizer):
    input_ids, loss_mask = tokenize_chat(bos_tokenizer, [user("a"), assistant("b")])
    bos = bos_tokenizer.bos_token_id
    assert (input_ids[0], input_ids.count(bos), loss_mask[0]) == (bos, 1, False)


def test_bos_stands_once_at_the_head_of_a_text(bos_tokenizer):
    input_ids, loss_mask = tokenize_text(bos_tokenizer, "Once upon a time")
    assert bos_tokenizer.decode(input_ids) == "<|endoftext|>Once upon a time"
    assert loss_mask == [True] * len(input_ids)


def test_a_text_is_all_trained_and_gets_what_the_tokenizer_adds(demo_tokenizer):
    input_ids, loss_mask = tokenize_text(demo_tokenizer, "Once upon a time")
    assert demo_tokenizer.decode(input_ids) == "Once upon a time"
    assert loss_mask == [True] * len(input_ids)
