"""A run of training that has ended: what it was, what came of it. In plain values it is training.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun import __version__
from forerun.models.hub import DEFAULT
from forerun.train.data import Source
from forerun.train.findings import Findings
from forerun.train.loop import Record
from forerun.train.settings import Training


@dataclass(frozen=True, slots=True)
class Facts:
    """What a card says of a run besides its results.

    Attributes:
        target: the model drafted for; None is the default model.
        data: the paths of the data, as they were given, and of what the target wrote.
        recipe: its name and options.
        settings: of the run.
        sources: what became of each path.
        documents: trained on, and held out.
        digest: a hash of all documents.
        kept: whether all of them are in `data`.
    """

    target: str | None
    data: Sequence[str]
    recipe: dict[str, Any]
    settings: Training
    sources: Sequence[Source]
    documents: tuple[int, int]
    digest: str
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """A run that has ended: what it was, what came of it."""

    facts: Facts
    record: Record
    parameters: int
    findings: Findings
    draft: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as in training.json."""
        best = self.record.best
        return {
            "forerun": __version__,
            "target": self.facts.target or DEFAULT,
            "recipe": self.facts.recipe,
            "training": asdict(self.facts.settings),
            "data": {
                "sources": [asdict(source) for source in self.facts.sources],
                "documents": self.facts.documents[0],
                "held_out": self.facts.documents[1],
                "sha256": self.facts.digest,
            },
            "parameters": self.parameters,
            "steps": self.record.step,
            "losses": self.record.losses,
            "evaluations": [asdict(evaluation) for evaluation in self.record.evaluations],
            "best": None if best is None else asdict(best),
            **self.findings.as_dict(),
        }
