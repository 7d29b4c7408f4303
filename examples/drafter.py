"""A drafter of one's own in thirty lines: docs/write-a-drafter.md as a program."""

from collections.abc import Sequence

from forerun import LLM, Draft, DraftRequest, Proposer, SamplingParams


class LastSeen(Proposer):
    """Proposes what followed the last three tokens the last time they occurred."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[dict[tuple[int, ...], int], int]] = {}

    def open(
        self, slot: int, tokens: Sequence[int], references: Sequence[object] = (), tenant: str = ""
    ) -> None:
        self.slots[slot] = ({}, 0)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        del self.slots[slot]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self.draft(request) for request in requests]

    def draft(self, request: DraftRequest) -> Draft:
        ends, read = self.slots[request.slot]
        tokens = request.tokens
        for end in range(max(read, 3), len(tokens)):
            ends[tuple(tokens[end - 3 : end])] = end
        self.slots[request.slot] = ends, len(tokens)
        at = ends.get(tuple(tokens[-3:]))
        guess = list(tokens[at : at + request.depth]) if at else []
        return Draft.chain(tokens[-1], guess, self.name)


if __name__ == "__main__":
    llm = LLM()
    llm.add_drafter("last-seen", LastSeen())
    params = SamplingParams(temperature=0, max_tokens=40)
    for draft in ("off", "last-seen"):
        # At a depth of 4; without it the engine drafts as deep as pays on this machine.
        (completion,) = llm.generate("x = [1, 2, 3]\n" * 4, params, draft=draft, depth=4)
        print(
            f"{draft:10} {completion.stats.accepted_length:.2f} tokens per pass,"
            f" ids {completion.token_ids[:8]} ..."
        )
