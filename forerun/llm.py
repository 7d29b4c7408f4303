"""LLM: a model and its engine behind two calls, `generate` and `stream`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from forerun import rng
from forerun.config import Config
from forerun.draft.corpus import Index
from forerun.draft.proposer import Reference, view_of
from forerun.draft.registry import automatic, make_proposers, with_references
from forerun.draft_loading import Loader, open_index, share_memory
from forerun.draft_spec import draft_name, read_draft
from forerun.engine.cost_store import learned_of
from forerun.engine.depth import DepthPolicy
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.stats import RequestStats
from forerun.errors import RequestError, StateError, shorten
from forerun.kernels import native
from forerun.load import load_tokenizer, make_runner, pick_device, within_machine
from forerun.measure.energy import JoulesClock
from forerun.models.chat_template import recommended
from forerun.models.decoder import Decoder
from forerun.models.hub import find_model
from forerun.models.tokenizer import Message, Tokenizer
from forerun.runtime.native import NativeDecoder
from forerun.sampling.params import DEFAULT, SamplingParams
from forerun.types import Event, PromptLogprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished output.

    Attributes:
        text: the output as text, without the stop string or end-of-text token; "" without a
            tokenizer.
        token_ids: the output's tokens, the one that ended it included.
        finish_reason: stop (a stop string or token), length (max_tokens or the context), or abort.
        stats: what it took: steps, drafted, accepted, accepted_length, by_source, seconds.
        sources: for each token, the proposer whose draft was accepted, or "" for the target's own.
        logprobs: one entry a token where the parameters asked for them.
        seed: the seed it was drawn with; the same seed gives the same tokens.
        prompt_token_ids: the prompt as the model read it.
        prompt_logprobs: one entry a token of the prompt where the parameters asked for them, None
            for the first.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: RequestStats
    sources: list[str]
    logprobs: list[TokenLogprobs] | None
    seed: int
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None = None


class Job:
    """A request and what has come of it until now."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.inbox: deque[Event] = deque()
        self.events: list[Event] = []
        self.done = False

    def receive(self, event: Event) -> None:
        """The next of its events."""
        self.inbox.append(event)
        self.events.append(event)
        self.done = event.finish_reason is not None

    def check(self) -> None:
        """Raise what ended this request, if that was not its own end."""
        if self.request.error:
            raise self.request.error

    def completion(self) -> Completion:
        """What there is so far."""
        request, wants = self.request, self.request.params.logprobs is not None
        return Completion(
            text="".join(event.text for event in self.events),
            token_ids=list(request.output),
            finish_reason=request.finish_reason or "abort",
            stats=request.stats,
            sources=[source for event in self.events for source in event.sources],
            logprobs=[entry for event in self.events for entry in event.logprobs or ()]
            if wants
            else None,
            seed=request.seed,
            prompt_token_ids=request.tokens[: request.prompt_length],
            prompt_logprobs=None
            if request.params.prompt_logprobs is None
            else list(request.prompt_logprobs),
        )


WHAT_IS_A_PROMPT = "a prompt is a string, a list of token ids or a list of chat messages"
CHARACTERS = 16  # of a token, more than any text has on average
Prompt = str | Sequence[int] | Sequence[Message]


class LLM:
    """A model that generates with speculation. `LLM()` is the default model, SmolLM2-135M-Instruct.

    Not thread-safe: one thread at a time.

    Usage:
        llm = LLM("path/or/hub-id", draft="model:path/of/a/smaller/one")
        llm.generate(["def fib(n):"], SamplingParams(temperature=0.8, seed=1))[0].text
        for event in llm.stream("def fib(n):"): print(event.text, end="")

    `recommended` are the sampling parameters that the model's authors set. They hold where a
    request gives none of its own; `sampling` are those together with forerun's default for the
    rest.

    Args:
        model: as in `Config`; None is the default model.
        options: the fields of `Config`.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        config = self.config = within_machine(
            Config.of(model=None if model is None else str(model), **options)
        )
        clock = JoulesClock() if config.objective == "energy" else None
        if config.threads:
            torch.set_num_threads(config.threads)
        device = pick_device(config.device)
        drafting = device if config.draft_device == "auto" else pick_device(config.draft_device)
        directory = find_model(config.model)
        tokenizer = self.tokenizer = load_tokenizer(directory, check=True)
        self.recommended = recommended(directory)
        target = make_runner(config, directory, device)
        native.reserve(config.draft_threads)
        view = view_of(target.decoder)
        instructions = native.instructions() if view.form else ""
        spec = automatic(config.draft, directory, instructions, target.decoder.weight_bits)
        load = Loader(config, directory, tokenizer, target, drafting)
        proposers = make_proposers(
            read_draft(spec), load, view, target.cache, config.width, config.draft_threshold
        )
        if config.kv_tokens is None:
            share_memory(config, target, proposers.values())
        self.draft = draft_name(spec)
        policy = DepthPolicy(config.objective, config.slo_ms / 1e3)
        self.engine = Engine(
            target,
            proposers,
            rule=config.rule,
            chunk=config.chunk,
            tokenizer=tokenizer,
            policy=policy,
            clock=clock,
        )
        decoder = target.decoder
        facts = [
            decoder.precision,
            config.threads,
            native.threads(),
            native.reserved(),
            str(device),
            config.draft,
            config.width,
            *(["energy"] if config.objective == "energy" else []),  # costs are joules then
            *([config.draft_device] if config.draft_device != "auto" else []),
            *([config.tensor_parallel] if config.tensor_parallel > 1 else []),
        ]
        self.learned = learned_of(policy, directory, decoder.weight_bytes, facts)
        self._jobs: dict[int, Job] = {}

    @property
    def decoder(self) -> Decoder | NativeDecoder:
        """The target model."""
        return self.engine.target.decoder

    @property
    def room(self) -> int:
        """Most tokens of a prompt and its output together."""
        pages = self.engine.target.cache.pages
        return min(self.decoder.context, pages.count * pages.size)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters of a request that gives none: the authors' values, else forerun's
        default."""
        return {**DEFAULT, **self.recommended}

    def index(self, directory: Path) -> Index:
        """An index that `forerun index` made for this model. Raises LoadError, RequestError."""
        return open_index(directory, self.tokenizer, self.decoder.config.vocab)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        draft: str | None = None,
        depth: int | str | None = None,
        prediction: str | None = None,
        documents: Sequence[str] = (),
    ) -> list[Completion]:
        """Complete one prompt or many, all at the same time.

        Args:
            prompts: a string, a list of token ids, a list of chat messages ({"role", "content"}),
                or a list of those.
            params: how to choose tokens and when to stop; what is not given is as the model's
                authors set it, or else forerun's default (temperature 0.8, top_k 40, top_p 0.95,
                min_p 0.05).
            draft: off, or a proposer of this engine (ngram, suffix, model), for this call; None is
                the engine's own.
            depth: auto or a number, for this call; None is the engine's own.
            prediction: what the output will probably be, such as the file before an edit: it is
                drafted from where the output agrees with it.
            documents: texts the output may quote; drafted from where it does.

        Returns:
            `params.n` completions a prompt, in the order of the prompts.

        Raises:
            RequestError, CapacityError: a prompt or parameters that cannot be served; nothing is
                generated then.
        """
        params = _checked(params).resolved(self.recommended)
        jobs: list[Job] = []
        try:
            references = self.references(prediction, documents)
            for prompt in _as_list(prompts):
                jobs += self._add(self.tokens(prompt), params, draft, depth, references)
            while any(not job.done for job in jobs):
                self._step()
        finally:
            self._drop(jobs)
            self.learned.keep()
        for job in jobs:
            job.check()
        return [job.completion() for job in jobs]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        draft: str | None = None,
        depth: int | str | None = None,
        prediction: str | None = None,
        documents: Sequence[str] = (),
    ) -> Stream:
        """Complete one prompt and give its events as they come. Arguments as for `generate`; n must
        be 1.

        The request runs while there is a loop over the stream. Leaving the loop pauses it: another
        loop continues with the next event, and a stream that nobody keeps is dropped.
        """
        params = _checked(params).resolved(self.recommended)
        if params.n != 1:
            raise RequestError(
                f"stream gives one completion, not n={params.n}: use generate, or several streams"
            )
        (job,) = self._add(
            self.tokens(prompt), params, draft, depth, self.references(prediction, documents)
        )
        self._pause(job)  # until a loop begins
        return Stream(self, job)

    def forget(self) -> None:
        """Drop what proposers remember of finished requests: for privacy between users, and for
        fair measurements."""
        for proposer in self.engine.proposers.values():
            proposer.forget()

    def _add(
        self,
        tokens: list[int],
        params: SamplingParams,
        draft: str | None,
        depth: int | str | None,
        references: Sequence[Reference],
    ) -> list[Job]:
        if not isinstance(draft, str | None):
            raise RequestError(
                f"draft={shorten(draft)} is no draft: give the name of one, such as 'suffix' or 'off'; a proposer of your"
                " own is put into llm.engine.proposers under its name"
            )
        draft = self.draft if draft in (None, "auto") else draft
        depth = self.config.depth if depth is None else depth
        references = [reference.behind(len(tokens)) for reference in references]
        if references and draft != "off":
            draft = with_references(draft)
        jobs = []
        for mine in separate(params):
            job = Job(
                self.engine.add(tokens, mine, draft=draft, depth=depth, references=references)
            )
            self._jobs[job.request.id] = job
            jobs.append(job)
        return jobs

    def references(self, prediction: str | None, documents: Sequence[str]) -> list[Reference]:
        """A prediction and documents as references, indexed once for any number of prompts. Raises
        RequestError."""
        if not isinstance(prediction, str | None):
            raise RequestError(f"prediction={shorten(prediction)} is no text: give a string")
        if not _is_list(documents) or not all(isinstance(text, str) for text in documents):
            raise RequestError(
                f"documents={shorten(documents)} is no list of texts: give a list of strings"
            )
        texts = [("prediction", prediction)] if prediction else []
        texts += [("document", text) for text in documents if text]
        limit = 4 * self.decoder.context
        if sum(len(text) for _, text in texts) > CHARACTERS * limit:
            raise RequestError(
                f"prediction and documents are too long: give at most {limit} tokens in all"
            )
        if not texts:
            return []
        vocab, encode = self.decoder.config.vocab, self._text().encode
        references = [  # up to a token that the model has not: some tokenizers have more
            Reference(
                name, tuple(takewhile(lambda token: token < vocab, encode(text, special=False))), start=0,
                whole=name == "prediction",
            )
            for name, text in texts
        ]  # fmt: skip
        total = sum(len(reference.tokens) for reference in references)
        if total > limit:
            raise RequestError(
                f"prediction and documents have {total} tokens: give at most {limit} in all"
            )
        for reference in references:
            _ = (
                reference.index,
                reference.packed,
            )  # made here, so that the engine's steps do not wait for it
        return references

    def _step(self) -> None:
        """One step of the engine, and its events to their jobs.

        What is raised here, Ctrl-C too, may have cut the step in half: the engine starts over, and
        every request that was running has an error.
        """
        try:
            for event in self.engine.step():
                if event.request_id in self._jobs:
                    self._jobs[event.request_id].receive(event)
        except BaseException as error:
            name = type(error).__name__
            why = f"a step of the engine was cut short by {name}, and this request with it: begin it anew"
            for job in self._jobs.values():
                job.request.error = job.request.error or StateError(why)
            self._jobs.clear()
            with suppress(StateError):  # a part of the model may be gone
                self.engine.reset()
            raise

    def _pause(self, job: Job) -> None:
        """Take a job out of the engine before its end."""
        self._jobs.pop(job.request.id, None)
        self.engine.pause(job.request)

    def _resume(self, job: Job) -> None:
        """Let a job go on, if it was paused."""
        if job.request.id not in self._jobs:
            self._jobs[job.request.id] = job
            self.engine.resume(job.request)

    def _drop(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._jobs.pop(job.request.id, None)
            if not job.request.paused:  # the engine has it no more
                self.engine.abort(job.request)

    def tokens(self, prompt: Prompt) -> list[int]:
        """A prompt as the model reads it. Raises RequestError."""
        if isinstance(prompt, str):
            return self._text().encode(prompt)
        if not _is_list(prompt):
            raise RequestError(WHAT_IS_A_PROMPT)
        if prompt and all(isinstance(item, dict) for item in prompt):
            return self._text().chat(prompt)  # type: ignore[arg-type]
        if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return list(prompt)  # type: ignore[arg-type]
        raise RequestError(WHAT_IS_A_PROMPT)

    def _text(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "this model directory has no tokenizer: give prompts as lists of token ids"
            )
        return self.tokenizer


class Stream:
    """The events of one request, each of them once.

    Leaving a loop early pauses the request, and another loop continues it: the tokens are the same
    as without the pause. `completion` is the output so far.
    """

    def __init__(self, llm: LLM, job: Job) -> None:
        self._llm, self._job = llm, job
        self._stopped, self._ended = False, False

    def stop(self) -> None:
        """End the request: the loop ends with the step in progress. A signal's handler may call
        this at any moment."""
        self._stopped = True

    def __iter__(self) -> Iterator[Event]:
        """Raises RequestError where all events were given before, and whatever ended the
        request."""
        llm, job = self._llm, self._job
        job.check()
        if self._ended:
            raise RequestError(
                "this stream has ended, and gives its events once: its output is stream.completion; call llm.stream"
                " for another one"
            )
        try:
            while job.inbox or not (job.done or self._stopped):
                if job.inbox:
                    yield job.inbox.popleft()
                else:
                    job.check()  # the engine may have started over and dropped it
                    llm._resume(
                        job
                    )  # it is paused before the first step, and when another loop over it was left
                    llm._step()
            self._ended = True
            job.check()
        finally:
            if self._ended:
                llm._drop([job])
            else:
                llm._pause(job)
            llm.learned.keep()

    @property
    def completion(self) -> Completion:
        """The output so far, whole once the loop has ended."""
        return self._job.completion()


def separate(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of n completions, with a seed of its own where one was given."""
    if params.seed is None:
        return [params] * params.n
    return [replace(params, seed=derive_seed(params.seed, i)) for i in range(params.n)]


def derive_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of n: the first is `seed` itself."""
    return seed if index == 0 else rng.mix(seed + rng.GOLDEN * index) >> 1


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as many. A list of ints or of messages is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(WHAT_IS_A_PROMPT)
    items = list(prompts)
    if not items:
        raise RequestError(
            "there is no prompt: give a string, token ids or chat messages, or a list of those"
        )
    if all(isinstance(item, (int, dict)) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _is_list(prompt: object) -> bool:
    """Whether this may be a list of tokens, messages or prompts: bytes are sequences of numbers,
    but no prompt."""
    return isinstance(prompt, Sequence) and not isinstance(
        prompt, str | bytes | bytearray | memoryview
    )


def _checked(params: object) -> SamplingParams:
    """Sampling parameters as they were given, or the default ones for None. Raises RequestError for
    anything else."""
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    advice = "make them with SamplingParams(max_tokens=100), say"
    if isinstance(params, dict):
        advice = "make them with SamplingParams(**params)"
    elif isinstance(params, list | tuple):
        advice = "give one for all prompts, or call generate for each prompt"
    raise RequestError(f"params={shorten(params)} are no SamplingParams: {advice}")
