"""Requests as clients write them, to orders as the engine takes them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forerun.draft.registry import with_references
from forerun.errors import RequestError, shorten
from forerun.llm import LLM, separate
from forerun.models.tokenizer import Tokenizer
from forerun.sampling.grammar import Grammar
from forerun.sampling.params import SamplingParams
from forerun.server import limits
from forerun.server.auth import tenant_of
from forerun.server.errors import ApiError
from forerun.server.jobs import Job
from forerun.server.numbers import FILL, whole_of_text
from forerun.server.protocol import (
    CallPart,
    ChatRequest,
    CompletionRequest,
    Generation,
    Message,
    Part,
    RefusalPart,
    ResponseFormat,
    ResultPart,
    ThoughtPart,
    TokenizeRequest,
    ToolCall,
)

COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
UNENDED_TOKENS = 512  # of an answer without a limit, where nothing says that the model will end it
TEMPLATE = frozenset(  # arguments that are ours, and what would replace the model's own template
    (
        *(
            "self",
            "messages",
            "conversation",
            "tools",
            "tokenize",
            "add_generation_prompt",
            "chat_template",
        ),
        *(
            "documents",
            "continue_final_message",
            "return_dict",
            "return_tensors",
            "tokenizer_kwargs",
        ),
        *("padding", "truncation"),
    )
)
THOUGHTS = (
    "enable_thinking",
    "reasoning_effort",
)  # variables of templates that say how much a model is to think
GRAMMARS = {"json_schema": "json_schema", "regex": "regex", "grammar": "lark", "choice": "choice"}


def completion_prompts(request: CompletionRequest) -> Sequence[str | list[int]]:
    """The prompts of a completion request, as they were written."""
    prompt = request.prompt
    if request.suffix:
        raise ApiError(
            400, "suffix is not supported: this server continues texts, it fills no gaps", "suffix"
        )
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(400, "best_of is not supported beyond n", "best_of")
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        message = "max_tokens=0 generates nothing: give 1 or more, or echo (with logprobs) to score the prompt"
        raise ApiError(400, message, "max_tokens")
    _check_prompt_logprobs(request)
    if isinstance(prompt, str):
        prompts: Sequence[Any] = [prompt]
    else:
        prompts = [prompt] if prompt and isinstance(prompt[0], int) else prompt
    if not prompts:
        raise ApiError(400, "there is no prompt: give a text or token ids", "prompt")
    return prompts


def scored(request: CompletionRequest) -> int | None:
    """The number of likeliest tokens to work out beside each token of the prompt; None where its
    tokens are not scored. A prompt that is only read is scored in any case."""
    asked = [request.prompt_logprobs] if request.prompt_logprobs is not None else []
    asked += [request.logprobs] if request.echo and request.logprobs is not None else []
    return max(asked, default=0 if request.max_tokens == 0 else None)


def _check_prompt_logprobs(request: CompletionRequest | ChatRequest) -> None:
    if request.prompt_logprobs is not None and request.stream:
        message = "prompt_logprobs is not streamed: leave stream out, or give /v1/completions echo and logprobs"
        raise ApiError(400, message, "prompt_logprobs")


def chat_prompt(llm: LLM, request: ChatRequest, check: Callable[[int], None]) -> list[int]:
    """A conversation as token ids. `check` refuses so many characters."""
    tools = (
        [t.model_dump(exclude_none=True) for t in request.tools or []]
        if request.tool_choice != "none"
        else []
    )
    if llm.tokenizer is None:
        raise RequestError("this model directory has no tokenizer: it cannot chat")
    _check_prompt_logprobs(request)
    options = template_options(request)
    if taken := TEMPLATE & options.keys():
        raise ApiError(
            400, f"chat_template_kwargs may not set {min(taken)}", "chat_template_kwargs"
        )
    return _conversation(llm.tokenizer, request.messages, check, tools, options)


def template_options(request: ChatRequest) -> dict[str, Any]:
    """The variables of the chat template: the request's own, and what its reasoning effort means
    besides."""
    own, effort = request.chat_template_kwargs or {}, request.reasoning_effort
    if effort is None:
        return own
    meant: dict[str, Any] = {"enable_thinking": False}
    if effort != "none":
        meant = {"enable_thinking": True, "reasoning_effort": effort}
    return meant | own


def without_effect(llm: LLM, request: ChatRequest) -> list[str]:
    """Fields of a chat that this model's template cannot use."""
    template = llm.tokenizer.template if llm.tokenizer else ""
    if any(name in template for name in THOUGHTS):
        return []
    thinks = (request.chat_template_kwargs or {}).get("enable_thinking")
    effort = request.reasoning_effort not in (None, "none")
    return [*(["enable_thinking"] if thinks else []), *(["reasoning_effort"] if effort else [])]


def tokenized(llm: LLM, request: TokenizeRequest, check: Callable[[int], None]) -> list[int]:
    """A text or a conversation as token ids. `check` refuses so many characters."""
    if (request.prompt is None) == (request.messages is None) or llm.tokenizer is None:
        raise ApiError(400, "give a prompt or messages, to a model that has a tokenizer", "prompt")
    if request.messages is None:
        check(len(request.prompt or ""))
        return llm.tokenizer.encode(request.prompt or "", request.add_special_tokens)
    return _conversation(llm.tokenizer, request.messages, check)


def detokenized(llm: LLM, tokens: Sequence[int]) -> str:
    """Token ids as text."""
    vocab = llm.decoder.config.vocab
    if llm.tokenizer is None or (tokens and not 0 <= min(tokens) <= max(tokens) < vocab):
        raise ApiError(
            400,
            f"tokens must be token ids under {vocab}, of a model that has a tokenizer",
            "tokens",
        )
    return llm.tokenizer.decode(tokens)


def _conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    check: Callable[[int], None],
    tools: Sequence[dict[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Messages as token ids, unless they are longer than any prompt."""
    said = [message.model_dump(exclude_none=True) for message in messages]
    check(limits.count_characters([said, list(tools), dict(options or {})]))
    laid_out = [values for message in messages for values in plain(message)]
    return tokenizer.chat(laid_out, tools, **(options or {}))


def plain(message: Message) -> list[dict[str, Any]]:
    """A message as chat templates take it: one text, arguments as values, thoughts beside the text.

    What tools said, where it comes as parts, is a message of its own in front of the rest.
    """
    parts = [] if isinstance(message.content, str) else message.content or []
    calls = [(call.id, call.function.name, _values(call)) for call in message.tool_calls or ()]
    calls += [
        (part.id, part.name, part.input or {}) for part in parts if isinstance(part, CallPart)
    ]
    results = [
        {"role": "tool", "content": text_of(part.content), "tool_call_id": part.tool_use_id}
        for part in parts
        if isinstance(part, ResultPart)
    ]
    if results and len(results) == len(parts):
        return results
    role = "system" if message.role == "developer" else message.role
    values: dict[str, Any] = {
        "role": role,
        "content": text_of(message.content) or message.refusal or "",
    }
    if thoughts := message.reasoning_content or thoughts_of(message.content):
        values["reasoning_content"] = thoughts
    if calls:
        values["tool_calls"] = [
            {"type": "function", "id": id_, "function": {"name": name, "arguments": arguments}}
            for id_, name, arguments in calls
        ]
    values |= {
        k: v
        for k, v in (("name", message.name), ("tool_call_id", message.tool_call_id))
        if v is not None
    }
    return [*results, values]


def _values(call: ToolCall) -> Any:
    """The arguments of a call; none are an empty object."""
    text = call.function.arguments
    try:
        value = limits.parse(text.encode()) if text and text.strip() else None
    except ValueError:
        raise ApiError(
            400, f"the arguments of {shorten(call.function.name)} are not JSON", "messages"
        ) from None
    return {} if value is None else value


def text_of(content: Sequence[Part] | str | None) -> str:
    """What a content says, given as a text or in parts, as one text."""
    if isinstance(content, str):
        return content
    said = [
        part.refusal if isinstance(part, RefusalPart) else getattr(part, "text", "")
        for part in content or ()
    ]
    return "".join(said)


def thoughts_of(content: Sequence[Part] | str | None) -> str:
    """The thoughts among the parts of a content, as one text."""
    parts = [] if isinstance(content, str) else content or []
    return "".join(text_of(part.thinking) for part in parts if isinstance(part, ThoughtPart))


def grammar_of(form: ResponseFormat | None) -> Grammar | None:
    """The grammar a response_format asks for."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar("json_object")
    value = getattr(form, form.type)
    if value is None:
        raise ApiError(
            400, f"response_format of type {form.type} needs {form.type!r}", "response_format"
        )
    return Grammar.of(GRAMMARS[form.type], value.schema_ if form.type == "json_schema" else value)


def sampling(
    llm: LLM,
    request: Generation,
    max_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The sampling parameters of a request; what it does not say is as the model's authors set it,
    or else forerun's default. Without a seed, or with one below 0, it is given one, so that it can
    be repeated. `max_tokens` may be FILL: `orders` then knows how much room each prompt leaves."""
    if request.seed is not None and not -(1 << 63) <= request.seed < 1 << 64:
        raise ApiError(
            400, f"seed={shorten(request.seed)} is out of range: give a 64-bit number", "seed"
        )
    options: dict[str, Any] = {
        **llm.sampling,
        "seed": secrets.randbits(48)
        if request.seed is None or request.seed < 0
        else request.seed % (1 << 63),
        "max_tokens": llm.room if max_tokens == FILL else max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "grammar": grammar,
    }
    for name in (
        *(
            "temperature",
            "top_p",
            "n",
            "stop",
            "presence_penalty",
            "frequency_penalty",
            "top_k",
            "min_p",
        ),
        *("repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    ):
        if (value := getattr(request, name)) is not None:
            options[name] = value
    if request.logit_bias is not None:
        options["logit_bias"] = {
            _token_id(token): amount for token, amount in request.logit_bias.items()
        }
    return SamplingParams.of(**options)


def answer_tokens(
    llm: LLM, prompt: Sequence[int], request: Generation, asked: int | None, *, templated: bool
) -> int:
    """The most tokens of an answer, or FILL. A request that gives no limit (`asked` is None) may
    have as many as there is room for, since a chat model ends its turn; where nothing makes it end
    (no chat template, no end token, `ignore_eos`) there is a bound."""
    if asked is not None:
        return asked
    has_template = llm.tokenizer is not None and llm.tokenizer.has_chat_template
    ends = templated and has_template and llm.decoder.config.end_ids and not request.ignore_eos
    return FILL if ends else min(max(1, llm.room - len(prompt)), UNENDED_TOKENS)


def _token_id(text: str) -> int:
    """The token that an entry of `logit_bias` is about."""
    token = whole_of_text(text)
    if token is None:
        message = f'logit_bias must map token ids to amounts, as in {{"50256": -100}}: {shorten(text)} is no token id'
        raise ApiError(400, message, "logit_bias")
    return token


def orders(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    request: Generation,
    prediction: str | None = None,
    *,
    fill: bool = False,
) -> list[Job]:
    """One order for each of the n completions of every prompt; `fill`: the request gives no limit,
    so that each may be as long as there is room for."""
    draft, depth, rule = speculation(llm, request.speculative)
    references = llm.references(prediction, request.documents or ())
    if references and request.speculative is not False and draft != "off":
        draft = with_references(draft)
    trace, tenant = bool(request.trace), tenant_of(request.cache_salt)
    found = []
    for tokens in prompts:
        mine = [reference.behind(len(tokens)) for reference in references]
        room = max(1, llm.room - len(tokens))
        fitted = replace(params, max_tokens=min(params.max_tokens, room)) if fill else params
        found += [
            Job(tokens, own, draft, depth, rule, mine, trace, tenant, fill)
            for own in separate(fitted)
        ]
    return found


def speculation(llm: LLM, wish: Any) -> tuple[str, int | str, str | None]:
    """(draft, depth, rule) of a request's `speculative`; what it leaves open is the server's
    own."""
    if wish is False:
        return "off", 0, None
    if wish is None or wish is True:
        return llm.draft, llm.config.depth, None
    draft = llm.draft if wish.draft in (None, "auto") else wish.draft
    return draft, llm.config.depth if wish.depth is None else wish.depth, wish.rule
