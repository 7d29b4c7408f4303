"""Compare drafted logits with those of speculators' own code: DFlash and DSpark, with what they
have.

python scripts/published_blocks.py

Needs speculators 0.9 beside forerun, in an environment of its own. Its models are filled with
random numbers, saved as it saves them, read by forerun, and asked about the same block behind the
same states, the text's own tokens drafted. Fails where logits differ by more than 1e-4 of their
size."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from forerun import LLM, SamplingParams
from forerun.draft.block.module import load_block
from forerun.draft.block.proposer import BlockProposer
from forerun.draft.proposer import DraftRequest, TargetView, view_of
from forerun.draft.tree import Tree
from forerun.verify import Noise

HIDDEN, VOCAB, SIZE, LENGTH, ANCHOR, MOST = 32, 64, 5, 30, 17, 1e-4
STATES = [2, 0, 1]
WINDOW = {
    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6, "use_sliding_window": True,
}  # fmt: skip
Case = tuple[
    str, type, type, dict[str, Any], dict[str, Any]
]  # name, config, model, own fields, layer fields


def cases() -> list[Case]:
    """Return what is compared."""
    from speculators.models.dflash import DFlashSpeculatorConfig  # type: ignore[import-not-found]
    from speculators.models.dflash.core import DFlashDraftModel  # type: ignore[import-not-found]
    from speculators.models.dspark import DSparkSpeculatorConfig  # type: ignore[import-not-found]
    from speculators.models.dspark.core import DSparkDraftModel  # type: ignore[import-not-found]

    flash = DFlashSpeculatorConfig, DFlashDraftModel
    found: list[Case] = [
        ("DFlash", *flash, {}, {}),
        ("DFlash, some tokens", *flash, {"draft_vocab_size": 40}, {}),
        ("DFlash, window", *flash, {}, WINDOW),
        ("DFlash, seen window", *flash, {"sliding_window_non_causal": True}, WINDOW),
    ]
    for kind in ("vanilla", "gated", "rnn"):
        for first in (True, False):
            own = {"markov_head_type": kind, "markov_rank": 6, "sample_from_anchor": first}
            name = f"DSpark, {kind}, from anchor {first}"
            found.append((name, DSparkSpeculatorConfig, DSparkDraftModel, own, {}))
    return found


def random_model(
    config: type, model: type, own: dict[str, Any], layer: dict[str, Any], base: LlamaForCausalLM
) -> Any:
    """Return a random model of theirs with the target's embedding and head; no part has no effect."""
    layers = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, **layer,
    )  # fmt: skip
    layers._attn_implementation = "eager"
    common = {
        "block_size": SIZE,
        "mask_token_id": 3,
        "aux_hidden_state_layer_ids": STATES,
        "draft_vocab_size": VOCAB,
    }
    theirs = model(config(transformer_layer_config=layers, **(common | own)))
    with torch.no_grad():
        for value in theirs.parameters():
            value.normal_(0.0, 0.3).add_(float(value.ndim == 1))
        theirs.embed_tokens.weight.copy_(base.model.embed_tokens.weight)
        if theirs.d2t is None:
            theirs.lm_head.weight.copy_(base.lm_head.weight)
        else:
            ids = torch.randperm(VOCAB)[: len(theirs.d2t)].sort().values
            theirs.d2t.copy_(ids - torch.arange(len(ids)))
            theirs.t2d.zero_()[ids] = True
    return theirs.eval()


def expected_logits(theirs: Any, states: Tensor, tokens: Tensor) -> Tensor:
    """Return the logits of all slots behind the text's own tokens, over the target's tokens. [S, V]"""
    mask = torch.zeros(1, LENGTH)
    mask[0, ANCHOR] = 1
    hidden, logits, *_ = theirs._backbone_forward(
        states[None], tokens[None], mask, torch.zeros(1, LENGTH, HIDDEN), torch.zeros(1, LENGTH, dtype=torch.int64),
        max_anchors=1,
    )  # fmt: skip
    block, first = tokens[ANCHOR : ANCHOR + SIZE], theirs.config.sample_from_anchor
    before = block if first else torch.cat((block[:1], block[:-1]))
    if getattr(theirs, "markov_head", None) is not None:
        logits = logits + theirs.markov_head.block_bias(
            prev_token_ids=before[None], hidden_states=hidden
        )
    if theirs.d2t is None:
        return logits[0]
    full = torch.full((SIZE, VOCAB), -torch.inf)
    full[:, theirs.d2t + torch.arange(len(theirs.d2t))] = logits[0]
    return full


def drafted(
    directory: Path, target: TargetView, states: Tensor, tokens: Tensor
) -> Iterator[Tensor]:
    """Yield the logits of forerun, slot by slot, of those that predict a token."""
    drafter = BlockProposer(load_block(directory, target), target, tokens=64, page=4, slots=1)
    text = tokens.tolist()
    drafter.open(0, text[: ANCHOR + 1])
    shown = states[:ANCHOR].split(HIDDEN, -1)
    drafter.observe(0, 0, dict(zip(STATES, shown, strict=True)))
    row = DraftRequest(
        0, text[: ANCHOR + 1], SamplingParams(), Noise(1, ANCHOR), drafter.config.depth
    )
    drafter.propose([row])  # reads the context
    tree = Tree(row)
    (growing,) = drafter._run_blocks([tree])
    for level in range(drafter.config.depth):
        yield drafter._logits(growing, level)[0]
        tree.frontier = [tree.draft.add(text[ANCHOR + 1 + level], tree.frontier[0], "text")]


@torch.inference_mode()
def main() -> int:
    """Compare all. Returns the exit status."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        )
    )
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        target = view_of(LLM(folder, draft="off", kernels="torch", kv_tokens=256).decoder)
        for name, config, model, own, layer in cases():
            theirs = random_model(config, model, own, layer, base)
            with tempfile.TemporaryDirectory() as saved:
                theirs.save_pretrained(saved)
                states, tokens = (
                    torch.randn(LENGTH, len(STATES) * HIDDEN),
                    torch.randint(VOCAB, (LENGTH,)),
                )
                expected = expected_logits(theirs, states, tokens)[
                    0 if theirs.config.sample_from_anchor else 1 :
                ]
                ours = torch.stack(list(drafted(Path(saved), target, states, tokens)))
            known = expected.isfinite()
            same = torch.equal(known, ours.isfinite())
            apart = (
                float(((ours - expected)[known].abs().max()) / expected[known].abs().max())
                if same
                else torch.inf
            )
            worst = max(worst, apart)
            print(f"{name}: {apart:.1e}")
    return int(not worst <= MOST)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    sys.exit(main())
