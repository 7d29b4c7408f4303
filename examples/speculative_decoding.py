"""Speculative decoding on one page: draft, verify, accept.

A proposer guesses the next tokens. The target computes the logits behind all of them in one forward
pass, and the longest prefix that it would have chosen itself is kept, with one token of its own
behind it. So every step emits at least one token, and the output is that of the target alone.

    python examples/speculative_decoding.py DIRECTORY "def fib(n):"

The engine of forerun does the same for many requests at once, with trees, sampling and a paged
cache, and chooses how deep to draft.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from forerun import DraftRequest, Proposer, SamplingParams
from forerun.draft.ngram import NGram
from forerun.verify import Noise


@torch.inference_mode()
def generate(
    model: Any, proposer: Proposer, prompt: Sequence[int], max_tokens: int, depth: int = 4
) -> tuple[list[int], int]:
    """Return (the greedy continuation of a prompt, how many forward passes it took)."""
    tokens, passes = list(prompt), 0
    cache = DynamicCache()
    request = DraftRequest(
        slot=0,
        tokens=tokens,
        params=SamplingParams(temperature=0),
        noise=Noise(seed=0, root=0),
        depth=depth,
        branching=False,
    )
    proposer.open(0, tokens)
    while len(tokens) < len(prompt) + max_tokens:
        # Draft: a chain of guesses behind the last committed token, which is its root.
        (draft,) = proposer.propose([request])

        # Verify: one pass over the tokens that the cache lacks and over the guesses.
        unread = tokens[cache.get_seq_length() :]
        inputs = torch.tensor([unread + draft.tokens[1:]])
        logits = model(inputs, past_key_values=cache, use_cache=True).logits[0, -len(draft) :]
        choices = logits.argmax(-1).tolist()  # the target's own token after each node
        passes += 1

        # Accept: guesses that the target chose as well, and its own token behind the last of them.
        accepted = 0
        while accepted + 1 < len(draft) and draft.tokens[accepted + 1] == choices[accepted]:
            accepted += 1
        tokens += choices[: accepted + 1]
        rejected = len(draft) - 1 - accepted
        if rejected:
            cache.crop(-rejected)  # a rollback is forgetting rows
    proposer.close(0)
    return tokens[len(prompt) : len(prompt) + max_tokens], passes


def main(directory: str, text: str) -> None:
    """Continue a text, and say how many forward passes that took."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    output, passes = generate(model, NGram(), tokenizer.encode(text), max_tokens=64)
    print(text + tokenizer.decode(output))
    print(f"{len(output)} tokens in {passes} forward passes", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:3])
