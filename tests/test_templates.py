"""Golden conversations: each family's chat template, and what is trained on of a render of it, between « and ».

The templates are written here after the shape of each family's own, shortened to what decides a mask.
"""

import re
from dataclasses import dataclass
from typing import Any

import pytest

from tests.chats import assistant, shown, system, user, with_template


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A chat template, and the special tokens it writes."""

    template: str
    special: tuple[str, ...]
    bos: str | None = None
    eos: str | None = None


LLAMA3 = Family(
    special=("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    template="""{{- bos_token }}
{%- if tools is defined and tools is not none %}
    {{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
    {%- for tool in tools %}{{- tool | tojson }}{{- "\n" }}{%- endfor %}
    {{- "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" + message.content + "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
)

QWEN3 = Family(
    special=("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    eos="<|im_end|>",
    template="""{%- set ns = namespace(last_query_index=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == "user" %}
        {%- set ns.found = true %}
        {%- set ns.last_query_index = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role != "assistant" %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- else %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""",
)

DEEPSEEK = Family(
    special=("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>", "<think>"),
    bos="<|begin|>",
    eos="<|end|>",
    template="""{%- set ns = namespace(system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- set ns.system = message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<|User|>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' %}{{- '<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' + ('<think>\n' if thinks else '') }}{%- endif %}""",
)

KIMI = Family(
    special=("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
    eos="<|im_end|>",
    template="""{%- for message in messages -%}
    {%- if loop.first and message['role'] != 'system' -%}<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>{%- endif -%}
    {%- if message['role'] == 'user' -%}<|im_user|>user<|im_middle|>
    {%- elif message['role'] == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>
    {%- else -%}<|im_system|>{{ message['role'] }}<|im_middle|>{%- endif -%}
    {{- message['content'] -}}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}""",
)

MISTRAL = Family(
    special=("<s>", "</s>", "[INST]", "[/INST]"),
    bos="<s>",
    eos="</s>",
    template="""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {{- "[INST] " }}
        {%- if loop.index0 == ns.last_user and system_message is defined %}{{- system_message + "\n\n" }}{%- endif %}
        {{- message["content"] + "[/INST]" }}
    {%- else %}{{- " " + message["content"] | trim + eos_token }}{%- endif %}
{%- endfor %}""",
)

GEMMA = Family(
    special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    bos="<bos>",
    eos="<eos>",
    template="""{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}""",
)

PHI3 = Family(
    special=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    eos="<|endoftext|>",
    template="{% for message in messages %}{{'<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
)

GPT_OSS = Family(
    special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
    eos="<|return|>",
    template="""{%- for message in messages -%}
    {%- if message.role != 'assistant' -%}
        {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
    {%- elif "tool_calls" in message -%}
        {%- set call = message.tool_calls[0].function -%}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
        {{- call.arguments | tojson + "<|call|>" }}
    {%- elif loop.last and not add_generation_prompt -%}
        {%- if "thinking" in message -%}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif -%}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
    {%- else -%}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}""",
)

FAMILIES = {
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi3": PHI3,
    "gpt-oss": GPT_OSS,
}


@pytest.fixture(scope="module")
def tokenizers(demo_tokenizer):
    """A tokenizer for each family: SmolLM2's, with the family's template and special tokens."""
    made: dict[str, Any] = {}
    for name, family in FAMILIES.items():
        made[name] = with_template(demo_tokenizer, family.template, family.special)
        made[name].bos_token, made[name].eos_token = family.bos, family.eos
    return made


ONE = [user("Hi"), assistant("Hello!")]
TWO = [*ONE, user("Bye"), assistant("See you.")]
BRIEF = system("Be brief.")
THOUGHT = [user("Hi"), assistant("Hello!", reasoning_content="Greet.")]
THOUGHT_TWICE = [*THOUGHT, user("Bye"), assistant("See you.", reasoning_content="Part.")]
TOOL = {"type": "function", "function": {"name": "fetch", "description": "d"}}
CALLS = [
    user("Hi"),
    assistant("", tool_calls=[{"type": "function", "function": {"name": "fetch", "arguments": '{"x": 1}'}}]),
    {"role": "tool", "content": "7"},
    assistant("It is 7."),
]
H = "<|start_header_id|>{}<|end_header_id|>\n\n"
K = "<|im_system|>system<|im_middle|>You are Kimi.<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>"
Q = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SMOL = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"

GOLDEN: list[tuple[str, list[dict], dict[str, Any], str | list[str]]] = [
    ("smollm2", TWO, {}, SMOL + Q.format("Hi") + "«Hello!<|im_end|>\n»" + Q.format("Bye") + "«See you.<|im_end|>\n»"),
    (
        "llama3",
        [BRIEF, *TWO],
        {},
        f"<|begin_of_text|>{H.format('system')}Be brief.<|eot_id|>{H.format('user')}Hi<|eot_id|>{H.format('assistant')}"
        f"«Hello!<|eot_id|>»{H.format('user')}Bye<|eot_id|>{H.format('assistant')}«See you.<|eot_id|>»",
    ),
    (
        "llama3",
        CALLS,
        {"tools": [TOOL]},
        f"<|begin_of_text|>{H.format('system')}"
        '{"type": "function", "function": {"name": "fetch", "description": "d"}}\n'
        f"<|eot_id|>{H.format('user')}Hi<|eot_id|>{H.format('assistant')}"
        '«{"name": "fetch", "parameters": {"x": 1}}<|eot_id|>»'
        f"{H.format('ipython')}7<|eot_id|>{H.format('assistant')}«It is 7.<|eot_id|>»",
    ),
    ("qwen3", THOUGHT, {}, Q.format("Hi") + "«<think>\nGreet.\n</think>\n\nHello!<|im_end|>\n»"),
    (
        "qwen3",
        [user("Hi"), assistant("<think>\nGreet.\n</think>\n\nHello!")],
        {},
        Q.format("Hi") + "«<think>\nGreet.\n</think>\n\nHello!<|im_end|>\n»",
    ),
    ("qwen3", ONE, {}, Q.format("Hi") + "«<think>\n\n</think>\n\nHello!<|im_end|>\n»"),
    # Thinking off: what the template writes in place of a thought is no word of the assistant's.
    (
        "qwen3",
        ONE,
        {"template_kwargs": {"enable_thinking": False}},
        Q.format("Hi") + "<think>\n\n</think>\n\n«Hello!<|im_end|>\n»",
    ),
    (
        "qwen3",
        THOUGHT_TWICE,
        {"train_on": "last"},
        Q.format("Hi") + "Hello!<|im_end|>\n" + Q.format("Bye") + "«<think>\nPart.\n</think>\n\nSee you.<|im_end|>\n»",
    ),
    (
        "qwen3",
        THOUGHT_TWICE,
        {"rewritten_history": "split"},
        [
            Q.format("Hi") + "«<think>\nGreet.\n</think>\n\nHello!<|im_end|>\n»",
            Q.format("Hi")
            + "Hello!<|im_end|>\n"
            + Q.format("Bye")
            + "«<think>\nPart.\n</think>\n\nSee you.<|im_end|>\n»",
        ],
    ),
    (
        "deepseek",
        [BRIEF, *TWO],
        {},
        "<|begin|>Be brief.<|User|>Hi<|Assistant|>«Hello!<|end|>»<|User|>Bye<|Assistant|>«See you.<|end|>»",
    ),
    ("kimi", ONE, {}, K + "<|im_assistant|>assistant<|im_middle|>«Hello!<|im_end|>»"),
    (
        "kimi",
        TWO,
        {},
        K + "<|im_assistant|>assistant<|im_middle|>«Hello!<|im_end|>»<|im_user|>user<|im_middle|>Bye<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>«See you.<|im_end|>»",
    ),
    ("mistral", TWO, {}, "<s>[INST] Hi[/INST]« Hello!</s>»[INST] Bye[/INST]« See you.</s>»"),
    ("mistral", [BRIEF, *ONE], {}, "<s>[INST] Be brief.\n\nHi[/INST]« Hello!</s>»"),
    (
        "mistral",
        [BRIEF, *TWO],
        {"rewritten_history": "split"},
        [
            "<s>[INST] Be brief.\n\nHi[/INST]« Hello!</s>»",
            "<s>[INST] Hi[/INST] Hello!</s>[INST] Be brief.\n\nBye[/INST]« See you.</s>»",
        ],
    ),
    (
        "gemma",
        [BRIEF, *TWO],
        {},
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n«Hello!<end_of_turn>\n»"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n«See you.<end_of_turn>\n»",
    ),
    # What Phi-3 puts at the end of a conversation, whoever spoke last, is no word of the assistant's.
    ("phi3", ONE, {}, "<|user|>\nHi<|end|>\n<|assistant|>\n«Hello!<|end|>\n»<|endoftext|>"),
    (
        "phi3",
        TWO,
        {},
        "<|user|>\nHi<|end|>\n<|assistant|>\n«Hello!<|end|>\n»<|user|>\nBye<|end|>\n<|assistant|>\n«See you.<|end|>\n»<|endoftext|>",
    ),
    (
        "gpt-oss",
        THOUGHT,
        {},
        "<|start|>user<|message|>Hi<|end|><|start|>assistant«<|channel|>analysis<|message|>Greet.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello!<|return|>»",
    ),
    (
        "gpt-oss",
        THOUGHT_TWICE,
        {"rewritten_history": "split"},
        [
            "<|start|>user<|message|>Hi<|end|><|start|>assistant«<|channel|>analysis<|message|>Greet.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Hello!<|return|>»",
            "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|end|>"
            "<|start|>user<|message|>Bye<|end|><|start|>assistant«<|channel|>analysis<|message|>Part.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>See you.<|return|>»",
        ],
    ),
    (
        "gpt-oss",
        CALLS,
        {},
        "<|start|>user<|message|>Hi<|end|><|start|>assistant« to=functions.fetch<|channel|>commentary json<|message|>"
        '{"x": 1}<|call|>»<|start|>tool<|message|>7<|end|>'
        "<|start|>assistant«<|channel|>final<|message|>It is 7.<|return|>»",
    ),
]


@pytest.mark.parametrize(
    ("family", "messages", "options", "text"), GOLDEN, ids=[f"{number}-{case[0]}" for number, case in enumerate(GOLDEN)]
)
def test_a_conversation_is_trained_on_what_its_assistant_wrote(
    demo_tokenizer, tokenizers, family, messages, options, text
):
    assert shown(tokenizers.get(family, demo_tokenizer), messages, **options) == text


REFUSED: list[tuple[str, list[dict], dict[str, Any], str]] = [
    (
        "qwen3",
        THOUGHT_TWICE,
        {},
        "token 10 is '<think>' alone and 'Hello' within, after '\\nHi<|im_end|>\\n<|im_start|>assistant\\n'",
    ),
    ("qwen3", TWO, {}, "token 10 is '<think>' alone and 'Hello' within"),
    ("mistral", [BRIEF, *TWO], {}, "token 2 is ' Be' alone and ' Hi' within"),
    ("mistral", [user("a"), user("b"), assistant("c")], {}, "After the optional system message, roles must alternate"),
    ("gemma", [user("a"), user("b"), assistant("c")], {}, "Conversation roles must alternate user/assistant"),
    ("gpt-oss", THOUGHT_TWICE, {}, "token 9 is 'analysis' alone and 'final' within"),
    ("gpt-oss", TWO, {}, "is '<|return|>' alone and '<|end|>' within"),
    # DeepSeek-R1's generation prompt opens a thought that its render of an answer does not have.
    ("deepseek", ONE, {"template_kwargs": {"thinks": True}}, "token 4 is '<think>' alone and 'Hello' within"),
    ("kimi", THOUGHT, {}, "leaves out the reasoning of message 1"),
    ("kimi", [assistant("Hi")], {}, "message 0 is the assistant's"),
    ("phi3", ONE, {"tools": [TOOL]}, "leaves out the tool 'fetch'"),
]


@pytest.mark.parametrize(
    ("family", "messages", "options", "message"),
    REFUSED,
    ids=[f"{number}-{case[0]}" for number, case in enumerate(REFUSED)],
)
def test_what_a_template_cannot_say_is_refused(tokenizers, family, messages, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        shown(tokenizers[family], messages, **options)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.bos])
def test_bos_stands_once_though_the_tokenizer_would_add_it_too(tokenizers, family):
    import copy

    from tokenizers.processors import TemplateProcessing

    tokenizer, bos = copy.deepcopy(tokenizers[family]), FAMILIES[family].bos
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    assert shown(tokenizer, ONE) == shown(tokenizers[family], ONE)
    assert shown(tokenizer, ONE).count(bos) == 1
