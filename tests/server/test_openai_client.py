"""What the openai package makes of our answers: every call it has for this server, with values that
mean something."""

import json
import math

import openai
import pytest

from forerun.llm import LLM
from tests import tiny
from tests.server.conftest import client_of
from tests.server.serving import Front, Serving, sse

CODE = "def add(a, b):\n    return"
CHAT = [{"role": "user", "content": "Write a function."}]
SHORT = {"model": "tiny", "max_tokens": 12, "seed": 5}
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["bug", "wish"]},
        "level": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["kind", "level"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Says the weather.", "parameters": WEATHER},
    },
    {
        "type": "function",
        "function": {
            "name": "clock",
            "parameters": {"type": "object", "additionalProperties": False},
        },
    },
]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.fixture(scope="session")
def server(front: Front) -> Front:
    return front


def saying(text: str, speculative: bool = True) -> dict:
    """What makes the model say exactly this."""
    return {
        "extra_body": {
            "response_format": {"type": "choice", "choice": [text]},
            "speculative": speculative,
        }
    }


# ------------------------------------------------------------ completions


def test_models(client: openai.OpenAI, llm: LLM) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.object == "model" and model.created > 1_600_000_000
    assert model.max_model_len == llm.decoder.context  # type: ignore[attr-defined]


def test_a_completion_is_what_the_library_says(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(
        prompt=CODE, temperature=0, extra_body={"return_token_ids": True}, **SHORT
    )
    (choice,) = answer.choices
    ids = choice.token_ids  # type: ignore[attr-defined]
    assert (
        answer.object == "text_completion"
        and answer.id.startswith("cmpl-")
        and answer.model == "tiny"
    )
    assert choice.index == 0 and choice.finish_reason == "length" and choice.logprobs is None
    assert len(ids) == 12 and choice.text == llm.tokenizer.decode(ids)
    assert (
        answer.usage.prompt_tokens == len(llm.tokens(CODE)) and answer.usage.completion_tokens == 12
    )
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.system_fingerprint.startswith("forerun-")


def test_many_prompts_each_with_n_choices_in_order(client: openai.OpenAI) -> None:
    prompts = [CODE, "import os\n", "class A:"]
    many = client.completions.create(prompt=prompts, n=2, **SHORT)
    assert [c.index for c in many.choices] == list(range(6))
    for i, prompt in enumerate(prompts):
        one = client.completions.create(prompt=prompt, n=2, **SHORT)
        assert [c.text for c in one.choices] == [c.text for c in many.choices[2 * i : 2 * i + 2]]
        assert one.choices[0].text != one.choices[1].text
    assert many.usage.completion_tokens == 6 * 12


def test_prompts_as_token_ids_say_the_same_as_text(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokens(CODE)
    text = client.completions.create(prompt=CODE, **SHORT).choices[0].text
    assert client.completions.create(prompt=ids, **SHORT).choices[0].text == text
    assert [c.text for c in client.completions.create(prompt=[ids, ids], **SHORT).choices] == [
        text,
        text,
    ]


def test_echo_puts_the_prompt_before_each_choice(client: openai.OpenAI) -> None:
    plain = client.completions.create(prompt=[CODE, "x ="], n=2, **SHORT)
    echoed = client.completions.create(prompt=[CODE, "x ="], n=2, echo=True, **SHORT)
    prompts = [CODE, CODE, "x =", "x ="]
    assert [c.text for c in echoed.choices] == [
        p + c.text for p, c in zip(prompts, plain.choices, strict=True)
    ]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", [[-1], [[5], [7, -(10**18)]], [1 << 40], [[10**30]]])
def test_what_is_no_token_s_id_is_bad_input(
    client: openai.OpenAI, prompt: list[object], echo: bool
) -> None:
    """Said before anything is done with it, echoed for instance."""
    with pytest.raises(openai.BadRequestError, match=r"is not in the vocabulary of"):
        client.completions.create(prompt=prompt, echo=echo, **SHORT)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_completions(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    asked = {
        "prompt": CODE,
        "temperature": 0,
        "logprobs": 3,
        "extra_body": {"return_token_ids": True},
        **SHORT,
    }
    chunks = (
        list(client.completions.create(stream=True, **asked))
        if stream
        else [client.completions.create(**asked)]
    )
    choices = [c.choices[0] for c in chunks]
    text = "".join(c.text for c in choices)
    lp = [c.logprobs for c in choices if c.logprobs]
    tokens = [t for part in lp for t in part.tokens]
    values = [v for part in lp for v in part.token_logprobs]
    tops = [t for part in lp for t in part.top_logprobs]
    offsets = [o for part in lp for o in part.text_offset]
    ids = [i for c in choices for i in c.token_ids]  # type: ignore[attr-defined]
    assert len(tokens) == len(values) == len(tops) == len(offsets) == len(ids) == 12
    assert "".join(tokens) == text and all(
        text[o:].startswith(t) for o, t in zip(offsets, tokens, strict=True)
    )
    for token, value, top in zip(tokens, values, tops, strict=True):
        assert value <= 0 and len(top) >= 3
        assert math.isclose(max(top.values()), value) and math.isclose(
            top[token], value
        )  # greedy: the likeliest
    with_library = llm_logprobs(llm, ids)
    assert all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(values, with_library, strict=True))


def llm_logprobs(llm: LLM, ids: list[int]) -> list[float]:
    """The same tokens' log-probabilities from the model alone, by one pass for each."""
    import torch

    from forerun.cache.attention import Segment
    from forerun.load import make_runner, pick_device

    runner = make_runner(llm.config, tiny.spoken(), pick_device("cpu"))
    tokens = llm.tokens(CODE) + ids
    slot = 0
    assert runner.cache.pages.grow(slot, len(tokens))
    rows = list(range(len(tokens)))
    logits = runner.forward([Segment(slot, tokens, list(range(-1, len(tokens) - 1)), rows)]).logits
    logs = torch.log_softmax(logits.double(), -1)
    first = len(tokens) - len(ids)
    return [float(logs[first - 1 + i, token]) for i, token in enumerate(ids)]


def test_stop_ends_the_text_and_is_ignored(client: openai.OpenAI) -> None:
    whole = (
        client.completions.create(prompt=CODE, temperature=0, model="tiny", max_tokens=40)
        .choices[0]
        .text
    )
    stop = whole[10:13]
    cut = client.completions.create(
        prompt=CODE, temperature=0, model="tiny", max_tokens=40, stop=["\0", stop]
    )
    assert (
        cut.choices[0].finish_reason == "stop" and cut.choices[0].text == whole[: whole.index(stop)]
    )


@pytest.mark.parametrize("speculative", [True, False])
def test_streamed_completions_joined_are_the_whole_ones(
    client: openai.OpenAI, speculative: bool
) -> None:
    asked = {
        "prompt": [CODE, "for i in"],
        "n": 2,
        "stop": ["zq"],
        "model": "tiny",
        "max_tokens": 30,
        "seed": 9,
    }
    extra = {"speculative": speculative, "return_token_ids": True}
    whole = client.completions.create(extra_body=extra, echo=True, **asked)
    texts, reasons, ids = [""] * 4, [None] * 4, [[], [], [], []]
    usages = []
    for chunk in client.completions.create(
        stream=True, stream_options={"include_usage": True}, extra_body=extra, echo=True, **asked
    ):
        assert chunk.object == "text_completion"
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            assert reasons[choice.index] is None  # nothing comes behind a choice's end
            texts[choice.index] += choice.text
            ids[choice.index] += choice.token_ids  # type: ignore[attr-defined]
            reasons[choice.index] = choice.finish_reason
    assert texts == [c.text for c in whole.choices] and reasons == [
        c.finish_reason for c in whole.choices
    ]
    assert ids == [c.token_ids for c in whole.choices]  # type: ignore[attr-defined]
    (usage,) = usages
    assert not chunk.choices  # usage comes last, in a chunk of its own
    assert usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )


def test_continuous_usage_counts_every_token_once(server: Front) -> None:
    body = {
        "prompt": CODE,
        "max_tokens": 30,
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    with server.http.stream(
        "POST", "/v1/completions", json=body | {"return_token_ids": True}
    ) as response:
        seen = 0
        for event in sse(response):
            seen += len(event["choices"][0]["token_ids"])
            assert event["usage"]["completion_tokens"] == seen
    assert seen == 30


def test_metrics_in_the_shape_that_benchmarks_read(client: openai.OpenAI) -> None:
    fixed = {"speculative": {"depth": 4}}  # automatic depth may draft nothing
    prompt = "x = 1\n" * 20
    answer = client.completions.create(
        prompt=prompt, temperature=0, model="tiny", max_tokens=60, extra_body=fixed
    )
    found = answer.metrics["speculative_decoding"]  # type: ignore[attr-defined]
    assert found["num_spec_steps"] == sum(found["acceptance_histogram"]) > 0
    assert len(found["acceptance_histogram"]) == found["num_spec_tokens"] + 1
    assert (
        found["num_accepted_draft_tokens"]
        == sum(i * n for i, n in enumerate(found["acceptance_histogram"]))
        > 0
    )
    rate = found["num_accepted_draft_tokens"] / found["num_draft_tokens"]
    assert math.isclose(found["draft_acceptance_rate"], rate)
    mean = 1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]
    assert math.isclose(found["mean_acceptance_length"], mean)


# ------------------------------------------------------------ chat


def test_a_chat(client: openai.OpenAI) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}],
        },
        *CHAT,
    ]
    answer = client.chat.completions.create(
        messages=messages, model="tiny", max_completion_tokens=7, n=2, seed=3
    )
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert [c.index for c in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert (
            choice.message.role == "assistant"
            and choice.message.content
            and choice.message.tool_calls is None
        )
        assert choice.finish_reason in ("length", "stop")
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.completion_tokens <= 14


def test_a_streamed_chat_joined_is_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=CHAT, n=2, **SHORT)
    texts, reasons, roles = [""] * 2, [None] * 2, [None] * 2
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            messages=CHAT, n=2, stream=True, stream_options=options, **SHORT
        )
    )
    for chunk in chunks:
        assert chunk.object == "chat.completion.chunk" and chunk.id == chunks[0].id
        for choice in chunk.choices:
            roles[choice.index] = choice.delta.role or roles[choice.index]
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert roles == ["assistant"] * 2
    assert texts == [c.message.content for c in whole.choices] and reasons == [
        c.finish_reason for c in whole.choices
    ]
    assert (
        not chunks[-1].choices
        and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    )


def test_the_sdk_accumulates_a_stream(client: openai.OpenAI) -> None:
    asked = {
        "messages": CHAT,
        "logprobs": True,
        "top_logprobs": 2,
        "model": "tiny",
        "max_tokens": 40,
        "seed": 1,
    }
    whole = client.chat.completions.create(**asked, **saying("x = 1"))
    with client.chat.completions.stream(**asked, **saying("x = 1")) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content == "x = 1"
    assert final.choices[0].logprobs.model_dump() == whole.choices[0].logprobs.model_dump()
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_logprobs_of_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=CHAT, logprobs=True, top_logprobs=4, temperature=0, **SHORT
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(e.token for e in entries) == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) >= 4 and entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert bytes(entry.bytes).decode() == entry.token
    bare = client.chat.completions.create(messages=CHAT, logprobs=True, temperature=0, **SHORT)
    assert [e.top_logprobs for e in bare.choices[0].logprobs.content] == [[]] * len(entries)


def test_bytes_of_logprobs_make_up_characters_that_tokens_share(client: openai.OpenAI) -> None:
    """OpenAI: `bytes` is there for characters that are represented by several tokens."""
    answer = client.chat.completions.create(
        messages=CHAT, logprobs=True, model="tiny", max_tokens=40, **saying("sm\N{ROCKET}le")
    )
    choice = answer.choices[0]
    assert choice.message.content == "sm\N{ROCKET}le"
    data = b"".join(bytes(e.bytes) for e in choice.logprobs.content)
    assert data.decode().startswith("sm\N{ROCKET}le")


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema_and_json_object(client: openai.OpenAI, stream: bool) -> None:
    def text(form: dict) -> str:
        asked = {
            "messages": CHAT,
            "response_format": form,
            "model": "tiny",
            "max_tokens": 300,
            "seed": 2,
        }
        if not stream:
            return client.chat.completions.create(**asked).choices[0].message.content
        chunks = client.chat.completions.create(stream=True, **asked)
        return "".join(c.choices[0].delta.content or "" for c in chunks)

    value = json.loads(
        text(
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
        )
    )
    assert (
        set(value) == {"kind", "level"}
        and value["kind"] in ("bug", "wish")
        and 1 <= value["level"] <= 9
    )
    assert text({"type": "json_object"}).startswith("{")
    assert text({"type": "text"})


def test_the_sdk_parses_a_model_class(client: openai.OpenAI) -> None:
    from typing import Literal

    from pydantic import BaseModel

    class Ticket(BaseModel):
        kind: Literal["bug", "wish"]
        urgent: bool

    answer = client.chat.completions.parse(
        messages=CHAT, response_format=Ticket, model="tiny", max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, Ticket)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_tool_calls_that_are_demanded(client: openai.OpenAI, choice: object) -> None:
    asked = {
        "messages": CHAT,
        "tools": TOOLS,
        "tool_choice": choice,
        "model": "tiny",
        "max_tokens": 80,
        "seed": 1,
    }
    answer = client.chat.completions.create(**asked).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert call.type == "function" and call.id.startswith("call_")
    check_call(call.function.name, call.function.arguments)
    if isinstance(choice, dict):
        assert call.function.name == "weather"
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    (streamed,) = final.message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )
    assert final.finish_reason == "tool_calls" and not final.message.content


def check_call(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    assert (name, value) in [
        ("weather", {"city": "Oslo"}),
        ("weather", {"city": "Rome"}),
        ("clock", {}),
    ]


@pytest.mark.parametrize("speculative", [True, False], ids=["many tokens an event", "one"])
@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        ("hello you", "hello you", []),
        ("a < b and <tool", "a < b and <tool", []),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        (CALL, None, [("weather", {"city": "Oslo"})]),
        (CALL.replace("arguments", "parameters"), None, [("weather", {"city": "Oslo"})]),
        (f"<tool_call>{CALL}</tool_call>", None, [("weather", {"city": "Oslo"})]),
        (
            f"Let me see. <tool_call>{CALL}</tool_call>",
            "Let me see.",
            [("weather", {"city": "Oslo"})],
        ),
        (
            f"  see. <tool_call>{CALL}</tool_call> done",
            "see.  done",
            [("weather", {"city": "Oslo"})],
        ),
        (
            f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "clock", "arguments": {{}}}}</tool_call>',
            None,
            [("weather", {"city": "Oslo"}), ("clock", {})],
        ),
    ],
)
def test_tool_calls_that_the_model_chooses(
    client: openai.OpenAI, said: str, content: str | None, calls: list, speculative: bool
) -> None:
    asked = {
        "messages": CHAT,
        "tools": TOOLS,
        "tool_choice": "auto",
        "model": "tiny",
        "max_tokens": 120,
    }
    whole = client.chat.completions.create(**asked, **saying(said, speculative)).choices[0]
    found = [
        (c.function.name, json.loads(c.function.arguments)) for c in whole.message.tool_calls or []
    ]
    assert found == calls and (whole.message.content or "").strip() == (content or "")
    assert whole.finish_reason == ("tool_calls" if calls else "stop")
    text, streamed, reason = "", {}, None
    for chunk in client.chat.completions.create(stream=True, **asked, **saying(said, speculative)):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            assert call.id and call.index == len(streamed)
            streamed[call.index] = (call.function.name, json.loads(call.function.arguments))
    assert text == (whole.message.content or "")  # joined, a stream says what the whole answer says
    assert [streamed[i] for i in sorted(streamed)] == calls and reason == whole.finish_reason


ENDS = "one\u2028two\u2029three\x85four"


LINES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 80, "guided_choice": [ENDS]},
    "/v1/chat/completions": {"messages": CHAT, "guided_choice": [ENDS]},
    "/v1/responses": {"input": "x", "guided_choice": [ENDS]},
    "/api/chat": {"messages": CHAT, "format": {"const": ENDS}},
    "/api/generate": {"prompt": "x", "format": {"const": ENDS}},
}


@pytest.mark.parametrize("path", LINES)
def test_no_character_of_a_text_ends_a_line_of_a_stream(server: Front, path: str) -> None:
    """Clients split streams at any of Unicode's line ends, Ollama's own among them."""
    raw = server.http.post(
        path, json={"model": "tiny", "stream": True} | LINES[path]
    ).content.decode()
    assert raw.splitlines() == raw.removesuffix("\n").split("\n")
    assert all(escape in raw for escape in ("\\u2028", "\\u2029", "\\u0085"))


def test_no_call_is_looked_for_where_none_is_wanted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=CHAT, tools=TOOLS, tool_choice="none", model="tiny", max_tokens=60, **saying(CALL)
    )
    assert answer.choices[0].message.content == CALL and answer.choices[0].finish_reason == "stop"


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    answer = client.chat.completions.create(messages=messages, tools=TOOLS, **SHORT)
    less = client.chat.completions.create(messages=CHAT, tools=TOOLS, **SHORT)
    assert answer.usage.prompt_tokens > less.usage.prompt_tokens + 10  # the model reads both


def test_a_prediction_is_counted_and_changes_nothing(client: openai.OpenAI) -> None:
    asked = {
        "messages": CHAT,
        "temperature": 0,
        "model": "tiny",
        "max_tokens": 60,
        "extra_body": {"speculative": {"depth": 8}},
    }
    plain = client.chat.completions.create(**asked)
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens is None
    for content in (text, [{"type": "text", "text": text}]):
        right = client.chat.completions.create(
            prediction={"type": "content", "content": content}, **asked
        )
        details = right.usage.completion_tokens_details
        assert right.choices[0].message.content == text
        assert details.accepted_prediction_tokens > 30 and details.rejected_prediction_tokens >= 0
    wrong = client.chat.completions.create(
        prediction={"type": "content", "content": "nothing of this kind"}, **asked
    )
    assert wrong.choices[0].message.content == text
    assert wrong.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert wrong.usage.completion_tokens_details.rejected_prediction_tokens > 0
    assert wrong.usage.completion_tokens == plain.usage.completion_tokens


def test_a_prediction_without_speculation_is_no_failure(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=CHAT,
        prediction={"type": "content", "content": "x = 1"},
        extra_body={"speculative": False},
        **SHORT,
    )
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(messages=CHAT, model="gpt-9")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(prompt="x", model="tiny", temperature=-1)
    assert "temperature" in bad.value.body["message"] and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(prompt="x = 1\n" * 3000, model="tiny")
    assert long.value.code == "context_length_exceeded"


# ------------------------------------------------------------ responses


def test_a_response(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        input="Write.",
        instructions="Be short.",
        model="tiny",
        max_output_tokens=9,
        metadata={"a": "b"},
    )
    assert (
        answer.object == "response"
        and answer.id.startswith("resp_")
        and answer.metadata == {"a": "b"}
    )
    assert (
        answer.instructions == "Be short."
        and answer.max_output_tokens == 9
        and answer.error is None
    )
    (item,) = answer.output
    assert (
        item.type == "message"
        and item.role == "assistant"
        and item.content[0].type == "output_text"
    )
    assert answer.output_text == item.content[0].text
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 9 and answer.usage.input_tokens_details.cached_tokens >= 0
    assert answer.usage.total_tokens == answer.usage.input_tokens + 9
    without = client.responses.create(input="Write.", model="tiny", max_output_tokens=9)
    assert without.usage.input_tokens < answer.usage.input_tokens


def test_a_response_says_what_the_chat_says(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(messages=CHAT, **SHORT).choices[0].message.content
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Write a function."}]}]
    for given in ("Write a function.", items):
        answer = client.responses.create(
            input=given, model="tiny", max_output_tokens=12, extra_body={"seed": 5}
        )
        assert answer.output_text == chat


def test_events_of_a_response(client: openai.OpenAI) -> None:
    asked = {"input": "Write.", "model": "tiny", "max_output_tokens": 25, "extra_body": {"seed": 4}}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(stream=True, **asked))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    middle = [k for k in kinds if k != "response.output_text.delta"]
    assert middle == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    done = next(e for e in events if e.type == "response.output_text.done")
    assert text == done.text == whole.output_text == events[-1].response.output_text
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {
        events[-1].response.output[0].id
    }
    assert events[-1].response.usage.output_tokens == 25
    assert (
        events[0].response.status == "in_progress"
        and events[0].response.id == events[-1].response.id
    )


def test_the_sdk_accumulates_a_response(client: openai.OpenAI) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    asked = {"input": "Write.", "model": "tiny", "max_output_tokens": 80, "text": form}
    whole = client.responses.create(**asked, extra_body={"seed": 4})
    with client.responses.stream(**asked, extra_body={"seed": 4}) as stream:
        final = stream.get_final_response()
    assert final.status == "completed" and final.output_text == whole.output_text
    assert json.loads(final.output_text)["kind"] in ("bug", "wish")
    assert final.text.format.name == "x" and final.text.format.schema_ == SCHEMA


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_tools_of_a_response(client: openai.OpenAI, choice: object) -> None:
    asked = {
        "input": "Write.",
        "model": "tiny",
        "max_output_tokens": 80,
        "tools": FLAT,
        "tool_choice": choice,
    }
    answer = client.responses.create(**asked, extra_body={"seed": 1})
    (call,) = answer.output
    assert (
        call.type == "function_call"
        and call.call_id
        and call.status == "completed"
        and answer.status == "completed"
    )
    check_call(call.name, call.arguments)
    assert [t.name for t in answer.tools] == ["weather", "clock"]
    said = answer.tool_choice if isinstance(choice, str) else answer.tool_choice.model_dump()
    assert said == choice  # the response repeats what was asked
    events = list(client.responses.create(**asked, stream=True, extra_body={"seed": 1}))
    assert [e.type for e in events][2:] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    added = events[2].item
    assert added.type == "function_call" and added.arguments == "" and added.status == "in_progress"
    assert events[3].delta == events[4].arguments == call.arguments


def test_what_tools_said_is_read(client: openai.OpenAI) -> None:
    items = [
        {"role": "user", "content": "How is the weather?"},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{"city": "Oslo"}',
        },
        {"type": "function_call_output", "call_id": "c1", "output": "rain and more rain"},
    ]
    lengths = [
        client.responses.create(
            input=items[:n], model="tiny", max_output_tokens=4, tools=FLAT
        ).usage.input_tokens
        for n in (1, 2, 3)
    ]
    assert lengths[0] < lengths[1] < lengths[2]


def test_the_output_of_a_response_goes_back_in(client: openai.OpenAI) -> None:
    """What agents do: everything a response put out is part of the next input."""
    first = client.responses.create(
        input="Write.", model="tiny", max_output_tokens=80, tools=FLAT, tool_choice="required"
    )
    text = client.responses.create(input="Write.", model="tiny", max_output_tokens=5)
    items = [item.model_dump(exclude_none=True) for item in (*text.output, *first.output)]
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "rain"}
    answer = client.responses.create(input=[*items, output], model="tiny", max_output_tokens=4)
    assert answer.output_text is not None and answer.usage.input_tokens > 20


def test_a_stream_that_fails_ends_with_an_error_event(serve: Serving, monkeypatch) -> None:
    """An engine that fails on the way: the SDK must see an error, not an end."""
    client = client_of(serve)
    engine = serve.service.llm.engine
    step, calls = engine.step, []

    def fails_later() -> list:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("on purpose")
        return step()

    before = len(serve.logged)
    monkeypatch.setattr(engine, "step", fails_later)
    asked = {
        "input": "Write.",
        "model": "tiny",
        "max_output_tokens": 60,
        "extra_body": {"speculative": False},
    }
    events = list(client.responses.create(stream=True, **asked))
    assert events[-1].type == "error" and "failed" in events[-1].message
    calls.clear()
    with pytest.raises(openai.APIError, match="failed"):
        list(
            client.chat.completions.create(messages=CHAT, stream=True, model="tiny", max_tokens=60)
        )
    monkeypatch.undo()
    del serve.logged[before:]  # the engine's failure is logged, as it should be
    assert serve.complete()["choices"][0]["text"]
