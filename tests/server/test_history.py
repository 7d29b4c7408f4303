"""Conversations as clients send them back: what the server said is accepted, and so is what clients
add to it."""

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
from forerun.server import bounds
from forerun.server.outputs import Output as Answer
from forerun.server.openai import prepare_chat as chat_orders
from forerun.server.openai import Chat
from forerun.server.errors import ApiError
from forerun.server.kitchen import Kitchen
from forerun.server.ollama import Ollama
from forerun.server.ollama import OllamaChat, to_chat as chat_of
from forerun.server.protocol import Body, ChatRequest, ResponsesRequest, TokenizeRequest
from forerun.server.responses import Responses, to_chat as as_chat
from forerun.server.conversation import template_messages as plain
from forerun.types import Event
from tests.server.serving import Front, Serving

Json = dict[str, Any]
PATHS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/api/chat": OllamaChat,
}
CHAT, RESPONSES, OLLAMA = PATHS
PARAMETERS = {"type": "object", "properties": {"c": {}}}
TOOLS: dict[str, list[Json]] = {
    CHAT: [
        {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in "wv"
    ],
    RESPONSES: [{"type": "function", "name": name, "parameters": PARAMETERS} for name in "wv"],
}
TOOLS[OLLAMA] = TOOLS[CHAT]
HI = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "w", "arguments": '{"c": 1}'}}


@pytest.fixture(scope="session")
def server(front: Front) -> Front:
    return front


@pytest.fixture
def kitchen(serve: Serving) -> Kitchen:
    found: Kitchen = serve.server.config.app.state.kitchen  # type: ignore[union-attr]
    return found


def request(path: str, messages: list[Json], **more: Any) -> Any:
    """A request with this conversation as the server reads it from its bytes."""
    name = "input" if path == RESPONSES else "messages"
    body = {"model": "tiny", name: messages, "tools": TOOLS[path]} | more
    return PATHS[path].model_validate(bounds.parse(json.dumps(body).encode()))


def chat_from(body: Any) -> ChatRequest:
    """The chat that a request of any API is understood as."""
    if isinstance(body, ResponsesRequest):
        return as_chat(body)
    return chat_of(body) if isinstance(body, OllamaChat) else body


def laid_out(path: str, messages: list[Json]) -> list[Json]:
    """A conversation as a chat template gets it."""
    return [
        values
        for message in chat_from(request(path, messages)).messages
        for values in plain(message)
    ]


# ------------------------------------------------------------ what the server says


class Said:
    """An answer of this server that says a given text, in pieces, as each API writes it and its
    client reads it."""

    def __init__(self, kitchen: Kitchen, path: str, pieces: list[str], stream: bool) -> None:
        self.body = request(path, [HI], stream=stream)
        chat = Chat(kitchen, chat_from(self.body), 1, 0)
        dialects: dict[str, Callable[[], Any]] = {
            CHAT: lambda: chat,
            RESPONSES: lambda: Responses(chat, self.body),
            OLLAMA: lambda: Ollama(chat, self.body),
        }
        self.dialect, self.pieces = dialects[path](), pieces

    def answer(self) -> Answer:
        order = SimpleNamespace(params=SimpleNamespace(logprobs=None), references=[])
        ticket: Any = SimpleNamespace(order=order, request=SimpleNamespace(stats=RequestStats()))
        ticket.arrived = ticket.first = ticket.last = 0.0
        return Answer(ticket)

    def events(self) -> Iterator[Event]:
        for i, piece in enumerate(self.pieces):
            yield Event(
                0, [i], [""], [piece], finish_reason="stop" if i == len(self.pieces) - 1 else None
            )

    def whole(self) -> Json:
        answer = self.answer()
        for event in self.events():
            answer.add(event)
        return json.loads(json.dumps(self.dialect.full([answer])))

    def lines(self) -> list[Json]:
        answer = self.answer()
        lines = [*self.dialect.begin([answer])]
        for event in self.events():
            answer.add(event)
            lines += self.dialect.chunks([answer], 0, event)
        lines += self.dialect.end([answer])
        texts = [
            line
            for block in lines
            for line in block.splitlines()
            if line and not line.startswith("event: ")
        ]
        return [json.loads(text.removeprefix("data: ")) for text in texts]


def openai_message(kitchen: Kitchen, pieces: list[str], stream: bool) -> Json:
    """The message of an answer as the openai client's own models dump it."""
    said = Said(kitchen, CHAT, pieces, stream)
    if not stream:
        return ChatCompletion.model_validate(said.whole()).choices[0].message.model_dump()
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for line in said.lines():
        state.handle_chunk(ChatCompletionChunk.model_validate(line))
    return state.get_final_completion().choices[0].message.model_dump()


def openai_items(kitchen: Kitchen, pieces: list[str], stream: bool) -> list[Json]:
    """The output of a response as the openai client's own models dump it."""
    said = Said(kitchen, RESPONSES, pieces, stream)
    response = said.lines()[-1]["response"] if stream else said.whole()
    return [item.model_dump() for item in Response.model_validate(response).output]


def ollama_message(kitchen: Kitchen, pieces: list[str], stream: bool) -> Json:
    """The message of an answer as the ollama client's own models dump it."""
    said = Said(kitchen, OLLAMA, pieces, stream)
    lines = said.lines() if stream else [said.whole()]
    parts = [ollama.ChatResponse(**line).message for line in lines]
    calls = [call for part in parts for call in part.tool_calls or ()]
    text = "".join(part.content or "" for part in parts)
    return ollama.Message(role="assistant", content=text, tool_calls=calls or None).model_dump(
        exclude_none=True
    )


def anthropic_message(message: Json) -> Json:
    """The same in parts, as Anthropic's clients keep it, with a mark for their cache at the end."""
    parts: list[Json] = [{"type": "thinking", "thinking": "Hm.", "signature": "c2lnbmVk"}]
    if message["content"]:
        parts.append({"type": "text", "text": message["content"], "citations": None})
    for call in message["tool_calls"] or ():
        function = call["function"]
        given = json.loads(function["arguments"])
        parts.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}
        )
    parts[-1]["cache_control"] = {"type": "ephemeral"}
    return {"role": "assistant", "content": parts}


def results(path: str, message: Json) -> list[Json]:
    """What the tools of a message say, as the client of this API writes it."""
    calls = message.get("tool_calls") or []
    if path == OLLAMA:
        return [
            {"role": "tool", "tool_name": call["function"]["name"], "content": "5"}
            for call in calls
        ]
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "5"}]}
        for call in calls
    ]


ARGUMENTS = (
    '{"c": 1}',
    '{"c": "\\u2028\\ud800"}',
    '""',
    '"Paris"',
    "null",
    '["a"]',
    '{"c": NaN}',
    '"{\\"c\\": 2}"',
    "5",
)
WRITTEN = [
    *(f'{{"name": "w", "arguments": {arguments}}}' for arguments in ARGUMENTS),
    *(
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        "; ",
        "[",
        "]",
        "{}",
        "",
        "Well",
        "<think>Hm.</think>",
        "\u2028\x85",
    ),
    *(
        '{"name": "v", "parameters": {"c": {"d": []}}}',
        '{"name": "unknown", "arguments": {}}',
        "I cannot do that.",
    ),
]
TEXTS = st.lists(st.sampled_from(WRITTEN), min_size=1, max_size=6)
CONVERSATIONS = st.lists(st.tuples(TEXTS, st.booleans()), min_size=1, max_size=3)
USUAL = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check(kitchen: Kitchen, path: str, messages: list[Json]) -> list[Json]:
    """The server accepts a conversation: it is read, laid out and tokenized. How a template gets
    it."""
    chat = chat_from(request(path, messages))
    assert chat_orders(kitchen, chat)[1]
    return [values for message in chat.messages for values in plain(message)]


@USUAL
@given(CONVERSATIONS)
@example([(['<tool_call>{"name": "w", "arguments": "Paris"}</tool_call>'], True)])
@example([([WRITTEN[2]], False), ([WRITTEN[4]], True), ([WRITTEN[5]], False)])
def test_what_the_server_said_is_accepted_in_the_next_request(kitchen: Kitchen, turns: Any) -> None:
    """Dumped by the clients' own models, whatever the model wrote, streamed and whole."""
    talks: dict[str, list[Json]] = {
        name: [] for name in ("openai", "anthropic", "responses", "ollama")
    }
    for pieces, stream in turns:
        message = openai_message(kitchen, pieces, stream)
        talks["openai"] += [HI, message, *results(CHAT, message)]
        used = [
            {"type": "tool_result", "tool_use_id": c["id"], "content": "5"}
            for c in message["tool_calls"] or ()
        ]
        said = {
            "role": "user",
            "content": [*used, {"type": "text", "text": "and?", "cache_control": {}}],
        }
        talks["anthropic"] += [HI, anthropic_message(message), said]
        items = openai_items(kitchen, pieces, stream)
        output = [{"type": "output_text", "text": "5", "annotations": []}]
        talks["responses"] += [HI, *items]
        talks["responses"] += [
            {"type": "function_call_output", "call_id": item["call_id"], "output": output}
            for item in items
            if item["type"] == "function_call"
        ]
        other = ollama_message(kitchen, pieces, stream)
        talks["ollama"] += [HI, other, *results(OLLAMA, other)]
        assert len({json.dumps(calls(talk)) for talk in talks.values()}) == 1, (
            "each says the same calls"
        )
    for name, path in (
        ("openai", CHAT),
        ("anthropic", CHAT),
        ("responses", RESPONSES),
        ("ollama", OLLAMA),
    ):
        check(kitchen, path, [*talks[name], HI])
    check(kitchen, OLLAMA, [*talks["openai"], HI])
    check(kitchen, OLLAMA, [*talks["anthropic"], HI])
    seen = check(kitchen, CHAT, talks["openai"])
    assert [bare(m) for m in seen] == [
        bare(m) for m in check(kitchen, RESPONSES, talks["responses"])
    ]


def calls(talk: list[Json]) -> list[Any]:
    """Names and arguments of all calls in a conversation of any client."""
    found = []
    for message in talk:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            found += [(part["name"], part["input"])] if part["type"] == "tool_use" else []
        for call in (
            [message] if message.get("type") == "function_call" else message.get("tool_calls") or ()
        ):
            function = call.get("function", call)
            given = function["arguments"]
            found.append((function["name"], json.loads(given) if isinstance(given, str) else given))
    return found


def bare(message: Json) -> Json:
    """A message without the names of its calls, which differ from answer to answer."""
    return json.loads(json.dumps(message, sort_keys=True), object_hook=_without_ids)


def _without_ids(value: Json) -> Json:
    return {name: item for name, item in value.items() if name not in ("id", "tool_call_id")}


@pytest.mark.parametrize("arguments", ["", None, "{}", " ", "null"])
@pytest.mark.parametrize("path", PATHS)
def test_no_arguments_are_an_empty_object(path: str, arguments: Any) -> None:
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL | {"function": {"name": "w"}}],
    }
    message["tool_calls"][0]["function"]["arguments"] = arguments
    item = {"type": "function_call", "call_id": "call_1", "name": "w", "arguments": arguments}
    (values,) = laid_out(path, [item if path == RESPONSES else message])
    assert values["tool_calls"][0]["function"] == {"name": "w", "arguments": {}}


# ------------------------------------------------------------ what clients add


EXTRA: dict[str, Json] = {
    "cache_control": {"type": "ephemeral"},
    "annotations": [{"type": "url_citation"}],
    "provider_specific_fields": {"a": 1},
    "id": "msg_1",
    "metadata": {"a": "b"},
    "thought_signature": "c2lnbmVk",
}
PLACES: dict[str, Callable[[Json], Json]] = {
    "message": lambda extra: {"messages": [HI | extra]},
    "part": lambda extra: {
        "messages": [HI | {"content": [{"type": "text", "text": "hi"} | extra]}]
    },
    "call": lambda extra: {"messages": [HI, {"role": "assistant", "tool_calls": [CALL | extra]}]},
    "function of a call": lambda extra: {
        "messages": [
            HI,
            {"role": "assistant", "tool_calls": [CALL | {"function": CALL["function"] | extra}]},
        ]
    },
    "tool": lambda extra: {"messages": [HI], "tools": [TOOLS[CHAT][0] | extra]},
    "function of a tool": lambda extra: {
        "messages": [HI],
        "tools": [{"type": "function", "function": TOOLS[CHAT][0]["function"] | extra}],
    },
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "name", ["cache_control", "id", "metadata", "thought_signature", "provider_specific_fields"]
)
def test_what_clients_add_is_ignored_by_name(place: str, name: str) -> None:
    extra: Json = {} if (place, name) == ("call", "id") else {name: EXTRA[name]}
    body = PLACES[place](extra)
    for kind in (ChatRequest, OllamaChat):
        found = kind.model_validate(body | {"model": "tiny"})
        assert found.ignored == tuple(extra)
        assert (
            kind.model_validate(
                PLACES[place]({name: None} if extra else {}) | {"model": "tiny"}
            ).ignored
            == ()
        )
        bare = kind.model_validate(PLACES[place]({}) | {"model": "tiny"})
        assert found.model_dump() == bare.model_dump(), "and without effect"
    assert TokenizeRequest.model_validate({"messages": body["messages"]}).ignored == (
        () if "tool" in place.split() else tuple(extra)
    )


@pytest.mark.parametrize(
    ("item", "ignored"),
    [
        (
            {"type": "message", "role": "assistant", "content": "x", "phase": "final_answer"},
            ("phase",),
        ),
        (
            {
                "type": "function_call",
                "call_id": "c",
                "name": "w",
                "arguments": "{}",
                "namespace": "n",
            },
            ("namespace",),
        ),
        (
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "5"}],
            },
            (),
        ),
        (
            {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"},
            ("encrypted_content",),
        ),
        (
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "x", "cache_control": {"a": 1}}],
            },
            ("cache_control",),
        ),
        (
            {
                "role": "assistant",
                "content": "x",
                "refusal": None,
                "annotations": None,
                "audio": None,
            },
            (),
        ),
        ({"role": "assistant", "content": "x", "function_call": None, "tool_calls": None}, ()),
        (
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "x", "logprobs": [{"a": 1}]}],
            },
            ("logprobs",),
        ),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, ()),
    ],
)
def test_items_of_a_response_are_read(
    kitchen: Kitchen, item: Json, ignored: tuple[str, ...]
) -> None:
    body = request(RESPONSES, [HI, item, HI])
    assert body.ignored == ignored
    assert chat_orders(kitchen, as_chat(body))[1]


def test_an_ignored_field_is_in_the_header(server: Front) -> None:
    """Once, whole and streamed, and /tokenize says it too."""
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    said = [
        {"role": "user", "content": [part, part]},
        {"role": "user", "content": "x", "phase": "commentary"},
    ]
    for path in (CHAT, RESPONSES, OLLAMA, "/tokenize"):
        for stream in (False, True):
            body: Json = {"model": "tiny", "input" if path == RESPONSES else "messages": said}
            body |= {} if path == "/tokenize" else {"stream": stream}
            body |= {CHAT: {"max_tokens": 2}, RESPONSES: {"max_output_tokens": 2}}.get(path, {})
            body |= {"options": {"num_predict": 2}} if path == OLLAMA else {}
            response = server.http.post(path, json=body)
            assert response.status_code == 200, response.text
            assert response.headers["x-forerun-ignored"] == "cache_control, phase", path


REFUSED: list[tuple[str, Json, str, str]] = [
    ("message", {"contnet": "x"}, "messages.0", "did you mean 'content'?"),
    ("message", {"audio": {"id": "a"}}, "messages.0", "text only"),
    ("message", {"images": ["YQ=="]}, "messages.0", "text only"),
    ("message", {"prefix": True}, "messages.0", "/v1/completions"),
    (
        "message",
        {"function_call": {"name": "w", "arguments": "{}"}},
        "messages.0",
        "use tool_calls",
    ),
    ("message", {"reasoning": "a", "reasoning_content": "b"}, "messages.0", "give one"),
    ("part", {"txt": "x"}, "messages.0.content.0", "did you mean 'text'?"),
    ("part", {"type": "image_url"}, "messages.0.content.0", "text only"),
    ("call", {"custom": {}}, "messages.1.tool_calls.0", "type function"),
    (
        "function of a call",
        {"argument": "{}"},
        "messages.1.tool_calls.0.function",
        "did you mean 'arguments'?",
    ),
    ("tool", {"description": "x"}, "tools.0", 'put it into "function"'),
    ("tool", {"functoin": {}}, "tools.0", "did you mean 'function'?"),
    ("function of a tool", {"parameter": {}}, "tools.0.function", "did you mean 'parameters'?"),
    (
        "function of a tool",
        {"defer_loading": True},
        "tools.0.function",
        "defer_loading=True is not supported",
    ),
]


@pytest.mark.parametrize(("place", "extra", "where", "says"), REFUSED)
def test_what_cannot_be_taken_is_refused_with_advice(
    server: Front, place: str, extra: Json, where: str, says: str
) -> None:
    response = server.http.post(CHAT, json=PLACES[place](extra))
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == where and says in error["message"], (
        error
    )
    assert error["message"].startswith(f"{where}: ")


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"role": "assistant", "tool_calls": [CALL]}, "function_call"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "function_call_output"),
        ({"role": "user", "content": "x", "conten": "y"}, "did you mean 'content'?"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "text only"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "needs name"),
        (
            {"type": "item_reference", "id": "x"},
            "'item_reference' are not supported: this server takes message",
        ),
        (
            {"type": "web_search_call", "id": "x", "status": "completed"},
            "keeps nothing to refer to",
        ),
    ],
)
def test_items_that_cannot_be_taken_are_refused_with_advice(item: Json, says: str) -> None:
    with pytest.raises((ValidationError, ApiError)) as error:
        as_chat(request(RESPONSES, [item]))
    assert says in str(error.value)


def test_other_objects_say_the_nearest_name_too(server: Front) -> None:
    for extra, says in (
        ({"stream_options": {"include_usag": True}}, "'include_usage'"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {}, "strikt": True},
                }
            },
            "'strict'",
        ),
        ({"speculative": {"dept": 3}}, "'depth'"),
    ):
        error = server.http.post(CHAT, json={"messages": [HI]} | extra).json()["error"]
        assert says in error["message"] and "Extra inputs" not in error["message"], error


# ------------------------------------------------------------ what reaches the template


THOUGHT = [
    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
    {"type": "text", "text": "Yes."},
]


@pytest.mark.parametrize(
    ("path", "messages"),
    [
        *(
            (CHAT, [{"role": "assistant", "content": "Yes.", n: "Hm."}])
            for n in ("reasoning_content", "reasoning")
        ),
        (CHAT, [{"role": "assistant", "content": "Yes.", "thinking": "Hm."}]),
        (
            CHAT,
            [
                {
                    "role": "assistant",
                    "content": "Yes.",
                    "reasoning": "Hm.",
                    "reasoning_content": "Hm.",
                }
            ],
        ),
        (CHAT, [{"role": "assistant", "content": THOUGHT}]),
        (OLLAMA, [{"role": "assistant", "content": "Yes.", "thinking": "Hm."}]),
        (OLLAMA, [ollama.Message(role="assistant", content="Yes.", thinking="Hm.").model_dump()]),
        (
            RESPONSES,
            [
                {
                    "type": "reasoning",
                    "id": "r",
                    "summary": [{"type": "summary_text", "text": "Hm."}],
                    "content": None,
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Yes."}],
                },
            ],
        ),
        (
            RESPONSES,
            [
                {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm."}],
                },
                {"role": "assistant", "content": "Yes."},
            ],
        ),
        (RESPONSES, [{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]),
    ],
)
def test_thoughts_reach_the_template(path: str, messages: list[Json]) -> None:
    """They were refused, or dropped without a word."""
    assert laid_out(path, messages) == [
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    ]


def test_thoughts_are_rendered(kitchen: Kitchen, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        type(llm.tokenizer), "chat", lambda self, messages, *_, **__: given.extend(messages) or [5]
    )
    chat_orders(
        kitchen, request(CHAT, [{"role": "assistant", "content": "Yes.", "reasoning": "Hm."}])
    )
    assert given == [{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]


def test_names_of_tools_and_refusals_reach_the_template() -> None:
    said = {"role": "tool", "content": "5", "name": "w"}
    for path in (CHAT, OLLAMA):
        assert laid_out(path, [{"role": "tool", "content": "5", "tool_name": "w"}]) == [said]
    no = {"role": "assistant", "content": "I cannot."}
    assert laid_out(CHAT, [{"role": "assistant", "content": None, "refusal": "I cannot."}]) == [no]
    for path in (CHAT, RESPONSES):
        assert laid_out(
            path, [{"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}]
        ) == [no]


def test_one_answer_of_a_response_is_one_message() -> None:
    """As a chat would have it: thoughts, a text and calls."""
    function = {"type": "function_call", "name": "w", "arguments": "{}"}
    items: list[Json] = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Yes."},
        *(function | {"call_id": f"c{i}"} for i in range(2)),
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]
    first, second, third = laid_out(RESPONSES, items)
    assert first["content"] == "Yes." and first["reasoning_content"] == "Hm."
    assert [call["id"] for call in first["tool_calls"]] == ["c0", "c1"]
    assert [m["content"] for m in (second, third)] == [
        "Done.",
        "Really.",
    ] and "tool_calls" not in second


# ------------------------------------------------------------ the clients themselves

STRANGE = [
    f'<tool_call>{{"name": "w", "arguments": {arguments}}}</tool_call>' for arguments in ARGUMENTS
]


@pytest.mark.parametrize("said", [*STRANGE, "one\u2028two", "\x85"])
def test_openais_client_sends_back_what_it_was_given(client: openai.OpenAI, said: str) -> None:
    messages: list[Any] = [HI]
    form = {"response_format": {"type": "choice", "choice": [said]}}
    for stream in (False, True):
        asked: Json = {
            "messages": messages,
            "tools": TOOLS[CHAT],
            "model": "tiny",
            "max_tokens": 120,
        }
        if stream:
            with client.chat.completions.stream(**asked, extra_body=form) as events:
                message = events.get_final_completion().choices[0].message.model_dump()
        else:
            message = (
                client.chat.completions.create(**asked, extra_body=form)
                .choices[0]
                .message.model_dump()
            )
        messages += [message, *results(CHAT, message), HI]
    assert client.chat.completions.create(
        messages=messages, tools=TOOLS[CHAT], model="tiny", max_tokens=2
    ).choices


@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_client_reads_every_line_and_sends_it_back(server: Front, stream: bool) -> None:
    """It splits lines at Unicode's line ends and raised where a text held one."""
    there = ollama.Client(host=server.url)
    asked: Json = {
        "model": "tiny",
        "format": {"const": "one\u2028two\x85"},
        "options": {"num_predict": 60},
    }
    answers: Any = there.chat(messages=[HI], stream=stream, **asked)
    parts = list(answers) if stream else [answers]
    text = "".join(part.message.content or "" for part in parts)
    assert json.loads(text) == "one\u2028two\x85"
    said = [HI, ollama.Message(role="assistant", content=text, thinking="Hm."), HI]
    assert there.chat(
        messages=said, tools=TOOLS[OLLAMA], model="tiny", options={"num_predict": 2}
    ).message
