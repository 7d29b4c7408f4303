"""A drafter of one's own in thirty lines: docs/write-a-drafter.md as a program."""

from collections.abc import Sequence

from forerun import LLM, SamplingParams
from forerun.draft.proposer import DraftRequest, Proposer, Reference
from forerun.types import Draft


class LastSeen(Proposer):
    """Proposes what followed the last three tokens the last time they occurred."""

    name = "last-seen"

    def __init__(self) -> None:
        self.slots: dict[int, tuple[dict[tuple[int, ...], int], int]] = {}

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        self.slots[slot] = ({}, 0)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        del self.slots[slot]

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        return [self._one(row) for row in rows]

    def _one(self, row: DraftRequest) -> Draft:
        after, read = self.slots[row.slot]
        for end in range(max(read, 3), len(row.tokens)):
            after[tuple(row.tokens[end - 3 : end])] = end
        self.slots[row.slot] = after, len(row.tokens)
        at = after.get(tuple(row.tokens[-3:]))
        return Draft.chain(
            row.tokens[-1], list(row.tokens[at : at + row.depth]) if at else [], self.name
        )


if __name__ == "__main__":
    llm = LLM()
    llm.engine.proposers[LastSeen.name] = LastSeen()
    params = SamplingParams(temperature=0, max_tokens=40)
    for draft in (
        "off",
        LastSeen.name,
    ):  # at a depth of 4: without one it drafts as deep as pays on this machine
        (completion,) = llm.generate("x = [1, 2, 3]\n" * 4, params, draft=draft, depth=4)
        print(
            f"{draft:10} {completion.stats.accepted_length:.2f} tokens per pass, ids {completion.token_ids[:8]} ..."
        )
