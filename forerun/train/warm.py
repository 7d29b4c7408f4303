"""Where heads on pairs begin: as the best linear guess of what enters the target's last layer, and
that layer.

A head that begins at random has to learn the language first, from the few million tokens that there
is time for. But what enters the target's last layer at token t + 1 follows to a good part from the
token's embedding and the state that left the target at token t, and the map between them is a
least-squares problem over some thousand tokens. With the target's own last layer, norm and head
behind it, the head drafts before its first step about as well as a random one does after a hundred.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from forerun.draft.eagle.module import EagleModule
from forerun.draft.head_modules import JoinedLayer, SelfAttention
from forerun.models.weights import Layer, Source, load_weights
from forerun.train.capture import Target
from forerun.train.data import Corpus, Example

TEXTS = (
    160  # that the map is fitted to: some ten thousand tokens, or some ten for each of its inputs
)
AT_ONCE = 16
RIDGE = 1e-3  # of the mean square of the inputs


@torch.no_grad()
def begin_as_target(head: EagleModule, layer: JoinedLayer, target: Target, corpus: Corpus) -> None:
    """Fit what joins pairs, and let the layer be the target's last one. Where that is of another
    kind, the layer begins as nothing, and pairs are joined to what leaves it. The head must fuse
    states into something like the last one."""
    last = target.llm.decoder.config.layers
    taken = _take(layer, target)
    if not taken:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    layer.input_proj.weight.copy_(
        _fitted(head, target, _texts(corpus), last - 1 if taken else last)
    )


def _texts(corpus: Corpus) -> list[Example]:
    """Some of what will be learnt from."""
    texts = corpus.examples or [Example(tuple(prompt), 1) for prompt in corpus.prompts]
    return texts[:: max(len(texts) // TEXTS, 1)][:TEXTS]


def _fitted(head: EagleModule, target: Target, texts: Sequence[Example], boundary: int) -> Tensor:
    """The map from normed pairs to the states at a boundary of their tokens, by least squares. [Hd,
    2 Hd]"""
    parts, read = head.parts(), sorted({*head.aux_hidden_layers, boundary})
    width = 2 * head.layer.hidden
    squares = torch.zeros(width, width, dtype=torch.float64)
    products = torch.zeros(width, head.layer.hidden, dtype=torch.float64)
    for at in range(0, len(texts), AT_ONCE):
        group = texts[at : at + AT_ONCE]
        for example, states in zip(group, target.states(group, read), strict=True):
            features = torch.cat([states[b][:-1].float() for b in head.aux_hidden_layers], -1)
            ids = torch.tensor(example.tokens[1:-1], device=target.device)
            embedded, state = (
                parts.embed_norm(head.embed(ids).float()),
                parts.state_norm(head.fuse(features)),
            )
            pairs = torch.cat((embedded, state), -1).double().cpu()
            squares += pairs.T @ pairs
            products += pairs.T @ states[boundary][1:].double().cpu()
    squares += RIDGE * squares.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    fitted: Tensor = torch.linalg.solve(squares, products)
    return fitted.T.float()


def _take(layer: JoinedLayer, target: Target) -> bool:
    """Make it the target's last layer. False, and nothing done, where that is of another kind."""
    c = target.llm.decoder.config
    if c.norm == "layer" or c.sandwich or not c.gated or c.qkv_bias or c.out_bias or c.mlp_bias:
        return False
    found: dict[str, Tensor] = {}

    def make(part: str, source: Source, bias: Tensor | None) -> None:
        if source.name.startswith(f"{c.layers - 1}."):  # all else stays on disk
            found[part] = source.weight()

    held: Layer = load_weights(c, target.path, torch.float32, target.device, make).layers[-1]
    attention, mlp = layer.self_attn, layer.mlp
    gate, up = found["up"].chunk(2)
    sizes = [
        attention.q_proj.out_features,
        attention.k_proj.out_features,
        attention.v_proj.out_features,
    ]
    pairs: list[tuple[Tensor, Tensor]] = [
        (attention.products(), found["qkv"]), (attention.o_proj.weight, found["out"]), (mlp.gate_proj.weight, gate),
        (mlp.up_proj.weight, up), (mlp.down_proj.weight, found["down"]),
        (layer.input_layernorm.weight, held.attention_norm.weight),
        (layer.post_attention_layernorm.weight, held.mlp_norm.weight),
        *_norms(attention, held),
    ]  # fmt: skip
    if any(to.shape != value.shape for to, value in pairs):
        return False
    for to, value in pairs[1:]:
        to.copy_(value)
    products = (attention.q_proj, attention.k_proj, attention.v_proj)
    for product, weight in zip(products, torch.split(found["qkv"], sizes), strict=True):
        product.weight.copy_(weight)
    return True


def _norms(attention: SelfAttention, held: Layer) -> list[tuple[Tensor, Tensor]]:
    """Norms of queries and keys."""
    norms = ((attention.q_norm, held.q_norm), (attention.k_norm, held.k_norm))
    return [
        (to.weight, value.weight)
        for to, value in norms
        if isinstance(to, nn.RMSNorm) and value is not None
    ]
