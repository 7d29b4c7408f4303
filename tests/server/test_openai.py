"""Completions, chats and responses as the openai package reads them, and scored prompts."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from forerun.llm import LLM
from forerun.sampling.params import SamplingParams
from tests import tiny
from tests.server.serving import Client, sse

CODE = "def add(a, b):\n    return"
CHAT = [{"role": "user", "content": "Write a function."}]
SHORT = {"model": "tiny", "max_tokens": 12, "seed": 5}
GREEDY = {"model": "tiny", "temperature": 0}
RESPONSE = {"input": "Write.", "model": "tiny", "extra_body": {"seed": 4}}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["bug", "wish"]}, "level": {"type": "integer", "maximum": 9}},
    "required": ["kind", "level"],
    "additionalProperties": False,
}
CLOSED = {"type": "object", "additionalProperties": False}
WEATHER = CLOSED | {"properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
FUNCTIONS = [{"name": "weather", "parameters": WEATHER}, {"name": "clock", "parameters": CLOSED}]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
FLAT = [{"type": "function", **function} for function in FUNCTIONS]
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


def forced(text: str, speculative: bool = True) -> dict[str, Any]:
    """Return arguments that make the model generate this text."""
    form = {"type": "choice", "choice": [text]}
    return {"extra_body": {"response_format": form, "speculative": speculative}}


# Completions


def test_models(client: openai.OpenAI, llm: LLM) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.object == "model" and model.created > 1_600_000_000
    assert model.max_model_len == llm.decoder.context  # type: ignore[attr-defined]


def test_a_completion_decodes_its_tokens(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(prompt=CODE, extra_body={"return_token_ids": True}, **SHORT)
    (choice,) = answer.choices
    ids = choice.token_ids  # type: ignore[attr-defined]
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.model == "tiny" and answer.system_fingerprint.startswith("forerun-")
    assert choice.index == 0 and choice.finish_reason == "length" and choice.logprobs is None
    assert len(ids) == 12 and choice.text == llm.tokenizer.decode(ids)
    prompt_tokens = len(llm.tokens(CODE))
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, 12)
    assert usage.total_tokens == prompt_tokens + 12


def test_prompts_have_n_choices_each_in_order(client: openai.OpenAI) -> None:
    prompts = [CODE, "import os\n", "class A:"]
    many = client.completions.create(prompt=prompts, n=2, **SHORT)
    echoed = client.completions.create(prompt=prompts, n=2, echo=True, **SHORT)
    texts = [choice.text for choice in many.choices]
    assert [choice.index for choice in many.choices] == list(range(6))
    assert many.usage.completion_tokens == 6 * 12
    for i, prompt in enumerate(prompts):
        one = client.completions.create(prompt=prompt, n=2, **SHORT)
        assert [choice.text for choice in one.choices] == texts[2 * i : 2 * i + 2]
        assert one.choices[0].text != one.choices[1].text
    repeated = [prompt for prompt in prompts for _ in range(2)]
    assert [c.text for c in echoed.choices] == [p + t for p, t in zip(repeated, texts, strict=True)]


def test_prompts_may_be_token_ids(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokens(CODE)
    text = client.completions.create(prompt=CODE, **SHORT).choices[0].text
    for prompt in (ids, [ids, ids]):
        choices = client.completions.create(prompt=prompt, **SHORT).choices
        assert {choice.text for choice in choices} == {text}
    for wrong in ([-1], [[5], [7, -(10**18)]], [1 << 40], [[10**30]]):
        for echo in (False, True):
            with pytest.raises(openai.BadRequestError, match="is not in the vocabulary of"):
                client.completions.create(prompt=wrong, echo=echo, **SHORT)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_completions(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    more = {"temperature": 0, "logprobs": 3, "extra_body": {"return_token_ids": True}}
    params = {"prompt": CODE, **more, **SHORT}
    answer = client.completions.create(stream=stream, **params)
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    entries = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for entry in entries for token in entry.tokens]
    values = [value for entry in entries for value in entry.token_logprobs]
    tops = [top for entry in entries for top in entry.top_logprobs]
    offsets = [offset for entry in entries for offset in entry.text_offset]
    ids = [id_ for choice in choices for id_ in choice.token_ids]  # type: ignore[attr-defined]
    text = "".join(choice.text for choice in choices)
    assert len(tokens) == len(values) == len(tops) == len(offsets) == len(ids) == 12
    assert "".join(tokens) == text
    assert all(text[o:].startswith(t) for o, t in zip(offsets, tokens, strict=True))
    for token, value, top in zip(tokens, values, tops, strict=True):
        assert value <= 0 and len(top) >= 3
        assert math.isclose(max(top.values()), value) and math.isclose(top[token], value)
    assert values == pytest.approx(model_logprobs(llm, ids), abs=1e-3)


def model_logprobs(llm: LLM, ids: list[int]) -> list[float]:
    """Return the log-probabilities of tokens after CODE from one forward pass."""
    import torch

    from forerun.cache.attention import Segment
    from forerun.load import make_runner, pick_device

    runner = make_runner(llm.config, tiny.repetitive(), pick_device("cpu"))
    tokens = llm.tokens(CODE) + ids
    assert runner.cache.pages.grow(0, len(tokens))
    parents = list(range(-1, len(tokens) - 1))
    logits = runner.forward([Segment(0, tokens, parents, list(range(len(tokens))))]).logits
    logprobs = torch.log_softmax(logits.double(), -1)
    first = len(tokens) - len(ids) - 1
    return [float(logprobs[first + i, token]) for i, token in enumerate(ids)]


def test_a_stop_string_ends_the_text_and_is_excluded(client: openai.OpenAI) -> None:
    text = client.completions.create(prompt=CODE, max_tokens=40, **GREEDY).choices[0].text
    stop = text[10:13]
    cut = client.completions.create(prompt=CODE, max_tokens=40, stop=["\0", stop], **GREEDY)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == text[: text.index(stop)]


@pytest.mark.parametrize("speculative", [True, False])
def test_a_streamed_completion_joins_to_the_full_one(
    client: openai.OpenAI, speculative: bool
) -> None:
    params = {"prompt": [CODE, "for i in"], "n": 2, "stop": ["zq"], "echo": True}
    params |= {"model": "tiny", "max_tokens": 30, "seed": 9}
    params["extra_body"] = {"speculative": speculative, "return_token_ids": True}
    full = client.completions.create(**params)
    texts, reasons, ids = [""] * 4, [None] * 4, [[] for _ in range(4)]
    usages = []
    options = {"include_usage": True}
    for chunk in client.completions.create(stream=True, stream_options=options, **params):
        assert chunk.object == "text_completion"
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            assert reasons[choice.index] is None  # nothing follows the end of a choice
            texts[choice.index] += choice.text
            ids[choice.index] += choice.token_ids  # type: ignore[attr-defined]
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in full.choices]
    assert reasons == [choice.finish_reason for choice in full.choices]
    assert ids == [choice.token_ids for choice in full.choices]  # type: ignore[attr-defined]
    assert not chunk.choices and len(usages) == 1  # usage comes last, in a chunk of its own
    cached = {"prompt_tokens_details"}
    assert usages[0].model_dump(exclude=cached) == full.usage.model_dump(exclude=cached)


def test_continuous_usage_counts_every_token_once(api: Client) -> None:
    options = {"continuous_usage_stats": True}
    body = {"prompt": CODE, "max_tokens": 30, "stream": True, "stream_options": options}
    body["return_token_ids"] = True
    seen = 0
    with api.http.stream("POST", "/v1/completions", json=body) as response:
        for event in sse(response):
            seen += len(event["choices"][0]["token_ids"])
            assert event["usage"]["completion_tokens"] == seen
    assert seen == 30


def test_speculation_metrics_in_vllms_format(client: openai.OpenAI) -> None:
    fixed = {"speculative": {"depth": 4}}  # automatic depth may draft nothing
    params = {"prompt": "x = 1\n" * 20, "max_tokens": 60, "extra_body": fixed, **GREEDY}
    answer = client.completions.create(**params)
    found = answer.metrics["speculative_decoding"]  # type: ignore[attr-defined]
    histogram = found["acceptance_histogram"]
    assert found["num_spec_steps"] == sum(histogram) > 0
    assert len(histogram) == found["num_spec_tokens"] + 1
    accepted = found["num_accepted_draft_tokens"]
    assert accepted == sum(i * n for i, n in enumerate(histogram)) > 0
    rate = accepted / found["num_draft_tokens"]
    assert found["draft_acceptance_rate"] == pytest.approx(rate)
    assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / found["num_spec_steps"])


# Scored prompts


@pytest.fixture(scope="module")
def reference() -> LLM:
    """The same model, which no server uses."""
    return LLM(tiny.repetitive(), context=2048, kv_tokens=8192, max_rows=8)


LONG = "for i in range(10): print(i, i * i, 'x')\n" * 20


def prompt_logprobs(reference: LLM, prompt: Any, top: int) -> list[Any]:
    params = SamplingParams(max_tokens=0, prompt_logprobs=top)
    found = reference.generate(prompt, params)[0].prompt_logprobs
    assert found is not None
    return found


@pytest.mark.parametrize("prompt", ["def add(a, b):", "wörd ☃ wörd", "a"])
@pytest.mark.parametrize("max_tokens", [0, 0.0, 6])
def test_an_echo_has_the_logprobs_of_its_prompt(
    api: Client, reference: LLM, prompt: str, max_tokens: float
) -> None:
    params = {"prompt": prompt, "logprobs": 2, "seed": 3, "ignore_eos": True}
    answer = api.complete(**params, echo=True, max_tokens=max_tokens)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    tokens, entries = reference.tokens(prompt), prompt_logprobs(reference, prompt, 2)
    count = len(tokens)
    assert reference.tokenizer is not None
    assert logprobs["tokens"][:count] == [reference.tokenizer.spell(token) for token in tokens]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for i, entry in list(enumerate(entries))[1:]:
        assert logprobs["token_logprobs"][i] == pytest.approx(entry.logprob, abs=1e-3)
        best = max(logprobs["top_logprobs"][i].values())
        assert best == pytest.approx(next(iter(entry.top.values())), abs=1e-3)
        assert len(logprobs["top_logprobs"][i]) <= 2
    assert {len(logprobs[name]) for name in logprobs} == {count + max_tokens}
    for token, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert "\N{REPLACEMENT CHARACTER}" in token or choice["text"][start:].startswith(token)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (count, max_tokens)
    assert choice["text"].startswith(prompt) and choice["finish_reason"] == "length"
    if max_tokens:
        plain = api.complete(**params, max_tokens=max_tokens)["choices"][0]
        assert choice["text"] == prompt + plain["text"]
        assert logprobs["token_logprobs"][count:] == plain["logprobs"]["token_logprobs"]
        shifted = [len(prompt) + offset for offset in plain["logprobs"]["text_offset"]]
        assert logprobs["text_offset"][count:] == shifted


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_streamed_echo_joins_to_the_full_one(api: Client, max_tokens: int) -> None:
    """A long prompt comes in several chunks, each with its own log-probabilities."""
    params = {"prompt": [LONG, "x = 1"], "n": 2, "echo": True, "logprobs": 3}
    params |= {"seed": 5, "max_tokens": max_tokens}
    full = api.complete(**params)["choices"]
    response = api.http.post("/v1/completions", json=params | {"stream": True})
    parts = [event["choices"][0] for event in sse(response)]
    for index, choice in enumerate(full):
        own = [part for part in parts if part["index"] == index]
        assert "".join(part["text"] for part in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            scored = [part["logprobs"][name] for part in own if part["logprobs"]]
            assert [value for part in scored for value in part] == values, name
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + ["length"]
        assert index > 1 or len(own) > 4


def test_lm_evaluation_harness_gets_correct_sums(api: Client, reference: LLM) -> None:
    """Like lm-evaluation-harness, send context and continuation as ids, and generate one token."""
    context = reference.tokens("def add(a, b):")
    tokens = context + reference.tokens("\n    return a + b")
    params = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    entries = prompt_logprobs(reference, tokens, 1)[len(context) :]
    for choice in api.complete(prompt=[tokens, tokens], **params)["choices"]:
        logprobs = choice["logprobs"]["token_logprobs"][len(context) : -1]
        assert len(logprobs) == len(entries)
        assert sum(logprobs) == pytest.approx(sum(e.logprob for e in entries), abs=1e-2)


def test_a_cached_prompt_is_scored_like_a_new_one(api: Client) -> None:
    """The prefix cache has no logits, so cached tokens must be processed again."""
    api.complete(prompt=LONG, max_tokens=2)
    params = {"prompt": LONG, "max_tokens": 0, "echo": True, "logprobs": 1}
    first = api.complete(**params)["choices"]
    assert api.complete(**params)["choices"] == first
    assert None not in first[0]["logprobs"]["token_logprobs"][1:]
    (bare,) = api.complete(prompt="x = 1", max_tokens=0, echo=True)["choices"]
    assert bare == {"index": 0, "text": "x = 1", "finish_reason": "length", "logprobs": None}


def test_prompt_logprobs_in_vllms_format(api: Client, reference: LLM) -> None:
    (choice,) = api.complete(prompt="def add(a, b):", max_tokens=2, prompt_logprobs=2)["choices"]
    first, *rest = choice["prompt_logprobs"]
    entries = prompt_logprobs(reference, "def add(a, b):", 2)
    assert first is None and choice["logprobs"] is None and reference.tokenizer is not None
    for found, entry in zip(rest, entries[1:], strict=True):
        own = found[str(entry.token_id)]
        assert own["logprob"] == pytest.approx(entry.logprob, abs=1e-3)
        assert own["rank"] == entry.rank
        assert own["decoded_token"] == reference.tokenizer.spell(entry.token_id)
        assert set(found) == {str(entry.token_id), *map(str, entry.top)}
    chat = {"messages": CHAT, "max_tokens": 2}
    answer = api.answer("/v1/chat/completions", chat | {"prompt_logprobs": 0})
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in api.answer("/v1/chat/completions", chat)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": "x", "max_tokens": 0}, "echo"),
        ("completions", {"prompt": "x", "echo": True, "logprobs": 21}, "logprobs"),
        ("completions", {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("completions", {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "stream"),
        ("chat/completions", {"messages": CHAT, "prompt_logprobs": 1, "stream": True}, "stream"),
        ("chat/completions", {"messages": CHAT, "max_tokens": 0}, "max_tokens"),
        ("responses", {"input": "x", "prompt_logprobs": 1}, "/v1/completions"),
    ],
)
def test_what_cannot_be_scored_is_refused(api: Client, path: str, body: Any, message: str) -> None:
    response = api.http.post(f"/v1/{path}", json=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


# Chats


def test_a_chat(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    messages = [{"role": "system", "content": "Be short."}, {"role": "developer", "content": parts}]
    params = {"messages": [*messages, *CHAT], "max_completion_tokens": 7, "n": 2, "seed": 3}
    answer = client.chat.completions.create(model="tiny", **params)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.message.role == "assistant" and choice.message.content
        assert choice.message.tool_calls is None and choice.finish_reason in ("length", "stop")
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.completion_tokens <= 14


def test_a_streamed_chat_joins_to_the_full_one(client: openai.OpenAI) -> None:
    full = client.chat.completions.create(messages=CHAT, n=2, **SHORT)
    texts, reasons, roles = [""] * 2, [None] * 2, [None] * 2
    params = {"messages": CHAT, "n": 2, "stream_options": {"include_usage": True}, **SHORT}
    chunks = list(client.chat.completions.create(stream=True, **params))
    for chunk in chunks:
        assert chunk.object == "chat.completion.chunk" and chunk.id == chunks[0].id
        for choice in chunk.choices:
            roles[choice.index] = choice.delta.role or roles[choice.index]
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert roles == ["assistant"] * 2
    assert texts == [choice.message.content for choice in full.choices]
    assert reasons == [choice.finish_reason for choice in full.choices]
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == full.usage.completion_tokens


def test_logprobs_of_chats(client: openai.OpenAI) -> None:
    params = {"messages": CHAT, "logprobs": True, "temperature": 0, **SHORT}
    answer = client.chat.completions.create(top_logprobs=4, **params)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) >= 4 and entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert bytes(entry.bytes).decode() == entry.token
    bare = client.chat.completions.create(**params).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in bare] == [[]] * len(entries)


def test_logprobs_are_accumulated_and_hold_shared_bytes(client: openai.OpenAI) -> None:
    """OpenAI's API has `bytes` for characters that are represented by several tokens."""
    text = "sm\N{ROCKET}le"
    params = {
        "messages": CHAT,
        "logprobs": True,
        "top_logprobs": 2,
        "model": "tiny",
        "max_tokens": 40,
    }
    choice = client.chat.completions.create(**params, **forced(text)).choices[0]
    assert choice.message.content == text and choice.finish_reason == "stop"
    data = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert data.decode().startswith(text)
    with client.chat.completions.stream(**params, **forced(text)) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.content == text and final.finish_reason == "stop"
    assert final.logprobs.model_dump() == choice.logprobs.model_dump()


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema_and_json_object(client: openai.OpenAI, stream: bool) -> None:
    def text(form: dict[str, Any]) -> str:
        params = {"messages": CHAT, "response_format": form, "model": "tiny", "max_tokens": 300}
        answer = client.chat.completions.create(stream=stream, seed=2, **params)
        if not stream:
            return answer.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    schema = {"name": "x", "schema": SCHEMA, "strict": True}
    value = json.loads(text({"type": "json_schema", "json_schema": schema}))
    assert set(value) == {"kind", "level"} and value["kind"] in ("bug", "wish")
    assert text({"type": "json_object"}).startswith("{") and text({"type": "text"})


def test_the_client_parses_a_model_class(client: openai.OpenAI) -> None:
    class Job(BaseModel):
        kind: Literal["bug", "wish"]
        urgent: bool

    params = {"messages": CHAT, "response_format": Job, "model": "tiny", "max_tokens": 60}
    message = client.chat.completions.parse(**params).choices[0].message
    assert isinstance(message.parsed, Job)


CALLS = [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"}), ("clock", {})]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_required_tool_calls(client: openai.OpenAI, choice: Any) -> None:
    params = {"messages": CHAT, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    params |= {"model": "tiny", "max_tokens": 80, "seed": 1}
    answer = client.chat.completions.create(**params).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert call.type == "function" and call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) in CALLS
    assert choice == "required" or call.function.name == "weather"
    with client.chat.completions.stream(**params) as stream:
        final = stream.get_final_completion().choices[0]
    (streamed,) = final.message.tool_calls
    assert streamed.function.name == call.function.name
    assert streamed.function.arguments == call.function.arguments
    assert final.finish_reason == "tool_calls" and not final.message.content


OSLO = CALLS[:1]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("speculative", [True, False], ids=["many tokens an event", "one"])
@pytest.mark.parametrize(
    ("generated", "content", "calls"),
    [
        ("a < b and <tool", "a < b and <tool", []),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        (CALL.replace("arguments", "parameters"), "", OSLO),
        (f"<tool_call>{CALL}</tool_call>", "", OSLO),
        (f"  see. <tool_call>{CALL}</tool_call> done", "see.  done", OSLO),
        (f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "clock"}}', "", [*OSLO, CALLS[2]]),
    ],
)
def test_tool_calls_that_the_model_chooses(
    client: openai.OpenAI, generated: str, content: str, calls: list[Any], speculative: bool
) -> None:
    params = {"messages": CHAT, "tools": TOOLS, "model": "tiny", "max_tokens": 120}
    params |= forced(generated, speculative)
    full = client.chat.completions.create(tool_choice="auto", **params).choices[0]
    functions = [call.function for call in full.message.tool_calls or []]
    assert [(function.name, json.loads(function.arguments)) for function in functions] == calls
    assert (full.message.content or "").strip() == content
    assert full.finish_reason == ("tool_calls" if calls else "stop")
    text, streamed, reason = "", {}, None
    for chunk in client.chat.completions.create(stream=True, **params):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            assert call.id and call.index == len(streamed)
            streamed[call.index] = (call.function.name, json.loads(call.function.arguments))
    assert text == (full.message.content or "") and reason == full.finish_reason
    assert [streamed[i] for i in sorted(streamed)] == calls
    ignored = client.chat.completions.create(tool_choice="none", **params).choices[0]
    assert ignored.message.content == generated and ignored.finish_reason == "stop"


@pytest.mark.parametrize(("parallel", "count"), [(False, 1), (True, 2), (None, 2)])
def test_parallel_tool_calls_may_be_forbidden(
    api: Client, parallel: bool | None, count: int
) -> None:
    """The model generates two calls; the second is dropped where the request asks for one."""
    text = f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"
    more = {"guided_choice": [text], "parallel_tool_calls": parallel, "n_predict": 200}
    chat = {"messages": CHAT, "tools": TOOLS, **more}
    answer = api.answer("/v1/chat/completions", chat)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == count
    response = api.http.post("/v1/chat/completions", json=chat | {"stream": True})
    deltas = [event["choices"][0]["delta"] for event in sse(response)]
    assert sum(len(delta.get("tool_calls", ())) for delta in deltas) == count
    answer = api.answer("/v1/responses", {"input": "hi", "tools": FLAT, **more})
    assert [item["type"] for item in answer["output"]] == ["function_call"] * count
    assert answer["parallel_tool_calls"] is (parallel is not False)


LINE_ENDS = "one\u2028two\u2029three\x85four"
STREAMS = {
    "/v1/completions": {"prompt": "x", "max_tokens": 80, "guided_choice": [LINE_ENDS]},
    "/v1/chat/completions": {"messages": CHAT, "guided_choice": [LINE_ENDS]},
    "/v1/responses": {"input": "x", "guided_choice": [LINE_ENDS]},
    "/api/chat": {"messages": CHAT, "format": {"const": LINE_ENDS}},
    "/api/generate": {"prompt": "x", "format": {"const": LINE_ENDS}},
}


@pytest.mark.parametrize("path", STREAMS)
def test_unicode_line_ends_are_escaped_in_streams(api: Client, path: str) -> None:
    """Clients split streams at any of Unicode's line ends, Ollama's own among them."""
    body = {"model": "tiny", "stream": True} | STREAMS[path]
    raw = api.http.post(path, json=body).content.decode()
    assert raw.splitlines() == raw.removesuffix("\n").split("\n")
    assert all(escape in raw for escape in ("\\u2028", "\\u2029", "\\u0085"))


def test_a_prediction_is_counted_and_changes_nothing(client: openai.OpenAI) -> None:
    params = {"messages": CHAT, "max_tokens": 60, "extra_body": {"speculative": {"depth": 8}}}
    params |= GREEDY
    plain = client.chat.completions.create(**params)
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens is None

    def predicted(content: Any, **more: Any) -> Any:
        prediction = {"type": "content", "content": content}
        answer = client.chat.completions.create(prediction=prediction, **params | more)
        assert answer.choices[0].message.content == text
        assert answer.usage.completion_tokens == plain.usage.completion_tokens
        return answer.usage.completion_tokens_details

    for content in (text, [{"type": "text", "text": text}]):
        assert predicted(content).accepted_prediction_tokens > 30
    wrong = predicted("nothing of this kind")
    assert wrong.accepted_prediction_tokens == 0 and wrong.rejected_prediction_tokens > 0
    off = predicted(text, extra_body={"speculative": False})
    assert off.accepted_prediction_tokens == 0


def test_errors_are_exceptions_of_the_openai_package(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(messages=CHAT, model="gpt-9")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(prompt="x", model="tiny", temperature=-1)
    assert "temperature" in bad.value.body["message"] and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(prompt="x = 1\n" * 3000, model="tiny")
    assert long.value.code == "context_length_exceeded"


# Responses


def test_a_response(client: openai.OpenAI) -> None:
    more = {"instructions": "Be short.", "metadata": {"a": "b"}}
    answer = client.responses.create(max_output_tokens=9, **RESPONSE, **more)
    (item,) = answer.output
    assert answer.object == "response" and answer.id.startswith("resp_")
    assert answer.metadata == {"a": "b"} and answer.instructions == "Be short."
    assert answer.max_output_tokens == 9 and answer.error is None
    assert item.type == "message" and item.role == "assistant"
    assert item.content[0].type == "output_text" and item.content[0].text == answer.output_text
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 9 and answer.usage.input_tokens_details.cached_tokens >= 0
    assert answer.usage.total_tokens == answer.usage.input_tokens + 9
    without = client.responses.create(max_output_tokens=9, **RESPONSE)
    assert without.usage.input_tokens < answer.usage.input_tokens


def test_a_response_has_the_text_of_the_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(messages=CHAT, **SHORT).choices[0].message.content
    parts = [{"type": "input_text", "text": CHAT[0]["content"]}]
    for given in (CHAT[0]["content"], [{"role": "user", "content": parts}]):
        params = {"input": given, "max_output_tokens": 12, "extra_body": {"seed": 5}}
        assert client.responses.create(model="tiny", **params).output_text == chat


def test_events_of_a_response(client: openai.OpenAI) -> None:
    full = client.responses.create(max_output_tokens=25, **RESPONSE)
    events = list(client.responses.create(stream=True, max_output_tokens=25, **RESPONSE))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    delta = "response.output_text.delta"
    assert [event.type for event in events if event.type != delta] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type == delta)
    done = next(event for event in events if event.type == "response.output_text.done")
    first, last = events[0].response, events[-1].response
    assert text == done.text == full.output_text == last.output_text
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}
    assert last.usage.output_tokens == 25
    assert first.status == "in_progress" and first.id == last.id


def test_the_client_accumulates_a_response(client: openai.OpenAI) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    full = client.responses.create(max_output_tokens=80, text=form, **RESPONSE)
    with client.responses.stream(max_output_tokens=80, text=form, **RESPONSE) as stream:
        final = stream.get_final_response()
    assert final.status == "completed" and final.output_text == full.output_text
    assert json.loads(final.output_text)["kind"] in ("bug", "wish")
    assert final.text.format.name == "x" and final.text.format.schema_ == SCHEMA


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_tool_calls_of_a_response(client: openai.OpenAI, choice: Any) -> None:
    params = {"max_output_tokens": 80, "tools": FLAT, "tool_choice": choice, **RESPONSE}
    answer = client.responses.create(**params)
    (call,) = answer.output
    assert call.type == "function_call" and call.call_id and call.status == "completed"
    assert answer.status == "completed" and (call.name, json.loads(call.arguments)) in CALLS
    assert [tool.name for tool in answer.tools] == ["weather", "clock"]
    repeated = answer.tool_choice
    assert (repeated if isinstance(choice, str) else repeated.model_dump()) == choice
    events = list(client.responses.create(stream=True, **params))
    assert [event.type for event in events][2:] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    added = events[2].item
    assert added.type == "function_call" and added.arguments == "" and added.status == "in_progress"
    assert events[3].delta == events[4].arguments == call.arguments
