"""Conversations that clients send back: the server's own answers, and fields that clients add."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import ollama
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import ValidationError

from forerun.engine.stats import RequestStats
from forerun.errors import RequestError
from forerun.llm import LLM
from forerun.sampling.grammar import Grammar
from forerun.server import conversation, limits
from forerun.server import ollama as ollama_api
from forerun.server.conversation import ToolCallParser, template_messages
from forerun.server.errors import ApiError
from forerun.server.ollama import Ollama, OllamaChat
from forerun.server.openai import Chat, prepare_chat
from forerun.server.outputs import Output
from forerun.server.protocol import (
    Body,
    ChatRequest,
    NamedTool,
    ResponsesRequest,
    TokenizeRequest,
    Tool,
)
from forerun.server.responses import Responses, to_chat
from forerun.server.state import ServerState
from forerun.server.streaming import Formatter
from forerun.types import Event
from tests.server.serving import Client, Serving

Json = dict[str, Any]
MODELS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/api/chat": OllamaChat,
}
CHAT, RESPONSES, OLLAMA = MODELS
FUNCTIONS = [{"name": name, "parameters": {"type": "object", "properties": {}}} for name in "wv"]
NESTED: list[Json] = [{"type": "function", "function": function} for function in FUNCTIONS]
FLAT: list[Json] = [{"type": "function", **function} for function in FUNCTIONS]
TOOLS = {CHAT: NESTED, RESPONSES: FLAT, OLLAMA: NESTED}
HI = {"role": "user", "content": "hi"}
FUNCTION = {"name": "w", "arguments": '{"c": 1}'}
CALL = {"id": "call_1", "type": "function", "function": FUNCTION}


def assistant(content: Any, **more: Any) -> Json:
    return {"role": "assistant", "content": content, **more}


@pytest.fixture
def state(serve: Serving) -> ServerState:
    found: ServerState = serve.server.config.app.state.server  # type: ignore[union-attr]
    return found


def request(path: str, messages: list[Json], **more: Any) -> Any:
    """Return a request with this conversation as the server reads it from its bytes."""
    name = "input" if path == RESPONSES else "messages"
    body = {"model": "tiny", name: messages, "tools": TOOLS[path]} | more
    return MODELS[path].model_validate(limits.parse(json.dumps(body).encode()))


def chat_of(body: Any) -> ChatRequest:
    if isinstance(body, ResponsesRequest):
        return to_chat(body)
    return ollama_api.to_chat(body) if isinstance(body, OllamaChat) else body


def formatted(path: str, messages: list[Json]) -> list[Json]:
    """Return a conversation as a chat template gets it."""
    chat = chat_of(request(path, messages))
    return [values for message in chat.messages for values in template_messages(message)]


# Answers of the server, sent back


class Answer:
    """An answer with a given text, in pieces, as each API writes it and its client reads it."""

    def __init__(self, state: ServerState, path: str, pieces: list[str], stream: bool) -> None:
        body = request(path, [HI], stream=stream)
        chat = Chat(state, chat_of(body), 1, 0)
        self.formatter: Formatter = chat
        if path != CHAT:
            self.formatter = (Responses if path == RESPONSES else Ollama)(chat, body)
        self.pieces = pieces
        done = SimpleNamespace(stats=RequestStats())
        params = SimpleNamespace(logprobs=None)
        job: Any = SimpleNamespace(params=params, references=[], request=done)
        job.arrived = job.first = job.last = 0.0
        self.output = Output(job)

    def events(self) -> Iterator[Event]:
        for i, piece in enumerate(self.pieces, start=1):
            reason = "stop" if i == len(self.pieces) else None
            event = Event(0, [i], [""], [piece], finish_reason=reason)
            self.output.add(event)
            yield event

    def full(self) -> Json:
        list(self.events())
        return json.loads(json.dumps(self.formatter.full([self.output])))

    def chunks(self) -> list[Json]:
        chunks = [*self.formatter.begin([self.output])]
        for event in self.events():
            chunks += self.formatter.chunks([self.output], 0, event)
        chunks += self.formatter.end([self.output])
        lines = [line for chunk in chunks for line in chunk.splitlines() if line]
        return [json.loads(s.removeprefix("data: ")) for s in lines if not s.startswith("event: ")]


def openai_message(state: ServerState, pieces: list[str], stream: bool) -> Json:
    """Return the message of an answer as the openai client's own models dump it."""
    answer = Answer(state, CHAT, pieces, stream)
    if not stream:
        return ChatCompletion.model_validate(answer.full()).choices[0].message.model_dump()
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in answer.chunks():
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    return state.get_final_completion().choices[0].message.model_dump()


def openai_items(state: ServerState, pieces: list[str], stream: bool) -> list[Json]:
    answer = Answer(state, RESPONSES, pieces, stream)
    response = answer.chunks()[-1]["response"] if stream else answer.full()
    return [item.model_dump() for item in Response.model_validate(response).output]


def ollama_message(state: ServerState, pieces: list[str], stream: bool) -> Json:
    answer = Answer(state, OLLAMA, pieces, stream)
    lines = answer.chunks() if stream else [answer.full()]
    parts = [ollama.ChatResponse(**line).message for line in lines]
    calls = [call for part in parts for call in part.tool_calls or ()]
    text = "".join(part.content or "" for part in parts)
    message = ollama.Message(role="assistant", content=text, tool_calls=calls or None)
    return message.model_dump(exclude_none=True)


def anthropic_message(message: Json) -> Json:
    """Return a message in parts, as Anthropic's clients keep it, with a mark for their cache."""
    parts: list[Json] = [{"type": "thinking", "thinking": "Hm.", "signature": "c2lnbmVk"}]
    if message["content"]:
        parts.append({"type": "text", "text": message["content"], "citations": None})
    for call in message["tool_calls"] or ():
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        parts.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    parts[-1]["cache_control"] = {"type": "ephemeral"}
    return assistant(parts)


def results(path: str, message: Json) -> list[Json]:
    """Return results of the calls of a message, as the client of this API writes them."""
    calls = message.get("tool_calls") or []
    if path == OLLAMA:
        names = [call["function"]["name"] for call in calls]
        return [{"role": "tool", "tool_name": name, "content": "5"} for name in names]
    text = [{"type": "text", "text": "5"}]
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]


ARGUMENTS = ('{"c": 1}', '{"c": "\\u2028\\ud800"}', '""', '"Paris"', "null", '["a"]', '{"c": NaN}')
ARGUMENTS += ('"{\\"c\\": 2}"', "5")
GENERATED = [f'{{"name": "w", "arguments": {arguments}}}' for arguments in ARGUMENTS]
GENERATED += ["<tool_call>", "</tool_call>", "\n", " ", "; ", "[", "]", "{}", "", "Well"]
GENERATED += ["\u2028\x85", "<think>Hm.</think>", '{"name": "v", "parameters": {"c": {"d": []}}}']
GENERATED += ['{"name": "unknown", "arguments": {}}', "I cannot do that."]
TEXTS = st.lists(st.sampled_from(GENERATED), min_size=1, max_size=6)
CONVERSATIONS = st.lists(st.tuples(TEXTS, st.booleans()), min_size=1, max_size=3)
USUAL = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@USUAL
@given(CONVERSATIONS)
@example([(['<tool_call>{"name": "w", "arguments": "Paris"}</tool_call>'], True)])
@example([([GENERATED[2]], False), ([GENERATED[4]], True), ([GENERATED[5]], False)])
def test_answers_are_accepted_in_the_next_request(state: ServerState, turns: Any) -> None:
    """Clients send back what their own models dump, for any generated text, streamed or not."""
    chats: dict[str, list[Json]] = {name: [] for name in ("anthropic", *MODELS)}
    for pieces, stream in turns:
        message = openai_message(state, pieces, stream)
        chats[CHAT] += [HI, message, *results(CHAT, message)]
        used: list[Json] = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "5"}
            for call in message["tool_calls"] or ()
        ]
        used.append({"type": "text", "text": "and?", "cache_control": {}})
        chats["anthropic"] += [HI, anthropic_message(message), {"role": "user", "content": used}]
        items = openai_items(state, pieces, stream)
        chats[RESPONSES] += [HI, *items]
        text = [{"type": "output_text", "text": "5", "annotations": []}]
        output = {"type": "function_call_output", "output": text}
        ids = [item["call_id"] for item in items if item["type"] == "function_call"]
        chats[RESPONSES] += [output | {"call_id": id_} for id_ in ids]
        other = ollama_message(state, pieces, stream)
        chats[OLLAMA] += [HI, other, *results(OLLAMA, other)]
    found = {}
    for name, path in [*zip(MODELS, MODELS, strict=True), ("anthropic", CHAT)]:
        messages = [*chats[name], HI]
        assert prepare_chat(state, chat_of(request(path, messages)))[1]
        found[name] = [without_ids(values) for values in formatted(path, messages)]
    for name in (CHAT, "anthropic"):
        assert prepare_chat(state, chat_of(request(OLLAMA, [*chats[name], HI])))[1]
    assert found[CHAT] == found[RESPONSES]
    calls = [
        [message.get("tool_calls") for message in messages if message["role"] == "assistant"]
        for messages in found.values()
    ]
    assert all(other == calls[0] for other in calls)


def without_ids(values: Json) -> Json:
    """Drop the ids of calls, which differ from answer to answer."""

    def drop(value: Json) -> Json:
        return {k: v for k, v in value.items() if k not in ("id", "tool_call_id")}

    return json.loads(json.dumps(values, sort_keys=True), object_hook=drop)


@pytest.mark.parametrize("arguments", ["", None, "{}", " ", "null"])
@pytest.mark.parametrize("path", MODELS)
def test_absent_arguments_are_an_empty_object(path: str, arguments: Any) -> None:
    function = {"name": "w", "arguments": arguments}
    message = assistant(None, tool_calls=[CALL | {"function": function}])
    if path == RESPONSES:
        message = {"type": "function_call", "call_id": "call_1", **function}
    (values,) = formatted(path, [message])
    assert values["tool_calls"][0]["function"] == {"name": "w", "arguments": {}}


# Fields that clients add


CACHED = {"cache_control": {"type": "ephemeral"}}
EXTRA: Json = CACHED | {
    "id": "msg_1",
    "metadata": {"a": "b"},
    "thought_signature": "c2lnbmVk",
    "provider_specific_fields": {"a": 1},
}
PLACES: dict[str, Callable[[Json], Json]] = {
    "message": lambda extra: {"messages": [HI | extra]},
    "part": lambda extra: {"messages": [HI | {"content": [{"type": "text", "text": "x"} | extra]}]},
    "call": lambda extra: {"messages": [HI, assistant(None, tool_calls=[CALL | extra])]},
    "function of a call": lambda extra: {
        "messages": [HI, assistant(None, tool_calls=[CALL | {"function": FUNCTION | extra}])]
    },
    "tool": lambda extra: {"messages": [HI], "tools": [TOOLS[CHAT][0] | extra]},
    "function of a tool": lambda extra: {
        "messages": [HI],
        "tools": [{"type": "function", "function": FUNCTIONS[0] | extra}],
    },
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", EXTRA)
def test_fields_that_clients_add_are_ignored_and_named(place: str, name: str) -> None:
    extra = {} if (place, name) == ("call", "id") else {name: EXTRA[name]}
    body = PLACES[place](extra)
    for model in (ChatRequest, OllamaChat):
        found, bare, null = (
            model.model_validate(PLACES[place](more) | {"model": "tiny"})
            for more in (extra, {}, dict.fromkeys(extra))
        )
        assert found.ignored == tuple(extra) and null.ignored == ()
        assert found.model_dump() == bare.model_dump() == null.model_dump()
    ignored = TokenizeRequest.model_validate({"messages": body["messages"]}).ignored
    assert ignored == (() if "tool" in place.split() else tuple(extra))


@pytest.mark.parametrize(
    ("item", "ignored"),
    [
        (assistant("x", type="message", phase="final_answer"), ("phase",)),
        ({"type": "function_call", "call_id": "c", **FUNCTION, "namespace": "n"}, ("namespace",)),
        (
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "5"}],
            },
            (),
        ),
        ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, ("encrypted_content",)),
        (HI | {"content": [{"type": "input_text", "text": "x", **CACHED}]}, ("cache_control",)),
        (assistant("x", refusal=None, annotations=None, audio=None, tool_calls=None), ()),
        (assistant([{"type": "output_text", "text": "x", "logprobs": [{}]}]), ("logprobs",)),
        (assistant([{"type": "refusal", "refusal": "No."}]), ()),
    ],
)
def test_items_of_a_response_are_accepted(state: ServerState, item: Json, ignored: Any) -> None:
    body = request(RESPONSES, [HI, item, HI])
    assert body.ignored == ignored and prepare_chat(state, to_chat(body))[1]


@pytest.mark.parametrize("path", [*MODELS, "/tokenize"])
def test_ignored_fields_within_messages_are_in_the_header(api: Client, path: str) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    messages = [HI | {"content": [part, part]}, HI | {"phase": "commentary"}]
    body: Json = {"model": "tiny", "input" if path == RESPONSES else "messages": messages}
    body |= {CHAT: {"max_tokens": 2}, RESPONSES: {"max_output_tokens": 2}}.get(path, {})
    body |= {"options": {"num_predict": 2}} if path == OLLAMA else {}
    for more in [{}] if path == "/tokenize" else [{"stream": False}, {"stream": True}]:
        response = api.http.post(path, json=body | more)
        assert response.headers["x-forerun-ignored"] == "cache_control, phase", response.text


@pytest.mark.parametrize(
    ("place", "extra", "where", "advice"),
    [
        ("message", {"contnet": "x"}, "messages.0", "did you mean 'content'?"),
        ("message", {"audio": {"id": "a"}}, "messages.0", "text only"),
        ("message", {"images": ["YQ=="]}, "messages.0", "text only"),
        ("message", {"prefix": True}, "messages.0", "/v1/completions"),
        ("message", {"function_call": FUNCTION}, "messages.0", "use tool_calls"),
        ("message", {"reasoning": "a", "reasoning_content": "b"}, "messages.0", "give one"),
        ("part", {"txt": "x"}, "messages.0.content.0", "did you mean 'text'?"),
        ("part", {"type": "image_url"}, "messages.0.content.0", "text only"),
        ("call", {"custom": {}}, "messages.1.tool_calls.0", "type function"),
        ("function of a call", {"argument": ""}, "messages.1.tool_calls.0.function", "'arguments'"),
        ("tool", {"description": "x"}, "tools.0", 'put it into "function"'),
        ("tool", {"functoin": {}}, "tools.0", "did you mean 'function'?"),
        ("function of a tool", {"parameter": {}}, "tools.0.function", "'parameters'"),
        ("function of a tool", {"defer_loading": True}, "tools.0.function", "defer_loading=True"),
    ],
)
def test_unsupported_fields_are_refused_with_advice(
    api: Client, place: str, extra: Json, where: str, advice: str
) -> None:
    response = api.http.post(CHAT, json=PLACES[place](extra))
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == where, error
    assert error["message"].startswith(f"{where}: ") and advice in error["message"]


@pytest.mark.parametrize(
    ("item", "advice"),
    [
        ({"role": "assistant", "tool_calls": [CALL]}, "function_call"),
        (HI | {"tool_call_id": "c"}, "function_call_output"),
        (HI | {"conten": "y"}, "did you mean 'content'?"),
        (HI | {"content": [{"type": "input_image", "image_url": "x"}]}, "text only"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "needs name"),
        ({"type": "item_reference", "id": "x"}, "'item_reference' are not supported"),
        ({"type": "web_search_call", "id": "x", "status": "completed"}, "stores no items"),
    ],
)
def test_unsupported_items_are_refused_with_advice(item: Json, advice: str) -> None:
    with pytest.raises((ValidationError, ApiError)) as error:
        to_chat(request(RESPONSES, [item]))
    assert advice in str(error.value)


def test_errors_in_nested_objects_suggest_the_nearest_field(api: Client) -> None:
    schema = {"schema": {}, "strikt": True}
    for extra, name in (
        ({"stream_options": {"include_usag": True}}, "'include_usage'"),
        ({"response_format": {"type": "json_schema", "json_schema": schema}}, "'strict'"),
        ({"speculative": {"dept": 3}}, "'depth'"),
    ):
        error = api.http.post(CHAT, json={"messages": [HI]} | extra).json()["error"]
        assert name in error["message"] and "Extra inputs" not in error["message"], error


# Messages as the chat template receives them


TEXT = [{"type": "output_text", "text": "Yes."}]
THINKING = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
SUMMARY = [{"type": "summary_text", "text": "Hm."}]
REASONING = [{"type": "reasoning_text", "text": "Hm."}]


@pytest.mark.parametrize(
    ("path", "messages"),
    [
        *((CHAT, [assistant("Yes.", **{name: "Hm."})]) for name in ("reasoning", "thinking")),
        (CHAT, [assistant("Yes.", reasoning="Hm.", reasoning_content="Hm.")]),
        (CHAT, [assistant([THINKING, {"type": "text", "text": "Yes."}])]),
        (OLLAMA, [ollama.Message(role="assistant", content="Yes.", thinking="Hm.").model_dump()]),
        (RESPONSES, [{"type": "reasoning", "summary": SUMMARY}, assistant(TEXT, type="message")]),
        (RESPONSES, [{"type": "reasoning", "content": REASONING}, assistant("Yes.")]),
        (RESPONSES, [assistant("Yes.", reasoning_content="Hm.")]),
    ],
)
def test_reasoning_reaches_the_template(path: str, messages: list[Json]) -> None:
    assert formatted(path, messages) == [assistant("Yes.", reasoning_content="Hm.")]


def test_formatted_messages_are_rendered(
    state: ServerState, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[Any] = []

    def render(_: Any, messages: Any, *args: Any, **variables: Any) -> list[int]:
        rendered.extend(messages)
        return [5]

    monkeypatch.setattr(type(llm.tokenizer), "chat", render)
    prepare_chat(state, request(CHAT, [assistant("Yes.", reasoning="Hm.")]))
    assert rendered == [assistant("Yes.", reasoning_content="Hm.")]


def test_names_of_tools_and_refusals_reach_the_template() -> None:
    result = {"role": "tool", "content": "5"}
    for path in (CHAT, OLLAMA):
        assert formatted(path, [result | {"tool_name": "w"}]) == [result | {"name": "w"}]
    no = "I cannot."
    assert formatted(CHAT, [assistant(None, refusal=no)]) == [assistant(no)]
    for path in (CHAT, RESPONSES):
        refusal = assistant([{"type": "refusal", "refusal": no}])
        assert formatted(path, [refusal]) == [assistant(no)]


def test_items_of_one_answer_become_one_message() -> None:
    call = {"type": "function_call", "name": "w", "arguments": "{}"}
    items: list[Json] = [
        {"type": "reasoning", "summary": SUMMARY},
        assistant("Yes."),
        *(call | {"call_id": f"c{i}"} for i in range(2)),
        assistant("Done."),
        assistant("Really."),
    ]
    first, *others = formatted(RESPONSES, items)
    assert first["content"] == "Yes." and first["reasoning_content"] == "Hm."
    assert [call["id"] for call in first["tool_calls"]] == ["c0", "c1"]
    assert others == [assistant("Done."), assistant("Really.")]


# Tool calls: the grammar of required ones, and the parser of chosen ones


CALL_TEXT = '{"name": "w", "arguments": {"c": 1}}'
TAGGED = f"<tool_call>{CALL_TEXT}</tool_call>"


def tool(name: str, **parameters: object) -> Tool:
    return Tool.model_validate(
        {"type": "function", "function": {"name": name, "parameters": parameters}}
    )


KNOWN = [tool("w"), tool("v")]


def parsed(text: str, known: list[Tool] = KNOWN) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text without calls, and the calls as (name, arguments)."""
    rest, calls = ToolCallParser(known).read(text, is_last=True)
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    return rest, [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls
    ]


def streamed(pieces: list[str], known: list[Tool] = KNOWN) -> tuple[str, list[tuple[str, Any]]]:
    parser = ToolCallParser(known)
    parts = [*(parser.read(piece, is_last=False) for piece in pieces), parser.read("", True)]
    calls = [call["function"] for _, calls in parts for call in calls]
    return "".join(text for text, _ in parts), [
        (call["name"], json.loads(call["arguments"])) for call in calls
    ]


C1 = ("w", {"c": 1})
OPEN = "<tool_call>"
OTHER = '<tool_call>{"name": "x"}</tool_call>'
TAG_IN_STRING = '<tool_call>{"name":"w","arguments":{"c":"{}</tool_call>"}}</tool_call>'
CALL_IN_STRING = '{"name":"w","arguments":{"c":"<tool_call>{\\"name\\": \\"w\\"}"}}'
BROKEN = '<tool_call>{"name": "w", "arguments": {"c": 1}\n'
CUT = '<tool_call>{"name": "w", "arg'
EMOJI = '{"name": "\\u0077", "arguments": {"c": "\\ud83d\\ude00"}}'
SURROGATE = '{"name": "w", "arguments": {"c": "\\ud800"}}'
UNUSUAL: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {  # text, text without calls, calls
    "closing tag in a string": (TAG_IN_STRING, "", [("w", {"c": "{}</tool_call>"})]),
    "call in a string": (CALL_IN_STRING, "", [("w", {"c": '<tool_call>{"name": "w"}'})]),
    "first call not closed": (f"{OPEN}{CALL_TEXT}\n{TAGGED}", "", [C1, C1]),
    "first call broken": (f"{BROKEN}{TAGGED}", BROKEN, [C1]),
    "tag in prose": (f"Write {OPEN}{{name}}. {TAGGED}", f"Write {OPEN}{{name}}. ", [C1]),
    "tag and quote in prose": (f'{OPEN}{{"name" of}} {TAGGED}', f'{OPEN}{{"name" of}} ', [C1]),
    "tag alone in prose": (f"Use {OPEN} tags: {TAGGED}", f"Use {OPEN} tags: ", [C1]),
    "text around and between": (f"a {TAGGED} b {TAGGED} c", "a  b  c", [C1, C1]),
    "prose after a call not closed": (f"{OPEN}{CALL_TEXT} I wait.", " I wait.", [C1]),
    "unknown tool": (OTHER, OTHER, []),
    "unknown tool first": (f"{OTHER}\n{TAGGED}", f"{OTHER}\n", [C1]),
    "unknown tool in between": (f"{TAGGED}{OTHER}{TAGGED}", OTHER, [C1, C1]),
    "several within tags": (f"{OPEN}\n{CALL_TEXT}\n{CALL_TEXT}\n</tool_call>", "", [C1, C1]),
    "list within tags": (f"{OPEN}[{CALL_TEXT}, {CALL_TEXT}]</tool_call>", "", [C1, C1]),
    "line end between calls": (f" {TAGGED}\n{TAGGED}", "", [C1, C1]),
    "line ends and spaces": (f"{OPEN}\n\n {CALL_TEXT} \n</tool_call>\n", "", [C1]),
    "line end in a string": (CALL_TEXT.replace("1", '"a\nb"'), "", [("w", {"c": "a\nb"})]),
    "object before text": (f"{CALL_TEXT} and that is all", " and that is all", [C1]),
    "several objects": (f"{CALL_TEXT}; {CALL_TEXT}\n{CALL_TEXT}", "", [C1, C1, C1]),
    "list of calls": (f" [{CALL_TEXT}, {CALL_TEXT}]", "", [C1, C1]),
    "list of calls and others": (f"[{CALL_TEXT}, 1]", f"[{CALL_TEXT}, 1]", []),
    "empty list": ("[]", "[]", []),
    "parameters": ('{"name": "w", "parameters": {"c": 1}}', "", [C1]),
    "no arguments": ('{"name": "w"}', "", [("w", {})]),
    "arguments as text": ('{"name": "w", "arguments": "{\\"c\\": 1}"}', "", [C1]),
    "function within": (f'{{"type": "function", "function": {CALL_TEXT}}}', "", [C1]),
    "unicode escapes": (EMOJI, "", [("w", {"c": "\U0001f600"})]),
    "lone surrogate": (SURROGATE, "", [("w", {"c": "\ufffd"})]),
    "name that is a list": ('{"name": ["w"]}', '{"name": ["w"]}', []),
    "object that is no call": (f"{{}} {TAGGED}", "{} ", [C1]),
    "prose like an object": (f"{{x}} is a set. {TAGGED}", "{x} is a set. ", [C1]),
    "cut short": (CUT, CUT, []),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_calls_are_found_in_unusual_texts(case: str) -> None:
    text, rest, calls = UNUSUAL[case]
    assert parsed(text) == (rest, calls)
    assert streamed(list(text)) == (rest, calls)


NOT_OBJECTS = ['"Paris"', '["a"]', "5", "true", '"[1]"', '"null and void"', '{"x": NaN}']
NOT_OBJECTS += [
    f'{{"x": {x}}}' for x in ("1e999", "9" * 700, "[" * 99 + "]" * 99, "[" * 91 + "]" * 91)
]


@pytest.mark.parametrize("arguments", NOT_OBJECTS)
def test_calls_whose_arguments_could_not_be_sent_back_stay_text(arguments: str) -> None:
    """The server must accept each call that it returns in the next request."""
    text = f'<tool_call>{{"name": "w", "arguments": {arguments}}}</tool_call>'
    assert parsed(text) == (text, []) == streamed(list(text))


@pytest.mark.parametrize("arguments", ['""', "null", '" "', '"null"', '"{}"', "{}"])
def test_empty_arguments_are_an_empty_object(arguments: str) -> None:
    assert parsed(f'{{"name": "w", "arguments": {arguments}}}') == ("", [("w", {})])
    assert parsed(f'{{"name": "w", "parameters": {arguments}}}') == ("", [("w", {})])


MARKS = ["<tool_call>", "</tool_call>", "<tool", "x", "\\", *'{}[]":,; \n']
OBJECTS = [CALL_TEXT, '{"name": "w"}', '{"name": "x"}', '{"a": "', '"name": "w"', '["']
PIECES = st.lists(st.sampled_from([*MARKS, *OBJECTS]), max_size=14)


def expected(text: str) -> tuple[str, list[str]]:
    """Return the text without calls and the names of the calls, found by Python's JSON decoder."""
    decoder = json.JSONDecoder(strict=False)
    rest: list[str] = []
    calls: list[str] = []

    def value(at: int) -> tuple[Any, int] | None:
        try:
            return decoder.raw_decode(text, at) if text[at : at + 1] in ("{", "[") else None
        except ValueError:
            return None

    def skipped(at: int) -> int:
        while text[at : at + 1].isspace():
            at += 1
        return at

    at = opening = 0  # the position, and the start of what is text unless a call follows
    wanted = True
    while True:
        read = value(skipped(at)) if wanted else None
        if read is not None:
            items = read[0] if isinstance(read[0], list) else [read[0]]
            names = [item.get("name") if isinstance(item, dict) else None for item in items]
            if names and all(name == "w" for name in names):
                calls += names
                at = opening = read[1]
                behind = skipped(at)
                if text.startswith("</tool_call>", behind):
                    at = opening = behind + len("</tool_call>")
                    wanted = False
                elif text[behind : behind + 1] in (";", ","):
                    at = behind + 1
                continue
            at = read[1]
        mark = text.find("<tool_call>", at)
        rest.append(text[opening : mark if mark >= 0 else len(text)])
        if mark < 0:
            break
        at, opening, wanted = mark + len("<tool_call>"), mark, True
    left = "".join(rest)
    return left if left.strip() else "", calls


@given(PIECES)
@example(["{", '"name": "w"', "}", ",", "x"])
def test_calls_equal_those_of_a_reference_parser(pieces: list[str]) -> None:
    text = "".join(pieces)
    rest, calls = ToolCallParser([tool("w")]).read(text, is_last=True)
    assert (rest, [call["function"]["name"] for call in calls]) == expected(text)


@given(PIECES, st.lists(st.integers(0, 200), max_size=30))
def test_parsing_in_pieces_equals_parsing_at_once(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in pairwise(places)]
    assert streamed(parts) == streamed(list(text)) == parsed(text)


def test_text_is_streamed_as_soon_as_it_cannot_begin_a_call() -> None:
    """A call is streamed as soon as it is complete, not at the end of the answer."""
    parser = ToolCallParser(KNOWN)
    assert parser.read("Use <tool_call>{", False) == ("Use ", [])
    assert parser.read("name} here <to", False) == ("<tool_call>{name} here ", [])
    assert parser.read("ol> and ", False) == ("<tool> and ", [])
    text, (call,) = parser.read(f"<tool_call>{CALL_TEXT}", False)
    assert text == "" and call["function"]["name"] == "w"
    assert parser.read("</tool_call>", False) == ("", [])
    assert parser.read(" x", False) == (" x", []) and parser.read("", True) == ("", [])


INCOMPLETE = ["<tool_call>{", "<tool_call> ", "}", "} <tool_call>{", " ", "{", '<tool_call>{"']
INCOMPLETE += ['<tool_call>{"a":"', "<tool_call>[", '<tool_call>{"a":"\\"', '<tool_call>{",":[","']
INCOMPLETE += ['<tool_call>{"a":{"b":', "<tool_call>{}", '{"a":"<tool_call>"},']


@pytest.mark.parametrize("piece", INCOMPLETE)
@pytest.mark.parametrize("size", [1 << 20, 12], ids=["at once", "streamed"])
def test_many_incomplete_calls_are_parsed_in_linear_time(
    piece: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each character is scanned at most twice, which is counted here; quadratic time took minutes."""
    scans = [Counted(conversation.WITHIN_STRING), Counted(conversation.BETWEEN_STRINGS)]
    monkeypatch.setattr(conversation, "WITHIN_STRING", scans[0])
    monkeypatch.setattr(conversation, "BETWEEN_STRINGS", scans[1])
    text = piece * 2000 + "x"
    rest, calls = streamed([text[at : at + size] for at in range(0, len(text), size)])
    assert not calls and rest == text
    assert sum(scan.read for scan in scans) <= 2 * len(text)


class Counted:
    """A pattern that counts the characters it has matched."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern, self.read = pattern, 0

    def match(self, text: str, at: int) -> re.Match[str]:
        match = self.pattern.match(text, at)
        assert match is not None
        self.read += match.end() - at
        return match


# Required calls


def accepts(llm: LLM, grammar: Grammar | None, text: str) -> bool:
    """Return True if the compiled grammar accepts the text as a complete output."""
    assert grammar is not None and llm.tokenizer is not None
    core = llm.engine.grammars.compiled_each(grammar, 1)[0].core.deep_copy()
    return (
        all(core.consume_token(token) for token in llm.tokenizer.encode(text, False))
        and core.is_accepting()
    )


LEAF = {"enum": ["leaf"]}
CLOSED = {"type": "object", "additionalProperties": False}
DEFS = {"$defs": {"x": LEAF}}
NAMED = {"type": "function", "function": {"name": "f"}}
TREE_SCHEMA = {"next": {"$ref": "#/$defs/tree"}, "leaf": {"$ref": "#/$defs/leaf"}}


def closed(**properties: Any) -> dict[str, Any]:
    return CLOSED | {"properties": properties}


REFERENCES: dict[
    str, tuple[dict[str, Any], list[Any], list[Any]]
] = {  # schema, accepted values, rejected values
    "$defs": (closed(a={"$ref": "#/$defs/x"}) | DEFS, [{"a": "leaf"}, {}], [{"a": 1}]),
    "definitions": (
        closed(a={"$ref": "#/definitions/x"}) | {"definitions": {"x": LEAF}},
        [{"a": "leaf"}],
        [{"a": 1}],
    ),
    "a property": (
        closed(a={"type": "integer"}, b={"$ref": "#/properties/a"}),
        [{"a": 1, "b": 2}],
        [{"b": "x"}],
    ),
    "the root": (closed(a={"$ref": "#"}), [{"a": {"a": {}}}], [{"a": 1}, {"name": "f"}]),
    "nested $defs": (
        closed(a={"$ref": "#/$defs/x/$defs/y"}) | {"$defs": {"x": {"$defs": {"y": LEAF}}}},
        [{"a": "leaf"}],
        [{"a": "other"}],
    ),
    "definitions that refer to each other": (
        {"$ref": "#/$defs/tree", "$defs": {"tree": closed(**TREE_SCHEMA), "leaf": LEAF}},
        [{"next": {"next": {"leaf": "leaf"}}}],
        [{"next": 1}, {"next": {"leaf": 1}}],
    ),
    "within a list": (
        closed(a={"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#"}]}})
        | DEFS,
        [{"a": ["leaf", {"a": []}]}],
        [{"a": [1]}],
    ),
    "escaped pointers": (
        closed(a={"$ref": "#/$defs/x~1y"}, b={"$ref": "#/$defs/p%25q"})
        | {"$defs": {"x/y": LEAF, "p%q": {"enum": [2]}}},
        [{"a": "leaf", "b": 2}],
        [{"a": 2}, {"b": "leaf"}],
    ),
    "$anchor": (
        closed(a={"$ref": "#here"}) | {"$defs": {"x": LEAF | {"$anchor": "here"}}},
        [{"a": "leaf"}],
        [{"a": 1}],
    ),
    "$id": (
        closed(a={"$ref": "t.json#/$defs/x"}) | {"$id": "https://example.com/t.json"} | DEFS,
        [{"a": "leaf"}],
        [{"a": 1}],
    ),
    "a reference that is data": (
        closed(a={"const": {"$ref": "#/$defs/x"}}, b={"enum": [{"$ref": "#"}]}),
        [{"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#"}}],
        [{"a": {"$ref": "#"}}],
    ),
    "a property called $ref": (
        CLOSED | {"properties": {"$ref": LEAF, "b": {"$ref": "#/properties/$ref"}}},
        [{"$ref": "leaf", "b": "leaf"}],
        [{"$ref": 1}, {"b": 1}],
    ),
    "a default": (
        closed(a={"type": "string", "default": {"$ref": "#/no"}, "examples": [{"$ref": "#/no"}]}),
        [{"a": "x"}],
        [{"a": 1}],
    ),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_parameters_mean_what_they_mean_as_a_response_format(llm: LLM, case: str) -> None:
    """References count from the root of the tool's own schema, wherever it stands in the grammar of
    the call."""
    schema, right, wrong = REFERENCES[case]
    form = Grammar.of("json_schema", schema)
    other = tool("g", **closed(a={"$ref": "#/$defs/x"}), **{"$defs": {"x": {"enum": ["other"]}}})
    call = conversation.required_call([other, tool("f", **schema)], "required")
    named = conversation.required_call(
        [other, tool("f", **schema)], NamedTool.model_validate(NAMED)
    )
    for value in [*right, *wrong]:
        text = json.dumps(value, separators=(",", ":"))
        assert accepts(llm, form, text) is (value in right), text
        for grammar in (call, named):
            assert accepts(llm, grammar, f'{{"name":"f","arguments":{text}}}') is (
                value in right
            ), text
    assert accepts(llm, call, '{"name":"g","arguments":{"a":"other"}}'), (
        "each tool has its own definitions"
    )
    assert not accepts(llm, call, '{"name":"g","arguments":{"a":"leaf"}}')
    assert not accepts(llm, named, '{"name":"g","arguments":{}}')


@pytest.mark.parametrize(
    "parameters",
    [{}, {"description": "x"}, {"properties": {"a": LEAF}}, {"type": ["object", "null"]}],
)
def test_arguments_that_are_demanded_are_an_object(llm: LLM, parameters: dict[str, Any]) -> None:
    """Other values are no arguments: a client could not send them back."""
    grammar = conversation.required_call([tool("f", **parameters)], "required")
    assert accepts(llm, grammar, '{"name":"f","arguments":{}}')
    for text in ("null", "5", '"x"', "[]"):
        assert not accepts(llm, grammar, f'{{"name":"f","arguments":{text}}}')


@pytest.mark.parametrize("kind", ["string", ["string", "null"], 5])
def test_parameters_that_allow_no_object_are_refused(kind: object) -> None:
    with pytest.raises(ApiError, match="the parameters of 'f' must be a schema of type object"):
        conversation.required_call([tool("f", type=kind)], "required")


def test_a_schema_that_cannot_be_used_is_refused_in_one_line(llm: LLM) -> None:
    """The error names the mistake in the schema, not the grammar that is made from the schema."""
    grammar = conversation.required_call([tool("f", **closed(a={"$ref": "#/nowhere"}))], "required")
    with pytest.raises(RequestError) as error:
        accepts(llm, grammar, "")
    assert (
        str(error.value)
        == "the tool_calls grammar cannot be used: Pointer '/nowhere' does not exist"
    )
