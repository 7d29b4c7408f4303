"""Data written by the target itself, for runs without data (Magpie, arXiv 2406.08464).

A chat model gets the beginning of a user's turn in its own template, writes the question, and then
answers it. A base model begins with nothing or with a first word. Texts that loop or nearly repeat
an earlier one are left out. Texts follow from the seed and are lines of JSON, which `--data` reads.
The target's outputs are captured while it writes, for texts that have the same tokens when they are
read from such a line.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.cli.progress import Tell, nothing
from forerun.engine.request import Request
from forerun.errors import ConfigError, ForerunError, RequestError
from forerun.models.tokenizer import BROKEN
from forerun.sampling.params import SamplingParams
from forerun.train.capture import CaptureStore
from forerun.train.data import (
    Corpus,
    DataSource,
    Document,
    FilterLimits,
    TextFilter,
    common_prefix,
    read_line,
)
from forerun.train.options import DEFAULT_TEXTS, MIN_TOKENS, Training
from forerun.train.stream import seed_of
from forerun.train.target import BATCH_SIZE, Target
from forerun.utils import json_line

SOURCE = "written by the target itself"
GROUP = 2 * BATCH_SIZE  # texts begun together, so that short ones make room for others
MIN_TEXTS = 16  # texts that a run needs, however long they take
TIME_SHARE = 0.2  # share of the time limit
# Writing ends when this many groups together keep less than a quarter of one.
STALE_GROUPS = 4
# Questions and beginnings should differ; the rest uses the run's temperature and no filter. Top-p
# would sort the vocabulary for every token, which takes longer than a small model's forward pass.
TEMPERATURE, MIN_P = 1.0, 0.02
FIRST_SEED = 1 << 40  # seed numbers below are those of continuations

# System prompts that spread topics; "" is the template's own.
TOPICS = (
    "", "You help programmers: they ask for functions in Python.",
    "You solve word problems in arithmetic, step by step.",
    "You explain how things work to curious children.", "You are a cook who gives recipes.",
    "You write letters and emails for people at work.",
    "You summarise texts that the user gives.",
    "You tell short stories about whatever the user names.",
    "You answer questions about history.", "You turn notes into JSON, CSV or tables.",
    "", "You find mistakes in code that the user gives.",
    "You answer questions about biology and medicine.", "You help travellers to plan a journey.",
    "You rewrite sentences so that they are clearer.", "You answer questions about geography.",
    "You explain terms of physics and chemistry.", "You write poems and songs.",
    "You answer questions about law and money in plain words.",
    "You write SQL queries for the tables that the user describes.",
    "", "You give advice about friends, family and work.",
    "You solve equations and explain each step.",
    "You play a character, and the user talks to you.",
    "You are an assistant for the shell and for Linux.",
    "You correct grammar and spelling in the user's text.", "You teach languages to beginners.",
    "You write texts for shops: descriptions, offers, posts.",
    "You answer questions about films, books and music.",
    "You plan training, meals and healthy habits.",
    "", "You write web pages in HTML, CSS and JavaScript.",
    "You give instructions for repairs and for building things.",
    "You argue for and against an opinion.", "You draw facts out of a text that the user gives.",
    "You help pupils with their homework.", "You chat about the day.",
)  # fmt: skip
# First words of questions, which a small model heeds more than a system prompt.
QUESTION_OPENINGS = (
    "What is", "Write a Python function that", "Summarize the following text:", "How many",
    "Write an email to", "Explain", "Rewrite this sentence", "A shop sells",
    "Tell me a story about", "Translate", "Why do", "List", "Fix the bug in this code:", "Who was",
    "Read the text and answer the question.", "Compare", "Give me a recipe for", "Solve",
    "Correct the grammar:", "How do I", "Convert", "Write a short poem", "Extract", "When did",
    "Here is a table:", "Hello", "What are the steps", "Calculate", "Write a SQL query",
    "Is it true that", "Describe", "Tom has", "Make this text shorter:", "What should I do", "def",
    "Where is", "Please help me", "Define", "Answer in one sentence:", "Create a",
)  # fmt: skip
# First words of a base model's texts; "" is no word.
TEXT_OPENINGS = (
    "", "The", "import", "In", "", "How to", "#", "Once", "", "def", "A", "1.", "", "Dear", "{",
    "Question:", "", "When", "<", "We", "", "class", "It", "**", "", "You", "//", "For", "", "-",
    "What", "Abstract", "", "Chapter", "I", "function", "", "This", "On", "Let",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WrittenTexts:
    """Texts that the target wrote.

    Attributes:
        lines: lines of JSON.
        repeated: number of texts that nearly repeated others.
        left_out: number of texts that were left out for another reason.
        seconds: duration.
    """

    lines: list[str]
    repeated: int
    left_out: int
    seconds: float

    def read(self) -> tuple[list[Document], list[DataSource]]:
        """Return documents and counts as `read_data` does."""
        documents = [
            read_line(line, f"{SOURCE}, line {number}") for number, line in enumerate(self.lines, 1)
        ]
        return documents, [DataSource(SOURCE, len(documents), self.repeated, self.left_out)]


class ChatWriter:
    """Questions in the user's turn of the target's chat template, and answers to them.

    Every other question is begun behind a system prompt, which the answer does not see; the others
    begin with given words.

    Attributes:
        limit: maximum number of tokens of a question.
        stop: sampling parameters that end it, beside the target's own end of text.
        must_end: True if a beginning has to be complete; a base model's must not be.
    """

    must_end = True

    def __init__(self, target: Target) -> None:
        """Raises ConfigError if the template leaves no room."""
        self.tokenizer = target.tokenizer
        plain, after = self._around("", "")
        self.stop = self._stop(after)
        topics = [self._around(topic, "")[0] or text_start(target) for topic in TOPICS]
        begun = [self._around("", words)[0] for words in QUESTION_OPENINGS]
        self._openings = (topics, begun)
        self._begun = {tuple(ids): self.tokenizer.decode(ids[len(plain) :]) for ids in begun}
        room = target.tokens - len(self.tokenizer.chat([_message("user", "x")]))
        if room < 2 * MIN_TOKENS:
            raise ConfigError(
                f"tokens={target.tokens} leaves no room for a question and an answer in the"
                f" target's chat template: give {target.tokens - room + 2 * MIN_TOKENS} or more"
            )
        self.limit = room // 2

    def _around(self, system: str, words: str) -> tuple[list[int], list[int]]:
        """Return the token ids before and after a user message that begins with `words`: the common
        prefix and suffix of two different messages."""
        first = [_message("system", system)] if system else []
        try:
            one, other = (
                self.tokenizer.chat([*first, _message("user", text)])
                for text in (f"{words}7", f"{words} x".strip())
            )
        except RequestError:
            if not system:
                raise
            return self._around("", words)  # the template refuses system prompts
        return common_prefix(one, other), common_prefix(one[::-1], other[::-1])[::-1]

    def _stop(self, after: Sequence[int]) -> dict[str, Any]:
        """Parameters that stop at the end of a turn: a special token, or a line of text."""
        for at, token in enumerate(after):
            if token in self.tokenizer.special:
                return {"stop_token_ids": (token,)}
            if self.tokenizer.spell(token).strip():
                return {"stop": self.tokenizer.decode(after[at:]).strip().splitlines()[0]}
        return {}

    def opening(self, number: int) -> list[int]:
        """Return the prompt of question `number`."""
        openings = self._openings[number % 2]
        return openings[number // 2 % len(openings)]

    def text(self, beginning: Request) -> str:
        """Return the question."""
        begun = self._begun.get(tuple(beginning.tokens[: beginning.prompt_length]), "")
        return (begun + _text(beginning)).strip()

    def prompt(self, beginning: Request) -> list[int]:
        """Return the prompt of the answer."""
        return self.tokenizer.chat([_message("user", self.text(beginning))])

    def line(self, beginning: Request, rest: Request) -> tuple[str, dict[str, Any]]:
        """Return (the text to filter, the object to keep)."""
        answer = _text(rest)
        messages = [_message("user", self.text(beginning)), _message("assistant", answer)]
        return answer, {"messages": messages}


class BaseWriter:
    """Texts of a base model from nothing and from first words, with the interface of
    `ChatWriter`. They are continued at the run's temperature."""

    must_end = False
    stop: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, target: Target, settings: Training) -> None:
        self.tokenizer, self.limit = target.tokenizer, settings.prompt_tokens
        start = text_start(target)
        encoded = [[*start, *self.tokenizer.encode(w, special=False)] for w in TEXT_OPENINGS]
        self._openings = [ids[: settings.prompt_tokens] for ids in encoded if ids]

    def opening(self, number: int) -> list[int]:
        return self._openings[number % len(self._openings)]

    def text(self, beginning: Request) -> str:
        return self.tokenizer.decode(beginning.tokens).rstrip(BROKEN)

    def prompt(self, beginning: Request) -> list[int]:
        return beginning.tokens

    def line(self, beginning: Request, rest: Request) -> tuple[str, dict[str, Any]]:
        text = self.text(rest)
        return text, {"text": text}


class _Session:
    """Writing in progress: the kept lines, and why other texts were left out."""

    def __init__(
        self, target: Target, settings: Training, limits: FilterLimits, store: CaptureStore | None
    ) -> None:
        self.target, self.settings, self.store = target, settings, store
        self.filter = TextFilter(limits)
        chats = target.tokenizer.has_chat_template
        self.writer: ChatWriter | BaseWriter = (
            ChatWriter(target) if chats else BaseWriter(target, settings)
        )
        self.lines: list[str] = []
        self.faults = Counter[str]()
        self.num_begun = 0

    def write_group(self) -> None:
        """Begin `GROUP` texts and complete those that pass the filter."""
        writer, numbers = self.writer, range(self.num_begun, self.num_begun + GROUP)
        openings = [writer.opening(number) for number in numbers]
        lengths = [len(opening) for opening in openings]
        params = [self._first_params(n, length) for n, length in zip(numbers, lengths, strict=True)]
        self.num_begun += GROUP
        accepted: list[tuple[Request, list[int], SamplingParams]] = []
        for number, beginning in zip(numbers, self.target.generate(openings, params), strict=True):
            prompt, fault = self._check(beginning)
            if fault:
                self.faults[fault] += 1
            else:
                accepted.append((beginning, prompt, self._second_params(number, len(prompt))))
        rests = self.target.generate(
            [prompt for _, prompt, _ in accepted],
            [params for *_, params in accepted],
            record_vocab=self.target.vocab if self.store is not None else 0,
        )
        for (beginning, *_), rest in zip(accepted, rests, strict=True):
            text, line = writer.line(beginning, rest)
            if fault := self.filter.fault(text):
                self.faults[fault] += 1
            else:
                self.lines.append(json_line(line))
                self._capture(rest)

    def _check(self, beginning: Request) -> tuple[list[int], str]:
        """Return the prompt of the rest and why the text is left out ("" if it is not)."""
        ended = beginning.finish_reason == "stop"
        if ended != self.writer.must_end:
            return [], "cut off"
        if fault := self.filter.fault_of_beginning(self.writer.text(beginning)):
            return [], fault
        prompt = self.writer.prompt(beginning)
        # a text may be read in more tokens than it was written in
        return prompt, "long" if len(prompt) + MIN_TOKENS > self.target.tokens else ""

    def _capture(self, request: Request) -> None:
        """Store the recording of the latest line, if reading the line gives the same tokens."""
        if self.store is None:
            return
        document, settings = read_line(self.lines[-1], SOURCE), self.settings
        tokenizer = self.target.tokenizer
        corpus = Corpus([document], tokenizer, settings.tokens, settings.prompt_tokens)
        for example in corpus.examples:
            if tuple(request.tokens[: len(example.tokens)]) == example.tokens:
                self.store.add(self.target.captured(request, example, self.target.vocab))

    def _first_params(self, number: int, prompt_length: int) -> SamplingParams:
        room = self.target.context - prompt_length
        return SamplingParams(
            temperature=TEMPERATURE,
            min_p=MIN_P,
            max_tokens=max(min(self.writer.limit, room), 1),
            seed=seed_of(self.settings.seed, FIRST_SEED + 2 * number),
            **self.writer.stop,
        )

    def _second_params(self, number: int, prompt_length: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.settings.temperature,
            max_tokens=self.target.tokens - prompt_length,
            seed=seed_of(self.settings.seed, FIRST_SEED + 2 * number + 1),
        )


def write(
    target: Target,
    settings: Training,
    tell: Tell = nothing,
    limits: FilterLimits | None = None,
    clock: Callable[[], float] = time.monotonic,
    store: CaptureStore | None = None,
) -> WrittenTexts:
    """Let the target write `settings.write` texts, fewer if they would exceed `TIME_SHARE` of the
    time limit or if nothing new comes. The target's outputs are captured in `store`.

    Raises:
        ForerunError: too few texts pass the filter.
        ConfigError: `settings.tokens` leaves no room for a question and its answer.
    """
    session, began = _Session(target, settings, limits or FilterLimits(), store), clock()
    count, until = settings.write or DEFAULT_TEXTS, TIME_SHARE * 60 * settings.max_minutes
    lines, enough = session.lines, min(count, MIN_TEXTS)
    kept = deque([GROUP], STALE_GROUPS)  # texts kept of the latest groups
    while len(lines) < count and not (len(kept) == STALE_GROUPS and 4 * sum(kept) < GROUP):
        tell(f"the target writes its own data, {len(lines)} of {count} texts", len(lines), count)
        before = len(lines)
        session.write_group()
        kept.append(len(lines) - before)
        groups, seconds = session.num_begun // GROUP, clock() - began
        if until and len(lines) >= enough and seconds * (groups + 1) / groups > until:
            break
    del lines[count:]
    faults, seconds = session.faults, clock() - began
    why = ", ".join(f"{number} {fault}" for fault, number in faults.most_common()) or "none"
    if len(lines) < max(enough, 2):
        raise ForerunError(
            f"the target writes too little to learn from: {len(lines)} of {session.num_begun} texts"
            f" are usable (left out: {why}); give --data"
        )
    tell.note(f"{len(lines)} texts {SOURCE} in {seconds:.0f} s; left out: {why}")
    return WrittenTexts(lines, faults["repeated"], faults.total() - faults["repeated"], seconds)


def check_save_data(name: str, settings: Training) -> None:
    """Raise ConfigError now for a file that could not be written later, or not be read again."""
    path = Path(name).expanduser()
    if not settings.write:
        raise ConfigError(
            "--save-data keeps what the target writes, and with --data it writes nothing: leave one"
            " out, or give --write a number of texts"
        )
    if path.suffix.lower() != ".jsonl":
        raise ConfigError(
            f"{name} would not be read as lines of JSON: give --save-data a name that ends in"
            " .jsonl"
        )
    parent = path.absolute().parent
    if path.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{name} cannot be written: give --save-data a file in a directory that can be written"
            " to"
        )


def text_start(target: Target) -> list[int]:
    """Return the token ids before any text, or one that ends a text if there are none."""
    return target.tokenizer.encode("") or list(target.llm.decoder.config.end_ids[:1])


def _text(request: Request) -> str:
    """The emitted text, without half of a character at a limit."""
    assert request.text is not None
    text = request.text.text
    return text if request.finish_reason == "stop" else text.rstrip(BROKEN)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
