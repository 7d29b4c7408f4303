"""Conversations as clients send them back: the server's own answers, and what clients add."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ollama
import openai
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import ValidationError

from forerun.engine.stats import RequestStats
from forerun.llm import LLM
from forerun.server import limits
from forerun.server import ollama as ollama_api
from forerun.server.conversation import template_messages
from forerun.server.errors import ApiError
from forerun.server.ollama import Ollama, OllamaChat
from forerun.server.openai import Chat, prepare_chat
from forerun.server.outputs import Output
from forerun.server.protocol import Body, ChatRequest, ResponsesRequest, TokenizeRequest
from forerun.server.responses import Responses, to_chat
from forerun.server.state import ServerState
from forerun.server.streaming import Formatter
from forerun.types import Event
from tests.server.serving import Front, Serving

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
    """As the clients' own models dump them, whatever the model wrote, streamed and in full."""
    talks: dict[str, list[Json]] = {name: [] for name in ("anthropic", *MODELS)}
    for pieces, stream in turns:
        message = openai_message(state, pieces, stream)
        talks[CHAT] += [HI, message, *results(CHAT, message)]
        used: list[Json] = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "5"}
            for call in message["tool_calls"] or ()
        ]
        used.append({"type": "text", "text": "and?", "cache_control": {}})
        talks["anthropic"] += [HI, anthropic_message(message), {"role": "user", "content": used}]
        items = openai_items(state, pieces, stream)
        talks[RESPONSES] += [HI, *items]
        text = [{"type": "output_text", "text": "5", "annotations": []}]
        output = {"type": "function_call_output", "output": text}
        ids = [item["call_id"] for item in items if item["type"] == "function_call"]
        talks[RESPONSES] += [output | {"call_id": id_} for id_ in ids]
        other = ollama_message(state, pieces, stream)
        talks[OLLAMA] += [HI, other, *results(OLLAMA, other)]
    found = {}
    for name, path in [*zip(MODELS, MODELS, strict=True), ("anthropic", CHAT)]:
        messages = [*talks[name], HI]
        assert prepare_chat(state, chat_of(request(path, messages)))[1]
        found[name] = [without_ids(values) for values in formatted(path, messages)]
    for name in (CHAT, "anthropic"):
        assert prepare_chat(state, chat_of(request(OLLAMA, [*talks[name], HI])))[1]
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


@pytest.mark.one_in(5)
@pytest.mark.parametrize("generated", [*ARGUMENTS, "one\u2028two"])
def test_openais_client_sends_back_what_it_was_given(client: openai.OpenAI, generated: str) -> None:
    text = f'<tool_call>{{"name": "w", "arguments": {generated}}}</tool_call>'
    form = {"response_format": {"type": "choice", "choice": [text]}}
    asked: Json = {"tools": TOOLS[CHAT], "model": "tiny", "max_tokens": 120}
    messages: list[Any] = [HI]
    for stream in (False, True):
        if stream:
            with client.chat.completions.stream(messages=messages, extra_body=form, **asked) as s:
                answer = s.get_final_completion()
        else:
            answer = client.chat.completions.create(messages=messages, extra_body=form, **asked)
        message = answer.choices[0].message.model_dump()
        messages += [message, *results(CHAT, message), HI]
    assert client.chat.completions.create(messages=messages, **asked | {"max_tokens": 2}).choices


@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_client_reads_every_line_and_sends_it_back(front: Front, stream: bool) -> None:
    """It splits lines at Unicode's line ends, and raised where a text held one."""
    client = ollama.Client(host=front.url)
    asked: Json = {"model": "tiny", "format": {"const": "one\u2028two\x85"}}
    answers: Any = client.chat(messages=[HI], stream=stream, options={"num_predict": 60}, **asked)
    parts = list(answers) if stream else [answers]
    text = "".join(part.message.content or "" for part in parts)
    assert json.loads(text) == "one\u2028two\x85"
    messages = [HI, ollama.Message(role="assistant", content=text, thinking="Hm."), HI]
    more: Json = {"tools": TOOLS[OLLAMA], "options": {"num_predict": 2}}
    assert client.chat(messages=messages, model="tiny", **more).message


# What clients add


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
def test_what_clients_add_is_ignored_by_name(place: str, name: str) -> None:
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
def test_items_of_a_response_are_read(state: ServerState, item: Json, ignored: Any) -> None:
    body = request(RESPONSES, [HI, item, HI])
    assert body.ignored == ignored and prepare_chat(state, to_chat(body))[1]


@pytest.mark.parametrize("path", [*MODELS, "/tokenize"])
def test_ignored_fields_within_messages_are_in_the_header(front: Front, path: str) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    messages = [HI | {"content": [part, part]}, HI | {"phase": "commentary"}]
    body: Json = {"model": "tiny", "input" if path == RESPONSES else "messages": messages}
    body |= {CHAT: {"max_tokens": 2}, RESPONSES: {"max_output_tokens": 2}}.get(path, {})
    body |= {"options": {"num_predict": 2}} if path == OLLAMA else {}
    for more in [{}] if path == "/tokenize" else [{"stream": False}, {"stream": True}]:
        response = front.http.post(path, json=body | more)
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
    front: Front, place: str, extra: Json, where: str, advice: str
) -> None:
    response = front.http.post(CHAT, json=PLACES[place](extra))
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


def test_other_objects_name_the_nearest_field_too(front: Front) -> None:
    schema = {"schema": {}, "strikt": True}
    for extra, name in (
        ({"stream_options": {"include_usag": True}}, "'include_usage'"),
        ({"response_format": {"type": "json_schema", "json_schema": schema}}, "'strict'"),
        ({"speculative": {"dept": 3}}, "'depth'"),
    ):
        error = front.http.post(CHAT, json={"messages": [HI]} | extra).json()["error"]
        assert name in error["message"] and "Extra inputs" not in error["message"], error


# What reaches the template


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
