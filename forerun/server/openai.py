"""OpenAI's completions and chats: requests become engine jobs, outputs become JSON."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request, Response

from forerun.draft.registry import with_references
from forerun.errors import shorten
from forerun.llm import LLM, separate
from forerun.models.tokenizer import Tokenizer
from forerun.sampling.grammar import Grammar
from forerun.sampling.params import DEFAULT_MAX_TOKENS, SamplingParams
from forerun.server import conversation, errors
from forerun.server.auth import CLIENT, tenant_of
from forerun.server.conversation import chat_prompt, fields_without_effect, text_of
from forerun.server.errors import ApiError
from forerun.server.jobs import Job
from forerun.server.large_responses import LOGPROB_BYTES, LONG_LOGPROB_BYTES, prompt_logprobs_size
from forerun.server.outputs import (
    Json,
    Output,
    chat_logprobs,
    completion_logprobs,
    finish_reason,
    metrics,
    prompt_logprobs,
    trace,
    usage,
)
from forerun.server.protocol import (
    FILL_CONTEXT,
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    ResponseFormat,
    Speculative,
    StreamOptions,
    integer_of_text,
)
from forerun.server.state import ServerState
from forerun.server.streaming import Formatter, respond, sse
from forerun.types import Event

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's documented default of /v1/completions
ECHO_CHUNK = 16  # prompt tokens in one chunk of a stream that echoes their log-probabilities
GRAMMARS = {"json_schema": "json_schema", "regex": "regex", "grammar": "lark", "choice": "choice"}
SAMPLING_FIELDS = [
    *("temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
]


async def completions(state: ServerState, body: CompletionRequest, http: Request) -> Response:
    """Answer /v1/completions."""
    state.check(body.model)
    prompts = _check_completion(body)
    count = len(prompts) * max(1, body.n or 1)
    formatter, jobs = await state.prepare(_prepare_completion, state, body, prompts, count=count)
    return await respond(state, formatter, jobs, http)


async def chat(state: ServerState, body: ChatRequest, http: Request) -> Response:
    """Answer /v1/chat/completions."""
    state.check(body.model)
    formatter, jobs = await state.prepare(prepare_chat, state, body, count=max(1, body.n or 1))
    return await respond(state, formatter, jobs, http)


# Requests


def _check_completion(request: CompletionRequest) -> Sequence[str | list[int]]:
    """Return the prompts of a completion. Raises ApiError for fields that are not supported."""
    if request.suffix:
        raise ApiError(400, "suffix is not supported: this server cannot fill gaps", "suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(400, "best_of is not supported beyond n", "best_of")
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        advice = "give 1 or more, or echo (with logprobs) to score the prompt"
        raise ApiError(400, f"max_tokens=0 generates nothing: {advice}", "max_tokens")
    _check_prompt_logprobs(request)
    prompt: Any = request.prompt
    is_single = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    prompts: Sequence[str | list[int]] = [prompt] if is_single else prompt
    if not prompts:
        raise ApiError(400, "there is no prompt: give a text or token ids", "prompt")
    return prompts


def _check_prompt_logprobs(request: OpenAIRequest) -> None:
    if request.prompt_logprobs is not None and request.stream:
        advice = "leave stream out, or give /v1/completions echo and logprobs"
        raise ApiError(400, f"prompt_logprobs is not streamed: {advice}", "prompt_logprobs")


def _prepare_completion(
    state: ServerState, body: CompletionRequest, prompts: Sequence[str | list[int]]
) -> tuple[Completions, list[Job]]:
    llm = state.service.llm
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    # With max_tokens=0 nothing is generated, and the prompt is scored.
    scored = [0] if body.max_tokens == 0 else []
    if body.prompt_logprobs is not None:
        scored.append(body.prompt_logprobs)
    if body.echo and body.logprobs is not None:
        scored.append(body.logprobs)
    params = sampling_params(
        llm, body, limit, body.logprobs, grammar_of(body.response_format), max(scored, default=None)
    )
    token_ids = [state.tokens(prompt) for prompt in prompts]
    jobs = make_jobs(llm, token_ids, params, body, fill=limit == FILL_CONTEXT)
    return Completions(state, body, params.n, params.seed, token_ids), jobs


def prepare_chat(
    state: ServerState, body: ChatRequest, prompt: list[int] | None = None
) -> tuple[Chat, list[Job]]:
    """Return the formatter and the jobs of a chat; `prompt` replaces its messages.

    Raises ApiError, RequestError.
    """
    llm = state.service.llm
    _check_prompt_logprobs(body)
    uses_template = prompt is None
    if prompt is None:
        prompt = chat_prompt(llm, body, state.check_characters)
    state.check_prompt(prompt)
    call_grammar = conversation.required_call(body.tools or (), body.tool_choice)
    if call_grammar and body.response_format and body.response_format.type != "text":
        message = "tool_choice and response_format both require a format: give one"
        raise ApiError(400, message, "response_format")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    max_tokens = limit
    if max_tokens is None:
        max_tokens = _default_chat_tokens(llm, prompt, body, uses_template)
    params = sampling_params(
        llm,
        body,
        max_tokens,
        (body.top_logprobs or 0) if body.logprobs else None,
        call_grammar or grammar_of(body.response_format),
        body.prompt_logprobs,
    )
    prediction = text_of(body.prediction.content) if body.prediction else None
    fill = limit is None or limit == FILL_CONTEXT
    jobs = make_jobs(llm, [prompt], params, body, prediction, fill=fill)
    formatter = Chat(state, body, params.n, params.seed)
    formatter.ignored = [*formatter.ignored, *fields_without_effect(llm, body)]
    return formatter, jobs


def _default_chat_tokens(
    llm: LLM, prompt: Sequence[int], request: ChatRequest, uses_template: bool
) -> int:
    """Return the limit of a chat that gives none.

    A chat model ends its turn by itself, so the answer may fill the context, as OpenAI's and
    Ollama's APIs define it. Without a template or an end token, or with `ignore_eos`, nothing would
    end it, and the default of the library and the command line applies.
    """
    has_template = llm.tokenizer is not None and llm.tokenizer.has_chat_template
    if uses_template and has_template and llm.decoder.config.end_ids and not request.ignore_eos:
        return FILL_CONTEXT
    return min(max(1, llm.room - len(prompt)), DEFAULT_MAX_TOKENS)


def grammar_of(format_: ResponseFormat | None) -> Grammar | None:
    """Return the grammar that a response_format asks for. Raises ApiError."""
    if format_ is None or format_.type == "text":
        return None
    if format_.type == "json_object":
        return Grammar("json_object")
    value = getattr(format_, format_.type)
    if value is None:
        message = f"response_format of type {format_.type} needs {format_.type!r}"
        raise ApiError(400, message, "response_format")
    return Grammar.of(GRAMMARS[format_.type], getattr(value, "schema_", value))


def sampling_params(
    llm: LLM,
    request: OpenAIRequest,
    max_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None,
    num_prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Absent fields default to the values the model recommends, or else to forerun's. Without a
    seed, or with a negative one, a random seed is drawn and returned, so that the answer can be
    repeated. `max_tokens` may be FILL_CONTEXT: `make_jobs` computes the rest of the context for
    each prompt.
    Raises ApiError, RequestError.
    """
    seed = request.seed
    if seed is not None and not -(1 << 63) <= seed < 1 << 64:
        raise ApiError(400, f"seed={shorten(seed)} is out of range: give a 64-bit number", "seed")
    options: Json = {
        **llm.sampling,
        "seed": secrets.randbits(48) if seed is None or seed < 0 else seed % (1 << 63),
        "max_tokens": llm.room if max_tokens == FILL_CONTEXT else max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": num_prompt_logprobs,
        "grammar": grammar,
    }
    for name in SAMPLING_FIELDS:
        if (value := getattr(request, name)) is not None:
            options[name] = value
    if request.logit_bias is not None:
        options["logit_bias"] = {_token_id(k): bias for k, bias in request.logit_bias.items()}
    return SamplingParams.of(**options)


def _token_id(text: str) -> int:
    """Return the token id that a key of `logit_bias` names."""
    token = integer_of_text(text)
    if token is None:
        example = 'logit_bias must map token ids to biases, as in {"50256": -100}'
        raise ApiError(400, f"{example}: {shorten(text)} is no token id", "logit_bias")
    return token


def make_jobs(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    request: OpenAIRequest,
    prediction: str | None = None,
    *,
    fill: bool = False,
) -> list[Job]:
    """Return a job for each of the n completions of every prompt.

    `fill`: the request gives no limit, so each completion may fill the context.
    """
    draft, depth, rule = _speculation(llm, request.speculative)
    references = llm.references(prediction, request.documents or ())
    if references and request.speculative is not False and draft != "off":
        draft = with_references(draft)
    trace_ = bool(request.trace)
    tenant = tenant_of(request.cache_salt)
    jobs = []
    for tokens in prompts:
        own = [reference.behind(len(tokens)) for reference in references]
        room = max(1, llm.room - len(tokens))
        limited = replace(params, max_tokens=min(params.length_limit, room)) if fill else params
        jobs += [
            Job(tokens, each, draft, depth, rule, own, trace_, tenant, fill, client=CLIENT.get())
            for each in separate(limited)
        ]
    return jobs


def _speculation(llm: LLM, given: bool | Speculative | None) -> tuple[str, int | str, str | None]:
    """Return (draft, depth, rule) of a request; absent options are the server's."""
    if given is False:
        return "off", 0, None
    if given is None or given is True:
        return llm.draft, llm.config.depth, None
    draft = llm.draft if given.draft in (None, "auto") else given.draft
    return draft, llm.config.depth if given.depth is None else given.depth, given.rule


# Responses


class Choices(Formatter):
    """Base of the formats of completions and chats: `n` choices for each prompt."""

    terminator = "data: [DONE]\n\n"
    id_prefix = ""
    object_name = ""
    chunk_name = ""

    def __init__(self, state: ServerState, body: OpenAIRequest, n: int, seed: int | None) -> None:
        super().__init__(bool(body.stream), body.ignored)
        llm = state.service.llm
        self.body = body
        self.token_ids = bool(body.return_token_ids)
        self.n = n
        self.stream_options = body.stream_options or StreamOptions()
        self.tokenizer = llm.tokenizer
        self.sampling = llm.sampling
        self.head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": state.name,
            "system_fingerprint": state.fingerprint,
            "seed": seed,
        }

    def estimate_size(self, jobs: Sequence[Job], lengths: Sequence[int]) -> int:
        size = super().estimate_size(jobs, lengths)
        if self.body.prompt_logprobs is not None:
            size += sum(prompt_logprobs_size(job, LONG_LOGPROB_BYTES) for job in jobs)
        return size

    def full(self, outputs: Sequence[Output]) -> Json:
        return {
            **self.head,
            "object": self.object_name,
            "choices": [self.choice(output, i) for i, output in enumerate(outputs)],
            "usage": usage(outputs, self.n),
            "metrics": metrics(outputs),
        }

    def chunks(self, outputs: Sequence[Output], index: int, event: Event) -> Iterable[str]:
        more: Json = {}
        if event.round is not None:
            more["x_spec"] = trace(event.round, event, self.tokenizer)
        if self.stream_options.continuous_usage_stats:
            more["usage"] = usage(outputs, self.n)
        return [self.chunk([self.delta(outputs[index], index, event)], **more)]

    def end(self, outputs: Sequence[Output]) -> Iterable[str]:
        if self.stream_options.include_usage:
            yield self.chunk([], usage=usage(outputs, self.n), metrics=metrics(outputs))

    def error(self, error: Exception) -> str:
        return sse(errors.logged_body(error)[1])

    def chunk(self, choices: list[Json], **more: Any) -> str:
        return sse({**self.head, "object": self.chunk_name, "choices": choices, **more})

    def choice(self, output: Output, index: int) -> Json:
        raise NotImplementedError

    def delta(self, output: Output, index: int, event: Event) -> Json:
        """Return the choice of the chunk for an event that has just been added to `output`."""
        raise NotImplementedError

    def _with_token_ids(self, choice: Json, token_ids: list[int]) -> Json:
        return choice | {"token_ids": token_ids} if self.token_ids else choice

    def _prompt_logprobs(self, output: Output) -> list[Json | None]:
        top = self.body.prompt_logprobs or 0
        return prompt_logprobs(output.prompt_logprobs, top, self.tokenizer)


class Completions(Choices):
    """OpenAI's text completions.

    Attributes:
        echoes: texts of the prompts where `echo` repeats them, else empty strings.
        echo_pieces: texts of their tokens where they are echoed with log-probabilities.
    """

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"
    logprob_bytes = LOGPROB_BYTES

    def __init__(
        self,
        state: ServerState,
        body: CompletionRequest,
        n: int,
        seed: int | None,
        prompts: list[list[int]],
    ) -> None:
        super().__init__(state, body, n, seed)
        self.prompts = prompts
        self._logprobs = partial(
            completion_logprobs, tokenizer=self.tokenizer, top=body.logprobs or 0
        )
        tokenizer = self.tokenizer if body.echo else None
        self.echoes = [tokenizer.decode(prompt) if tokenizer else "" for prompt in prompts]
        self.echo_pieces: list[list[str]] = []
        if body.echo and body.logprobs is not None:
            self.echo_pieces = [_pieces(tokenizer, prompt) for prompt in prompts]
            self.echoes = ["".join(pieces) for pieces in self.echo_pieces]

    def estimate_size(self, jobs: Sequence[Job], lengths: Sequence[int]) -> int:
        size = super().estimate_size(jobs, lengths)
        size += self.n * sum(len(echo.encode()) for echo in self.echoes)
        if self.echo_pieces:
            size += sum(prompt_logprobs_size(job, self.logprob_bytes) for job in jobs)
        return size

    def choice(self, output: Output, index: int) -> Json:
        prompt = index // self.n
        choice: Json = {
            "index": index,
            "text": self.echoes[prompt] + output.text,
            "finish_reason": finish_reason(output.finish_reason),
            "logprobs": None,
        }
        if self.echo_pieces:
            choice["logprobs"] = self._logprobs(
                self.prompts[prompt] + output.token_ids,
                [*output.prompt_logprobs, *output.logprobs],
                self.echo_pieces[prompt] + output.pieces,
            )
        elif output.has_logprobs:
            choice["logprobs"] = self._logprobs(output.token_ids, output.logprobs, output.pieces)
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(output)
        return self._with_token_ids(choice, output.token_ids)

    def chunks(self, outputs: Sequence[Output], index: int, event: Event) -> Iterable[str]:
        if self.echo_pieces and event.prompt_logprobs is not None:
            yield from self._echo_chunks(index, event)
        yield from super().chunks(outputs, index, event)

    def _echo_chunks(self, index: int, event: Event) -> Iterable[str]:
        """Return the chunks that echo a prompt with its log-probabilities."""
        tokens = self.prompts[index // self.n]
        pieces = self.echo_pieces[index // self.n]
        offset = 0
        for start in range(0, len(tokens), ECHO_CHUNK):
            part = slice(start, start + ECHO_CHUNK)
            entries = (event.prompt_logprobs or [])[part]
            logprobs = self._logprobs(tokens[part], entries, pieces[part], offset)
            text = "".join(pieces[part])
            offset += len(text)
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
            yield self.chunk([choice])

    def delta(self, output: Output, index: int, event: Event) -> Json:
        echo = self.echoes[index // self.n]
        is_first = len(output.token_ids) == len(event.token_ids) and not self.echo_pieces
        choice: Json = {
            "index": index,
            "text": (echo if is_first else "") + event.text,
            "logprobs": None,
            "finish_reason": finish_reason(event.finish_reason),
        }
        if event.logprobs is not None:
            offset = len(echo) + output.characters - len(event.text)
            choice["logprobs"] = self._logprobs(
                event.token_ids, event.logprobs, event.pieces, offset
            )
        return self._with_token_ids(choice, event.token_ids)


def _pieces(tokenizer: Tokenizer | None, prompt: Sequence[int]) -> list[str]:
    """Return the text that each token of a prompt completes."""
    if tokenizer is None:
        return [""] * len(prompt)
    decoding = tokenizer.stream([])
    pieces = [decoding.append(token) for token in prompt]
    return [*pieces[:-1], pieces[-1] + decoding.flush()]


class Chat(Choices):
    """OpenAI's chat completions, with tool calls."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    logprob_bytes = LONG_LOGPROB_BYTES

    def __init__(self, state: ServerState, body: ChatRequest, n: int, seed: int | None) -> None:
        super().__init__(state, body, n, seed)
        self.tools = (body.tools or []) if body.tool_choice != "none" else []
        # for each streamed choice: its parser of calls, and the number of calls so far
        self._parsers: defaultdict[int, conversation.ToolCallParser] = defaultdict(
            partial(conversation.ToolCallParser, self.tools)
        )
        self._num_calls: defaultdict[int, int] = defaultdict(int)

    def text_and_calls(self, output: Output) -> tuple[str, list[Json]]:
        """Return the text of an output without tool calls, and the calls in OpenAI's format.

        Only the first call is returned if the request forbids parallel calls.
        """
        if not self.tools:
            return output.text, []
        text, calls = conversation.ToolCallParser(self.tools).read(output.text, is_last=True)
        return text, calls[:1] if self.body.parallel_tool_calls is False else calls

    def choice(self, output: Output, index: int) -> Json:
        text, calls = self.text_and_calls(output)
        content = text or (None if calls else "")
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        choice: Json = {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls else finish_reason(output.finish_reason),
            "logprobs": None,
        }
        if output.has_logprobs:
            choice["logprobs"] = chat_logprobs(output.logprobs, self.tokenizer)
        return self._with_token_ids(choice, output.token_ids)

    def full(self, outputs: Sequence[Output]) -> Json:
        body = super().full(outputs)
        if self.body.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs(outputs[0])
        return body

    def begin(self, outputs: Sequence[Output]) -> Iterable[str]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        for i in range(len(outputs)):
            choice = {"index": i, "delta": delta, "finish_reason": None, "logprobs": None}
            yield self.chunk([choice])

    def delta(self, output: Output, index: int, event: Event) -> Json:
        delta: Json = {}
        reason = finish_reason(event.finish_reason)
        text, calls = self._parse(index, event) if self.tools else (event.text, [])
        if text or reason or not self.tools:
            delta["content"] = text
        if calls:
            first = self._num_calls[index]
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls, first)]
            self._num_calls[index] += len(calls)
        if reason and self._num_calls[index]:
            reason = "tool_calls"
        choice: Json = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
        if event.logprobs is not None:
            choice["logprobs"] = chat_logprobs(event.logprobs, self.tokenizer)
        return self._with_token_ids(choice, event.token_ids)

    def _parse(self, index: int, event: Event) -> tuple[str, list[Json]]:
        """Return the text and the calls of a streamed choice that are final with this event."""
        is_last = event.finish_reason is not None
        text, calls = self._parsers[index].read(event.text, is_last)
        if self.body.parallel_tool_calls is False:
            calls = calls[: max(1 - self._num_calls[index], 0)]
        return text, calls
