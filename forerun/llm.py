"""LLM: a model and its engine behind `generate`, `chat` and `stream`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import torch

from forerun import rng
from forerun.config import Config, Options
from forerun.draft.compose import InTurn
from forerun.draft.corpus import Index
from forerun.draft.kinds import automatic
from forerun.draft.proposer import Proposer, Reference, view_of
from forerun.draft.registry import make_proposers, with_references
from forerun.draft_loading import Loader, open_index, share_memory
from forerun.draft_spec import draft_name, is_name, read_draft
from forerun.engine import multi_step
from forerun.engine.cost_store import open_cost_store
from forerun.engine.depth import DepthPolicy
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.stats import RequestStats
from forerun.errors import ConfigError, LoadError, RequestError, StateError, shorten
from forerun.kernels import native
from forerun.load import load_tokenizer, make_runner, pick_device, within_machine
from forerun.measure.energy import JoulesClock
from forerun.models.chat_template import recommended
from forerun.models.config import note
from forerun.models.decoder import Decoder
from forerun.models.hub import find_model
from forerun.models.tokenizer import Message, Tokenizer
from forerun.runtime.native import NativeDecoder
from forerun.sampling.params import DEFAULT, SamplingParams
from forerun.types import Event, PromptLogprobs, TokenLogprobs

PROMPT_KINDS = "a prompt is a string, a list of token ids or a list of chat messages"
CHARACTERS = 16  # upper bound of the mean number of characters per token
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished output.

    Attributes:
        text: the output, without the stop string or end-of-text token; "" without a tokenizer.
        token_ids: the output's tokens, including the one that ended it.
        finish_reason: "stop" (a stop string or token), "length" (max_tokens or the context) or
            "abort".
        stats: counters: steps, drafted, accepted, accepted_length, by_source, seconds.
        sources: for each token the proposer whose draft was accepted, or "" for the target's own.
        logprobs: one entry per token if the parameters asked for them.
        seed: the seed of the request; the same seed gives the same tokens.
        prompt_token_ids: the prompt as the model read it.
        prompt_logprobs: one entry per prompt token if the parameters asked for them; None for the
            first.
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


class _Run:
    """A request in progress and the events that it has produced."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.inbox: deque[Event] = deque()
        self.events: list[Event] = []
        self.done = False

    def receive(self, event: Event) -> None:
        """Take the request's next event."""
        self.inbox.append(event)
        self.events.append(event)
        self.done = event.finish_reason is not None

    def check(self) -> None:
        """Raise the error that ended the request, if there is one."""
        if self.request.error:
            raise self.request.error

    def completion(self) -> Completion:
        """Return the output so far."""
        request, params = self.request, self.request.params
        logprobs = None
        if params.logprobs is not None:
            logprobs = [entry for event in self.events for entry in event.logprobs or ()]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = list(request.prompt_logprobs)
        return Completion(
            text="".join(event.text for event in self.events),
            token_ids=list(request.output),
            finish_reason=request.finish_reason or "abort",
            stats=request.stats,
            sources=[source for event in self.events for source in event.sources],
            logprobs=logprobs,
            seed=request.seed,
            prompt_token_ids=request.tokens[: request.prompt_length],
            prompt_logprobs=prompt_logprobs,
        )


class LLM:
    """A model that generates with speculation. `LLM()` is the default model, SmolLM2-135M-Instruct.

    Not thread-safe: one thread at a time. Use it as a context manager, or call `close`, to free the
    model's memory at a definite moment.

    Examples:
        ```python
        with LLM("path/or/hub-id", draft="model:path/of/a/smaller/one") as llm:
            params = SamplingParams(temperature=0.8, seed=1)
            print(llm.generate("def fib(n):", params)[0].text)
            print(llm.chat([{"role": "user", "content": "Hello"}])[0].text)
            for event in llm.stream("def fib(n):"):
                print(event.text, end="")
        ```

    Args:
        model: a GGUF file, a directory, or a name (see `Config`); None is the default model.
        draft: a draft as in `Config`, or a `Proposer` of your own.
        options: other fields of `Config`.

    Attributes:
        config: the options.
        draft: the name of the proposer that requests use by default.
        recommended: sampling parameters that the model's authors set; they hold where a request
            gives none.

    Raises:
        ConfigError: options that do not exist or contradict each other.
        LoadError: the model cannot be read.
        CapacityError: it does not fit into memory.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        draft: str | Sequence[str] | Proposer = "auto",
        **options: Unpack[Options],
    ) -> None:
        own = draft if isinstance(draft, Proposer) else None
        name = None if model is None else str(model)
        config = Config.of(model=name, draft="off" if own else draft, **options)
        config = self.config = within_machine(config)
        clock = JoulesClock() if config.objective == "energy" else None
        if config.threads:
            torch.set_num_threads(config.threads)
        device = pick_device(config.device)
        draft_device = device if config.draft_device == "auto" else pick_device(config.draft_device)
        directory = find_model(config.model)
        self.tokenizer = load_tokenizer(directory, check=True)
        self.recommended = recommended(directory)
        target = make_runner(config, directory, device)
        native.reserve(config.draft_threads)
        view = view_of(target.decoder)
        instructions = native.instructions() if view.form else ""
        spec = automatic(config.draft, directory, instructions)
        load = Loader(config, directory, self.tokenizer, target, draft_device)

        def make(spec: str) -> dict[str, Proposer]:
            drafts = (config.width, config.draft_threshold)
            return make_proposers(read_draft(spec), load, view, target, *drafts)

        try:
            proposers = make(spec)
        except LoadError as error:
            if config.draft != "auto" or spec == "suffix":
                raise
            note(f"{error}; --draft auto goes on without it")
            spec = "suffix"
            proposers = make(spec)
        if config.kv_tokens is None:
            share_memory(config, target, proposers.values())
        policy = DepthPolicy(config.objective, config.slo_ms / 1e3)
        self._engine: Engine | None = Engine(
            target,
            proposers,
            rule=config.rule,
            chunk=config.chunk,
            tokenizer=self.tokenizer,
            policy=policy,
            clock=clock,
            multi_step=multi_step.SECONDS,
        )
        self.draft = draft_name(spec)
        self._runs: dict[int, _Run] = {}
        if own:
            self.draft = own.name or "custom"
            self.add_drafter(self.draft, own)
        self.cost_store = open_cost_store(
            policy, directory, target.decoder.weight_bytes, self._cost_facts(device)
        )

    def _cost_facts(self, device: torch.device) -> list[Any]:
        """Return the options that measured costs depend on, besides the model and the machine."""
        config = self.config
        facts = [
            self.decoder.precision,
            config.threads,
            native.threads(),
            native.reserved(),
            str(device),
            config.draft,
            config.width,
        ]
        if config.objective == "energy":
            facts.append("energy")  # costs are joules then
        if config.draft_device != "auto":
            facts.append(config.draft_device)
        if config.tensor_parallel > 1:
            facts.append(config.tensor_parallel)
        return facts

    def __repr__(self) -> str:
        if self._engine is None:
            return f"LLM({self.config.model!r}, closed)"
        return (
            f"LLM({self.config.model!r}, draft={self.draft!r}, rule={self.config.rule!r},"
            f" precision={self.decoder.precision!r}, context={self.decoder.context})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop all requests and free the model; further calls raise StateError."""
        if self._engine is not None:
            self._engine = None
            self._runs.clear()
            self.cost_store.save()

    @property
    def engine(self) -> Engine:
        """The engine. Raises StateError if this LLM was closed."""
        if self._engine is None:
            raise StateError("this LLM was closed: make another one")
        return self._engine

    @property
    def decoder(self) -> Decoder | NativeDecoder:
        """The target model."""
        return self.engine.target.decoder

    @property
    def room(self) -> int:
        """The most tokens of a prompt and its output together."""
        pages = self.engine.target.cache.pages
        return min(self.decoder.context, pages.count * pages.size)

    @property
    def sampling(self) -> dict[str, Any]:
        """The default sampling parameters: the authors' values, otherwise forerun's."""
        return {**DEFAULT, **self.recommended}

    def index(self, directory: Path) -> Index:
        """Open an index made by `forerun index` for this model. Raises LoadError, RequestError."""
        return open_index(directory, self.tokenizer, self.decoder.config.vocab)

    def add_drafter(self, name: str, proposer: Proposer) -> None:
        """Register a proposer of your own: requests choose it with `draft=name`.

        It composes with others like any draft: `draft="suffix|mine"`.

        Raises:
            ConfigError: the name is taken or invalid, or `proposer` is not a Proposer.
        """
        if not isinstance(proposer, Proposer):
            raise ConfigError(
                f"{shorten(proposer)} is no drafter: derive its class from forerun.Proposer"
            )
        if not is_name(name):
            raise ConfigError(
                f"a drafter cannot be called {shorten(name)}: take letters, digits, - and _"
            )
        proposers = self.engine.proposers
        if name in proposers:
            raise ConfigError(f"there is a drafter {name!r} already: choose another name")
        proposer.name = name
        proposers[name] = proposer
        proposers[with_references(name)] = InTurn((proposers["reference"], proposer))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
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
            sampling_params: how to choose tokens and when to stop. Missing values are those
                recommended by the model's authors, otherwise forerun's defaults (temperature 0.8,
                top_k 40, top_p 0.95, min_p 0.05).
            draft: "off", or a proposer of this engine ("ngram", "suffix", "model"), for this call;
                None is the engine's own.
            depth: "auto" or a number, for this call; None is the engine's own.
            prediction: what the output will probably be, such as the file before an edit; it is
                drafted from where the output agrees with it.
            documents: texts that the output may quote; drafted from where it does.

        Returns:
            `sampling_params.n` completions per prompt, in the order of the prompts.

        Raises:
            RequestError, CapacityError: a prompt or parameters that cannot be served; nothing is
                generated then.
        """
        params = _checked(sampling_params).resolved(self.recommended)
        runs: list[_Run] = []
        try:
            references = self.references(prediction, documents)
            for prompt in _as_list(prompts):
                runs += self._add(self.tokens(prompt), params, draft, depth, references)
            while any(not run.done for run in runs):
                self._step()
        finally:
            self._drop(runs)
            self.cost_store.save()
        for run in runs:
            run.check()
        return [run.completion() for run in runs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        draft: str | None = None,
        depth: int | str | None = None,
        prediction: str | None = None,
        documents: Sequence[str] = (),
    ) -> list[Completion]:
        """Answer one conversation or many; other arguments, results and errors as for `generate`.

        Args:
            messages: dicts with "role" and "content", or a list of such lists.
        """
        items = list(messages) if _is_list(messages) else []
        if not items or not all(isinstance(item, Mapping) or _is_list(item) for item in items):
            raise RequestError(
                'messages are a list such as [{"role": "user", "content": "Hello"}], or a list of'
                f" those, not {shorten(messages)}"
            )
        return self.generate(
            messages,
            sampling_params,
            draft=draft,
            depth=depth,
            prediction=prediction,
            documents=documents,
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        draft: str | None = None,
        depth: int | str | None = None,
        prediction: str | None = None,
        documents: Sequence[str] = (),
    ) -> Stream:
        """Complete one prompt and return its events as they come. Arguments as for `generate`; n
        must be 1.

        The request runs while there is a loop over the stream. Leaving the loop pauses it: another
        loop continues with the next event, and a stream that is garbage-collected is dropped.
        """
        params = _checked(sampling_params).resolved(self.recommended)
        if params.n != 1:
            raise RequestError(
                f"stream gives one completion, not n={params.n}: use generate, or several streams"
            )
        references = self.references(prediction, documents)
        (run,) = self._add(self.tokens(prompt), params, draft, depth, references)
        self._pause(run)  # until a loop begins
        return Stream(self, run)

    def forget(self) -> None:
        """Clear the proposers' memory of finished requests.

        Use it for privacy between users and for fair measurements.
        """
        for proposer in self.engine.proposers.values():
            proposer.forget()

    def references(self, prediction: str | None, documents: Sequence[str]) -> list[Reference]:
        """Index a prediction and documents once, for any number of prompts.

        Raises:
            RequestError: they are not strings, or too long.
        """
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
        references = [self._reference(name, text) for name, text in texts]
        total = sum(len(reference.tokens) for reference in references)
        if total > limit:
            raise RequestError(
                f"prediction and documents have {total} tokens: give at most {limit} in all"
            )
        for reference in references:
            reference.build()  # built here so that engine steps do not wait for it
        return references

    def _reference(self, name: str, text: str) -> Reference:
        """Tokenize a text as a reference, up to the first token beyond the model's vocabulary.

        Some tokenizers have more tokens than the model.
        """
        vocab, encoded = self.decoder.config.vocab, self._text().encode(text, special=False)
        tokens = tuple(takewhile(lambda token: token < vocab, encoded))
        return Reference(name, tokens, start=0, is_prediction=name == "prediction")

    def _add(
        self,
        tokens: list[int],
        params: SamplingParams,
        draft: str | None,
        depth: int | str | None,
        references: Sequence[Reference],
    ) -> list[_Run]:
        """Queue a prompt's n requests."""
        if not isinstance(draft, str | None):
            raise RequestError(
                f"draft={shorten(draft)} is no draft: give the name of one, such as 'suffix' or"
                " 'off'; register a drafter of your own with llm.add_drafter"
            )
        draft = self.draft if draft in (None, "auto") else draft
        depth = self.config.depth if depth is None else depth
        references = [reference.behind(len(tokens)) for reference in references]
        if references and draft != "off":
            draft = with_references(draft)
        runs = []
        for each in separate(params):
            request = self.engine.add(tokens, each, draft=draft, depth=depth, references=references)
            run = self._runs[request.id] = _Run(request)
            runs.append(run)
        return runs

    def _step(self) -> None:
        """Run one step of the engine and hand its events to their requests.

        An exception, including Ctrl-C, may leave the step incomplete: the engine is reset, and
        every running request gets an error.
        """
        try:
            for event in self.engine.step():
                if event.request_id in self._runs:
                    self._runs[event.request_id].receive(event)
        except BaseException as error:
            message = (
                f"a step of the engine was cut short by {type(error).__name__}, and this request"
                " with it: begin it anew"
            )
            for run in self._runs.values():
                run.request.error = run.request.error or StateError(message)
            self._runs.clear()
            with suppress(StateError):  # a part of the model may be gone
                self.engine.reset()
            raise

    def _pause(self, run: _Run) -> None:
        """Remove an unfinished request from the engine."""
        self._runs.pop(run.request.id, None)
        self.engine.pause(run.request)

    def _resume(self, run: _Run) -> None:
        """Resume a paused request."""
        if run.request.id not in self._runs:
            self._runs[run.request.id] = run
            self.engine.resume(run.request)

    def _drop(self, runs: Sequence[_Run]) -> None:
        """End requests; paused ones are not in the engine."""
        for run in runs:
            self._runs.pop(run.request.id, None)
            if not run.request.paused:
                self.engine.abort(run.request)

    def tokens(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids as the model reads it. Raises RequestError."""
        if isinstance(prompt, str):
            return self._text().encode(prompt)
        if not _is_list(prompt):
            raise RequestError(PROMPT_KINDS)
        if prompt and all(isinstance(item, dict) for item in prompt):
            return self._text().chat(prompt)  # type: ignore[arg-type]
        if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return list(prompt)  # type: ignore[arg-type]
        raise RequestError(PROMPT_KINDS)

    def _text(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "this model directory has no tokenizer: give prompts as lists of token ids"
            )
        return self.tokenizer


class Stream:
    """The events of one request; each is yielded once.

    Leaving a loop early pauses the request, and another loop continues it: the tokens are the same
    as without the pause.
    """

    def __init__(self, llm: LLM, run: _Run) -> None:
        self._llm, self._run = llm, run
        self._stopped, self._ended = False, False

    def stop(self) -> None:
        """End the request: the loop ends with the step in progress. A signal handler may call this
        at any moment."""
        self._stopped = True

    def __iter__(self) -> Iterator[Event]:
        """Yield the events that were not yielded before.

        Raises:
            RequestError: all events were yielded before.
            ForerunError: the error that ended the request.
        """
        llm, run = self._llm, self._run
        run.check()
        if self._ended:
            raise RequestError(
                "this stream has ended, and gives its events once: its output is"
                " stream.completion; call llm.stream for another one"
            )
        try:
            while run.inbox or not (run.done or self._stopped):
                if run.inbox:
                    yield run.inbox.popleft()
                else:
                    run.check()  # the engine may have started over and dropped it
                    llm._resume(run)  # before the first step, and when an earlier loop was left
                    llm._step()
            self._ended = True
            run.check()
        finally:
            if self._ended:
                llm._drop([run])
            else:
                llm._pause(run)
            llm.cost_store.save()

    @property
    def completion(self) -> Completion:
        """The output so far; complete once the loop has ended."""
        return self._run.completion()


def separate(params: SamplingParams) -> list[SamplingParams]:
    """Return the parameters of each of n completions, each with its own seed if one was given."""
    if params.seed is None:
        return [params] * params.n
    return [replace(params, seed=derive_seed(params.seed, i)) for i in range(params.n)]


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of completion `index` of n: the first one's is `seed` itself."""
    return seed if index == 0 else rng.mix(seed + rng.GOLDEN * index) >> 1


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or many as a list; a list of ints or of messages is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(PROMPT_KINDS)
    items = list(prompts)
    if not items:
        raise RequestError(
            "there is no prompt: give a string, token ids or chat messages, or a list of those"
        )
    if all(isinstance(item, (int, dict)) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _is_list(value: object) -> bool:
    """Return True for sequences of tokens, messages or prompts, but not for strings and bytes."""
    return isinstance(value, Sequence) and not isinstance(
        value, str | bytes | bytearray | memoryview
    )


def _checked(params: object) -> SamplingParams:
    """Return the given sampling parameters, or the default ones for None. Raises RequestError."""
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    advice = "make them with SamplingParams(max_tokens=100), say"
    if isinstance(params, dict):
        advice = "make them with SamplingParams(**params)"
    elif isinstance(params, list | tuple):
        advice = "give one for all prompts, or call generate for each prompt"
    raise RequestError(f"sampling_params={shorten(params)} are no SamplingParams: {advice}")
