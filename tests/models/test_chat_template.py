"""Chat templates render conversations as in transformers.

Protects: constructs of published templates; messages and tools are passed as in transformers; the
places of templates and special tokens in a directory; the sandbox."""

from __future__ import annotations

import json
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from forerun.errors import LoadError, RequestError
from forerun.models.chat_template import ChatTemplate, directory_template
from forerun.models.tokenizer import Tokenizer as Text

LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}{% set system_message = "" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{% endif %}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages if message.role != 'tool' -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0, calls=[]) %}
{%- for message in loop_messages %}
    {%- if message.role == "user" %}{%- set ns.index = ns.index + 1 %}{%- endif %}
{%- endfor %}
{{- bos_token }}{{- ns.index }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message.content + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {{- message.tool_calls | map(attribute="function") | map("tojson") | join(", ") }}{{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}{%- continue %}
    {%- endif %}
{%- endfor %}
"""
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- macro render(content, do_vision_count=true) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for item in content %}{{- item.text if 'text' in item else '<|image|>' }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + render(message.content) + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content or '' %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
                {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
UNUSUAL = """  {# a comment #}
{% generation %}{% set x = 1 %}<{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ nothing }}>{% endgeneration %}
    {% if x is defined %}leaks{% endif %}
{% set n = namespace(a=1, self=2) %}{% set n.b = dict(k=[1, 2.5, true, none]) %}{{ n.b | tojson }}{{ n.self }}
{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}
{{ {'b': 'ü<&>\u2028"', 'a': none} | tojson(sort_keys=true, separators=(',', ':')) }}
{{ messages | length }}{{ documents is none }}
{{ messages | map(attribute='thinking') | list }}{{ messages[0] }}{{ messages[-1].content | default('void') }}
{{ tools | string }}{{ dict.fromkeys(['a', 'b'], 0) }}{{ [1] | tojson(indent=2) }}{{ "a-b".split("-") | last | upper }}
{{ 7 // 2 }}{{ "%s" | format(3) }}"""
TEMPLATES = {
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "unusual": UNUSUAL,
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather in a place, in °C; <b> & "so" on',
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "enum": ["Köln", "東京"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {}}},
]
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"place": "Köln", "n": [1, 2.5, None]}},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "  Hi, <b>you</b> & \"you\" {{ bos_token }} 😀\n"}],
    "system": [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo "},
        {"role": "user", "content": "three"},
    ],
    "thoughts": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning": "because", "name": None},
        {"role": "user", "content": "three"},
    ],
    "calls": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 7}', "tool_call_id": "c1"},
        {"role": "assistant", "content": "7 °C", "tool_calls": None},
        {"role": "user", "content": "Thanks"},
    ],
    "two users": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
}  # fmt: skip
PLAIN = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "clean_up_tokenization_spaces": False,
}


def backend() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.add_special_tokens(
        [AddedToken(word, special=True) for word in ("<s>", "</s>", "<pad>", "<|end|>")]
    )
    return found


def write(directory: Path, settings: dict[str, Any], files: dict[str, str] | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    backend().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in (files or {}).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    return directory


def theirs(directory: Path, chat: Any, tools: Any, **options: Any) -> str:
    """Return what transformers renders, or its error."""
    from transformers import AutoTokenizer

    try:
        text: str = AutoTokenizer.from_pretrained(directory).apply_chat_template(
            chat, tools=tools or None, tokenize=False, add_generation_prompt=True, **options
        )
    except Exception as error:
        return f"refused: {error}"
    return text


def ours(directory: Path, chat: Any, tools: Any, **options: Any) -> str:
    template = directory_template(directory)
    assert template is not None
    try:
        return template.render(chat, tools, options)
    except Exception as error:
        return f"refused: {error}"


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str, tools: Any, tmp_path: Path) -> None:
    directory = write(
        tmp_path,
        {**PLAIN, "pad_token": {"content": "<pad>", "__type": "AddedToken"}},
        {"chat_template.jinja": TEMPLATES[name]},
    )
    rendered = [ours(directory, chat, tools) for chat in CHATS.values()]
    assert rendered == [theirs(directory, chat, tools) for chat in CHATS.values()]
    assert not all(text.startswith("refused") for text in rendered)


def test_options_are_passed_to_the_template(tmp_path: Path) -> None:
    directory = write(tmp_path, {**PLAIN, "chat_template": QWEN3 + "{{ bos_token }}"})
    for options in {"enable_thinking": False}, {"enable_thinking": True}, {"bos_token": "x"}:
        assert ours(directory, CHATS["one"], (), **options) == theirs(
            directory, CHATS["one"], (), **options
        )
    for name in "messages", "continue_final_message", "add_generation_prompt":
        assert f"{name} cannot be set" in ours(directory, CHATS["one"], (), **{name: True})


@pytest.mark.parametrize(
    "settings, files",
    [
        ({"chat_template": "A{{ bos_token }}"}, {}),
        ({"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}, {}),
        ({"chat_template": [{"name": "rag", "template": "A"}, {"name": "tool_use", "template": "B"}]}, {}),
        ({"chat_template": "A"}, {"chat_template.jinja": "B\n"}),
        ({}, {"chat_template.jinja": "A", "additional_chat_templates/tool_use.jinja": "B"}),
        ({"chat_template": "{{ bos_token }}", "bos_token": {"content": "<|end|>", "__type": "AddedToken"}}, {}),
        ({"chat_template": "{{ bos_token }}|{{ eos_token }}", "eos_token": None}, {}),
        ({"chat_template": "{{ pad_token }}"}, {"special_tokens_map.json": '{"pad_token": {"content": "<pad>"}}'}),
    ],
)  # fmt: skip
def test_places_of_templates_and_special_tokens(
    settings: dict[str, Any], files: dict[str, str], tmp_path: Path
) -> None:
    directory = write(tmp_path, {**PLAIN, **settings}, files)
    for tools in (), TOOLS:
        own = ours(directory, CHATS["one"], tools)
        other = theirs(directory, CHATS["one"], tools)
        assert own == other or {own[:7], other[:7]} == {"refused"}


def test_a_directory_without_a_template_has_none(tmp_path: Path) -> None:
    assert directory_template(write(tmp_path, PLAIN)) is None


def test_a_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, PLAIN)
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(LoadError, match="chat template"):
        Text(directory).chat(CHATS["one"])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(template: str) -> None:
    with pytest.raises((SecurityError, OverflowError)):
        ChatTemplate({"default": template}, {}).render(CHATS["one"], (), {})


def test_objects_reach_a_template_as_plain_values() -> None:
    class Image:
        def save(self) -> str:
            return "written"

    chat = [
        UserDict(role="user", content=[{"type": "image", "image": Image()}, {"text": ("a", 1)}])
    ]
    assert ChatTemplate({"default": "{{ messages }}"}, {}).render(chat, (), {}) == (
        "[{'role': 'user', 'content': [{'type': 'image', 'image': '<Image>'}, {'text': ['a', 1]}]}]"
    )


def test_an_empty_conversation_is_refused(tmp_path: Path) -> None:
    tokenizer = Text(write(tmp_path, {**PLAIN, "chat_template": "A"}))
    with pytest.raises(RequestError, match="no message"):
        tokenizer.chat([])
