"""What `forerun bench peers` compares: the engines it knows, the models and how they are drafted
for, and the plan."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.bench.peers.process import Prompts
from forerun.config import parse_depth
from forerun.draft_spec import parse_draft
from forerun.engine.request import OFF
from forerun.errors import ConfigError, suggest
from forerun.models.files import tag_of
from forerun.models.hub import find_model
from forerun.utils import check_integer

FORMATS = ("float32", "bfloat16", "int8", "int4")
STORED = "as stored"  # the format of a GGUF file
LOOKUP = "lookup"  # drafts are looked up in the text so far: ours is suffix, others have their own
USUAL_FORMATS = FORMATS[1:]
USUAL_DEPTHS: tuple[int | str, ...] = ("auto", 2, 3, 4, 5, 7)
LOOKUP_DEPTHS: tuple[int | str, ...] = (
    "auto",
    3,
    5,
    7,
    10,
    16,
)  # guesses cost nothing, and copies are long


@dataclass(frozen=True, slots=True)
class Engine:
    """Another engine: the script that runs it, what its Python needs, and the formats of weights
    that it has here.

    One without formats has its own: a server, which loaded what it loaded. `not_stored` is why a
        GGUF file is not run
    as it is stored.
    """

    script: str
    packages: str
    formats: tuple[str, ...]
    not_stored: str = ""

    def why_not(self, form: str) -> str:
        """Why a format is not run with this engine; empty where it is."""
        if not self.formats or form in self.formats:
            return ""
        return (form == STORED and self.not_stored) or f"is not run in {form} here"


ENGINES = {
    "transformers": Engine(
        "with_transformers.py", "transformers torch", ("float32", "bfloat16"),
        "makes floats of what a GGUF file stores, so it is not run with one: give a directory for that",
    ),
    "llama.cpp": Engine("with_llama_cpp.py", "llama-cpp-python gguf", (*FORMATS, STORED)),
    "openvino": Engine(
        "with_openvino.py", "openvino-genai gguf", USUAL_FORMATS,
        "packs what a GGUF file stores in formats of its own, so it is not run with one: give a directory for that",
    ),
    "server": Engine("with_server.py", "", ()),
    "drafting-server": Engine("with_server.py", "", ()),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        peers: engines to where they are: a Python that has it, or a server's URL.
        formats: of the target's weights; none stand for a GGUF file's own, or the usual ones of a
            directory.
        draft_format: of the draft's, for engines that can draft in another format than the
            target's.
        depths: tokens drafted ahead, auto for this engine alone; none stand for the usual ones.
        tokens: to make for each prompt.
        repeats: rounds.
        threads: of every engine.
        device: cpu or cuda.
        timeout: seconds for one answer of another engine.
        converted: a directory that keeps what models are converted to; None throws it away at the
            end.
        prefill: lengths of prompts to time the first token of.
    """

    peers: Mapping[str, str]
    formats: Sequence[str] = ()
    draft_format: str = "int8"
    depths: Sequence[int | str] = ()
    tokens: int = 256
    repeats: int = 3
    threads: int = 1
    device: str = "cpu"
    timeout: float = 1800.0
    converted: Path | None = None
    prefill: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not self.peers:
            raise ConfigError("there is nothing to compare: give at least one peer")
        for name, known, given in (
            ("format", (*FORMATS, STORED), self.formats), ("draft format", FORMATS[1:], [self.draft_format]),
            ("device", ("cpu", "cuda"), [self.device]),
        ):  # fmt: skip
            for value in given:
                if value not in known:
                    raise ConfigError(f"there is no {name} {value!r}: {suggest(value, known)}")
        if 0 in [parse_depth(depth) for depth in self.depths]:
            raise ConfigError(
                "depth 0 is plain decoding, which is always measured: give depths from 1 up"
            )
        if self.tokens < 2:
            raise ConfigError("one token is no decoding: give at least 2 tokens")
        check_integer("repeats", self.repeats, 1, 10_000)
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout={self.timeout:g} is out of range: give seconds over 0")
        if any(length < 1 for length in self.prefill):
            raise ConfigError(
                "prefill: give lengths of prompts in tokens from 1 up, such as 1000,6000"
            )

    def settled(self, models: Models) -> Plan:
        """The plan with nothing left open. Raises ConfigError for a format that the model has not
        got."""
        is_gguf = models.target.is_file()
        what = (
            "is a GGUF file, which runs as it is stored, not in"
            if is_gguf
            else "is no GGUF file: only these run"
        )
        for form in self.formats:
            if is_gguf != (form == STORED):
                raise ConfigError(f"{models.target} {what} {form}: leave --formats out")
        usual = (STORED,) if is_gguf else USUAL_FORMATS
        depths = LOOKUP_DEPTHS if models.draft == LOOKUP else USUAL_DEPTHS
        return replace(self, formats=self.formats or usual, depths=self.depths or depths)


@dataclass(frozen=True, slots=True)
class Models:
    """Where the target is, how it is drafted for (model:PLACE, lookup or off), and where the draft
    model is, if any."""

    target: Path
    draft: str
    drafter: Path | None

    @property
    def ours(self) -> str:
        """What this engine calls the draft."""
        return {LOOKUP: "suffix", OFF: OFF}.get(self.draft, f"model:{self.drafter}")

    def label(self, form: str) -> str:
        """What reports call a format: a GGUF file's is in its name, as a rule."""
        return (form == STORED and tag_of(self.target.name, [self.target.name])) or form


def find_models(model: str | None, draft: str | None) -> Models:
    """The models of two options; with no draft given, lookup for a GGUF file, which has no draft
    model as a rule, and off for a directory. Raises ForerunError for what is not there, or a draft
    that other engines have not got."""
    if draft not in (None, LOOKUP):
        (kind, place), *behind = parse_draft(draft)
        if behind or kind not in ("model", OFF):
            raise ConfigError(
                f"other engines cannot draft with {draft}: give --draft model:PLACE, lookup or off"
            )
        return Models(find_model(model), draft, find_model(place) if kind == "model" else None)
    target = find_model(model)
    return Models(target, draft or (LOOKUP if target.is_file() else OFF), None)


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of one category, in the groups of `requests` that run at once; rounds take the groups
    in turn."""

    category: str
    requests: int
    groups: Sequence[Prompts]


def parse_peers(entries: Sequence[str]) -> dict[str, str]:
    """`name=place` entries by name. Raises ConfigError for an unknown engine, or a place that
    cannot be one."""
    peers: dict[str, str] = {}
    for entry in entries:
        name, _, where = (part.strip() for part in entry.partition("="))
        if name not in ENGINES:
            raise ConfigError(f"there is no peer {name!r}: {suggest(name, ENGINES)}")
        if name in peers:
            raise ConfigError(f"the peer {name} was given twice: give it once")
        if name.endswith("server"):
            if not where.startswith(("http://", "https://")):
                raise ConfigError(f"the peer {name} needs a URL: write {name}=http://HOST:PORT")
        elif shutil.which(where) is None:
            raise ConfigError(
                f"{where!r} is no program: write {name}=PYTHON, the Python that has {name}"
            )
        peers[name] = where
    return peers
