"""Material for a run without data: what the target writes when nobody asks it anything (Magpie,
arXiv 2406.08464).

A chat model gets the beginning of a user's turn in its own template and writes the question, then
answers it. A base model begins from nothing or from a first word. What loops or was nearly said
before is left out. Texts follow from the seed and are lines of JSON, which `--data` reads. What the
target thinks of them is captured while it writes, for those whose tokens are the same when they are
read from such a line."""

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
from forerun.train.capture import AT_ONCE, Target
from forerun.train.captured import Kept
from forerun.train.data import Corpus, Document, Source, in_common, read_line
from forerun.train.recorder import Heard
from forerun.train.settings import FEWEST_TOKENS, WRITTEN, Training
from forerun.train.sieve import USUAL, Limits, Sieve
from forerun.train.stream import seed_of
from forerun.train.topics import FIRST_OF_QUESTIONS, FIRST_WORDS, TOPICS
from forerun.utils import json_line

AUTHOR = "written by the target itself"
GROUP = (
    2 * AT_ONCE
)  # texts begun together: while long ones end, others take the place of short ones
FEWEST = 16  # texts that are worth a run, however long they take
SHARE = 0.2  # of the time of a run
STALE = 4  # groups that together keep less than a quarter of one: nothing new is to be expected
# of questions and beginnings, which are to differ; the rest has the run's temperature, and all of
# its law. Top-p would sort the vocabulary for every token, which takes longer than a pass of a
# small model
TEMPERATURE, MIN_P = 1.0, 0.02
SEEDS = 1 << 40  # seeds from here on are not those of continuations


@dataclass(frozen=True, slots=True)
class Written:
    """What the target wrote: `lines` of JSON, how many were said before, how many were left out for
    another reason, and the seconds that it took."""

    lines: list[str]
    repeated: int
    left_out: int
    seconds: float

    def read(self) -> tuple[list[Document], list[Source]]:
        """As `read_data` gives what it reads from files."""
        documents = [
            read_line(line, f"{AUTHOR}, line {number}") for number, line in enumerate(self.lines, 1)
        ]
        return documents, [Source(AUTHOR, len(documents), self.repeated, self.left_out)]


class ChatAuthor:
    """Questions in the user's place of the target's template, and answers to them.

    Every other one is begun behind a system prompt, which the answer does not know of; the others
    by first words.

    Attributes:
        limit: most tokens of a beginning.
        ends: what ends it, as sampling parameters, beside the target's own end of text.
        whole: whether it has to come to its end, or must not.
    """

    whole = True

    def __init__(self, target: Target) -> None:
        """Raises ConfigError where the template leaves no room."""
        self.tokenizer = target.tokenizer
        plain, behind = self._around("", "")
        self.ends = self._ends(behind)
        topics = [self._around(topic, "")[0] or beginning_of_text(target) for topic in TOPICS]
        asked = [self._around("", words)[0] for words in FIRST_OF_QUESTIONS]
        self._openings = (topics, asked)
        self._begun = {tuple(ids): self.tokenizer.decode(ids[len(plain) :]) for ids in asked}
        room = target.tokens - len(self.tokenizer.chat([_said("user", "x")]))
        if room < 2 * FEWEST_TOKENS:
            raise ConfigError(
                f"tokens={target.tokens} leaves no room for a question and an answer in the target's chat template:"
                f" give {target.tokens - room + 2 * FEWEST_TOKENS} or more"
            )
        self.limit = room // 2

    def _around(self, system: str, words: str) -> tuple[list[int], list[int]]:
        """The tokens before what a user says behind these words, and those after it: what two
        sayings share."""
        first, sayings = (
            [_said("system", system)] if system else [],
            (f"{words}7", f"{words} x".strip()),
        )
        try:
            one, other = (
                self.tokenizer.chat([*first, _said("user", saying)]) for saying in sayings
            )
        except RequestError:
            if not system:
                raise
            return self._around("", words)  # a template without system prompts
        return in_common(one, other), in_common(one[::-1], other[::-1])[::-1]

    def _ends(self, behind: Sequence[int]) -> dict[str, Any]:
        """Parameters that end a turn where `behind` begins: at a special token, or at a line of
        text."""
        for at, token in enumerate(behind):
            if token in self.tokenizer.special:
                return {"stop_token_ids": (token,)}
            if self.tokenizer.spell(token).strip():
                return {"stop": self.tokenizer.decode(behind[at:]).strip().splitlines()[0]}
        return {}

    def opening(self, number: int) -> list[int]:
        """What beginning `number` is written behind."""
        openings = self._openings[number % 2]
        return openings[number // 2 % len(openings)]

    def text(self, beginning: Request) -> str:
        """What of a beginning is judged."""
        begun = self._begun.get(tuple(beginning.tokens[: beginning.prompt_length]), "")
        return (begun + _text(beginning)).strip()

    def prompt(self, beginning: Request) -> list[int]:
        """What the rest is written behind."""
        return self.tokenizer.chat([_said("user", self.text(beginning))])

    def line(self, beginning: Request, rest: Request) -> tuple[str, dict[str, Any]]:
        """(what of the rest is judged, what is kept)"""
        answer = _text(rest)
        return answer, {
            "messages": [_said("user", self.text(beginning)), _said("assistant", answer)]
        }


class BaseAuthor:
    """The same of texts from nothing and from first words, gone on with at the run's
    temperature."""

    whole = False
    ends: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, target: Target, settings: Training) -> None:
        self.tokenizer = target.tokenizer
        start = beginning_of_text(target)
        encoded = [[*start, *self.tokenizer.encode(word, special=False)] for word in FIRST_WORDS]
        self._openings = [ids[: settings.prompt_tokens] for ids in encoded if ids]
        self.limit = settings.prompt_tokens

    def opening(self, number: int) -> list[int]:
        return self._openings[number % len(self._openings)]

    def text(self, beginning: Request) -> str:
        return self.tokenizer.decode(beginning.tokens).rstrip(BROKEN)

    def prompt(self, beginning: Request) -> list[int]:
        return beginning.tokens

    def line(self, beginning: Request, rest: Request) -> tuple[str, dict[str, Any]]:
        text = self.text(rest)
        return text, {"text": text}


class Writing:
    """Texts of one target, a group at a time: what is kept, and why the others are not."""

    def __init__(
        self, target: Target, settings: Training, limits: Limits, kept: Kept | None = None
    ) -> None:
        """What is captured of the texts goes into `kept`."""
        self.target, self.settings, self.sieve, self.kept = target, settings, Sieve(limits), kept
        chats = target.tokenizer.has_chat_template
        self.author: ChatAuthor | BaseAuthor = (
            ChatAuthor(target) if chats else BaseAuthor(target, settings)
        )
        self.lines: list[str] = []
        self.faults = Counter[str]()
        self.begun = 0

    def group(self) -> None:
        """Begin `GROUP` texts, and go on with those that are worth it."""
        author, numbers = self.author, range(self.begun, self.begun + GROUP)
        openings = [author.opening(number) for number in numbers]
        params = [
            self._to_begin(number, len(opening))
            for number, opening in zip(numbers, openings, strict=True)
        ]
        self.begun += GROUP
        beginnings = self._say(
            openings, params, keep=not author.whole
        )  # an answer stands behind another prompt
        begun = [self.target.heard(beginning) for beginning in beginnings]
        going = []
        for number, beginning, heard in zip(numbers, beginnings, begun, strict=True):
            ended = beginning.finish_reason == "stop"
            fault = (
                "cut off"
                if ended != author.whole
                else self.sieve.fault_of_beginning(author.text(beginning))
            )
            prompt = [] if fault else author.prompt(beginning)
            if not fault and len(prompt) + FEWEST_TOKENS > self.target.tokens:
                fault = "long"  # written in other tokens than it is read in
            if fault:
                self.faults[fault] += 1
            else:
                going.append((beginning, heard, prompt, self._to_go_on(number, len(prompt))))
        rests = self._say(
            [prompt for *_, prompt, _ in going], [params for *_, params in going], keep=True
        )
        for (beginning, heard, *_), rest in zip(going, rests, strict=True):
            text, line = author.line(beginning, rest)
            if fault := self.sieve.fault(text):
                self.faults[fault] += 1
            else:
                self.lines.append(json_line(line))
                self._keep(rest, heard)

    def _keep(self, rest: Request, beginning: Heard | None) -> None:
        """What is captured of the latest line, as it will be read."""
        if self.kept is None:
            return
        documents = [read_line(self.lines[-1], AUTHOR)]
        corpus = Corpus(
            documents, self.target.tokenizer, self.settings.tokens, self.settings.prompt_tokens
        )
        heard = self.target.heard(rest)
        for example in corpus.examples:
            if heard is not None and tuple(rest.tokens[: len(example.tokens)]) == example.tokens:
                whole = heard.behind(beginning) if beginning else None
                self.kept.add(self.target.captured(example, whole or heard, self.target.vocab))

    def _to_begin(self, number: int, before: int) -> SamplingParams:
        most = max(min(self.author.limit, self.target.context - before), 1)
        seed = seed_of(self.settings.seed, SEEDS + 2 * number)
        return SamplingParams(
            temperature=TEMPERATURE, min_p=MIN_P, max_tokens=most, seed=seed, **self.author.ends
        )

    def _to_go_on(self, number: int, before: int) -> SamplingParams:
        seed = seed_of(self.settings.seed, SEEDS + 2 * number + 1)
        return SamplingParams(
            temperature=self.settings.temperature, max_tokens=self.target.tokens - before, seed=seed
        )

    def _say(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], keep: bool
    ) -> list[Request]:
        return self.target.say(
            prompts, params, listen=self.target.vocab if keep and self.kept is not None else 0
        )


def write(
    target: Target,
    settings: Training,
    tell: Tell = nothing,
    limits: Limits = USUAL,
    clock: Callable[[], float] = time.monotonic,
    kept: Kept | None = None,
) -> Written:
    """Let the target write `settings.write` texts, fewer if they would take more than their share
    of the run or if nothing new comes any more. What is captured of them meanwhile goes into
    `kept`.

    Raises:
        ForerunError: too few are worth anything.
        ConfigError: `settings.tokens` has no room for a question and its answer.
    """
    writing, began = Writing(target, settings, limits, kept), clock()
    count, until = settings.write or WRITTEN, SHARE * 60 * settings.max_minutes
    lines, lately, enough = writing.lines, deque([GROUP], STALE), min(count, FEWEST)
    while len(lines) < count and not (len(lately) == STALE and 4 * sum(lately) < GROUP):
        tell(f"the target writes its own data, {len(lines)} of {count} texts", len(lines), count)
        before = len(lines)
        writing.group()
        lately.append(len(lines) - before)
        groups, seconds = writing.begun // GROUP, clock() - began
        if until and len(lines) >= enough and seconds * (groups + 1) / groups > until:
            break
    del lines[count:]
    faults, seconds = writing.faults, clock() - began
    why = ", ".join(f"{count} {fault}" for fault, count in faults.most_common()) or "none"
    if len(lines) < max(enough, 2):
        raise ForerunError(
            f"the target writes nothing to learn from: of {writing.begun} texts {len(lines)} are left (left out:"
            f" {why}); give --data"
        )
    tell.note(f"{len(lines)} texts {AUTHOR} in {seconds:.0f} s; left out: {why}")
    return Written(lines, faults["repeated"], faults.total() - faults["repeated"], seconds)


def check_place(name: str, settings: Training) -> None:
    """Raise ConfigError now for a file that could not keep what is written, or would not be read
    again."""
    path = Path(name).expanduser()
    if not settings.write:
        raise ConfigError(
            "--save-data keeps what the target writes, and with --data it writes nothing: leave one out, or say how"
            " many texts it is to --write"
        )
    if path.suffix.lower() != ".jsonl":
        raise ConfigError(
            f"{name} would not be read as lines of JSON: give --save-data a name that ends in .jsonl"
        )
    parent = path.absolute().parent
    if path.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{name} cannot be written: give --save-data a file in a directory that can be written to"
        )


def beginning_of_text(target: Target) -> list[int]:
    """The tokens that stand before any text; where there are none, what ends one."""
    return target.tokenizer.encode("") or list(target.llm.decoder.config.end_ids[:1])


def _text(request: Request) -> str:
    """What was said; half a character at a limit is none."""
    assert request.text is not None
    text = request.text.text
    return text if request.finish_reason == "stop" else text.rstrip(BROKEN)


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
