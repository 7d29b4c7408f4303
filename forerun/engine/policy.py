"""What a depth policy is: who says how deep to draft, and is told what came of it. `depth.Auto` is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from forerun.engine.acceptance import Acceptance, Wish
from forerun.engine.survival import Survival


class Place(NamedTuple):
    """Where in a step drafts are thought of.

    Attributes:
        tokens: that are in the pass in any case.
        said: requests that say something in it, whether they draft or not.
        asked: those of them that may draft.
        prompts: tokens of prompts among those in the pass, which are read whatever is drafted.
    """

    tokens: int
    said: int
    asked: int
    prompts: int = 0


class DepthPolicy(Protocol):
    """Chooses depths before a step and learns from it afterwards."""

    def choose(self, wishes: Sequence[Wish], place: Place) -> list[int]:
        """The depth of each request, 0 to its limit."""

    def worth(self, kind: str, acceptance: Acceptance, copied: int, place: Place) -> tuple[int, float]:
        """(how many of the tokens that were copied to verify, tokens a second that this lets expect). `kind` is of
        their match, `acceptance` what became of such copies for this request."""

    def hoped(self, wish: Wish, place: Place) -> float:
        """Tokens a second that are expected of a proposer where it has something to draft: where it has not, the next
        one is asked in the same step."""

    def enough(self, chances: Sequence[float], place: Place) -> int:
        """How many of some nodes to verify, of which each stands with such a chance, the likeliest first."""

    def ranked(self, groups: Sequence[Sequence[Wish]], place: Place) -> list[int]:
        """Which groups are expected to do best for a request, best first."""

    def tried(self, rivals: Sequence[Wish], speed: float, place: Place) -> int | None:
        """Which of the rivals to let draft only to see what becomes of it, where so many tokens a second are expected
        already; asked once a step."""

    def floor(self, source: str, acceptance: Acceptance, place: Place) -> float:
        """The chance that a chain still stands below which no token more is worth it."""

    def survival(self, source: str, greedy: bool) -> Survival:
        """What the drafter's own probabilities are worth."""

    def rests(self, acceptance: Acceptance) -> bool:
        """Whether nothing is to be drafted this step, so that nobody need be asked."""

    def waits(self, wish: Wish, place: Place) -> bool:
        """Whether what its proposer has missed, beside prompts that are read, had better be read in a step without."""

    def rate(self, source: str, acceptance: Acceptance) -> float:
        """The acceptance it expects of the next drafted token."""

    def cost(self, tokens: float) -> float:
        """Seconds that it expects of a pass over so many tokens."""

    def room(self, decoding: int, stretch: float) -> int:
        """Return the most tokens of a pass that reads prompts beside `decoding` requests, so that it takes no longer
        than `--slo-ms` and than `stretch` times a pass of the decoding requests alone."""

    def costs(self) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
        """Seconds measured so far: of a pass by its tokens, and of drafting by proposer and depth.
        Nothing where something else was."""

    def record_draft(self, source: str, depth: int, seconds: float, requests: int = 1, lag: int = 0) -> None:
        """Drafting to `depth`, for so many requests at once, took so long; before that the proposer read `lag` tokens
        that it had missed of them all."""

    def record_pass(self, tokens: int, seconds: float) -> None:
        """A target pass over so many tokens took so long, with all that came of it."""

    def record_read(self, tokens: int, seconds: float) -> None:
        """A pass over so many tokens that read prompts took so long."""

    def end_step(self) -> None:
        """A step is over, whatever it could measure."""

    def record_verdict(self, source: str, acceptance: Acceptance, drafted: int, accepted: int) -> None:
        """A draft `drafted` deep was accepted `accepted` deep; 0 deep is a proposer that had nothing to offer."""
