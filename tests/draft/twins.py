"""Reference implementations ("twins") of draft heads, written from papers and files: no cache, no
chunks, no trees, everything computed anew for each path.

A head that reads the states of the wrong position or layer, or keeps keys of drafted tokens, still
drafts, only worse, so tests compare logits with these, node by node."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.devices import as_tensor
from forerun.draft.proposer import TargetView, view_of
from forerun.models.config import ModelConfig
from forerun.models.rope import rope_tables
from forerun.runtime.torch_runner import Runner
from tests import tiny


def target(family: str = "llama") -> TargetView:
    return view_of(tiny.decoder(tiny.family(family)))


@functools.cache
def states_of(tokens: tuple[int, ...], aux_hidden_layers: tuple[int, ...]) -> Tensor:
    """Return the target's states of each token, side by side, from one forward pass. [T, n * H]"""
    states = features_of(tiny.decoder(tiny.family("llama")), tokens, aux_hidden_layers)
    return torch.cat([states[layer] for layer in aux_hidden_layers], -1)


def features_of(
    decoder: Any, tokens: Sequence[int], aux_hidden_layers: Sequence[int]
) -> dict[int, Tensor]:
    """Return a target's states of each token by layer, from one forward pass."""
    runner = Runner(decoder, tokens=256, page=256, slots=1)
    runner.cache.pages.grow(0, len(tokens))
    segment = Segment.chain(0, list(tokens))
    features = runner.forward([segment], aux_hidden_layers).features
    return {layer: as_tensor(states) for layer, states in features.items()}


@functools.cache
def last_states(tokens: tuple[int, ...]) -> Tensor:
    """The target's states of each token after its last norm. [T, H]"""
    decoder = tiny.decoder(tiny.family("llama"))
    x = states_of(tokens, (decoder.config.layers,))
    return norm(x, decoder.weights.norm.weight, decoder.config.norm_eps)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


class Twin:
    """Base: products by name, norms, rotary embeddings, attention head by head."""

    def __init__(self, head: Any, layer: ModelConfig) -> None:
        self.w, self.c, self.view = head.double().state_dict(), layer, target()
        self.target_head = tiny.decoder(tiny.family("llama")).weights.head.weight
        self.cos, self.sin = rope_tables(layer, layer.ropes[0], 300, torch.float64)

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        """Return the target-vocabulary logits after the path; states are known from `first` on."""
        raise NotImplementedError

    def norm(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.w[f"{name}.weight"], self.c.norm_eps)

    def product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def embedded(self, ids: list[int]) -> Tensor:
        own = self.w.get("embed_tokens.weight")
        return self.view.embed(torch.tensor(ids)).double() if own is None else own[ids]

    def over_target_vocab(self, logits: Tensor) -> Tensor:
        """Spread logits over the target's vocabulary. [.., V]"""
        ids = torch.arange(logits.shape[-1]) + self.w.get(
            "d2t", torch.zeros(logits.shape[-1], dtype=torch.int64)
        )
        full = torch.full((*logits.shape[:-1], self.view.vocab), -torch.inf, dtype=torch.float64)
        full[..., ids] = logits
        return full

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """[T, heads, D]"""
        a, b = x.chunk(2, -1)
        cos, sin = self.cos[positions], self.sin[positions]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masked: Tensor) -> Tensor:
        """q, k: rotated; masked [T, K]: keys that a query may not attend to. [T, heads * D]"""
        heads = []
        for h in range(self.c.heads):
            shared = h // (self.c.heads // self.c.kv_heads)
            scores = q[:, h] @ k[:, shared].T / self.c.head_dim**0.5
            heads.append(scores.masked_fill(masked, -torch.inf).softmax(-1) @ v[:, shared])
        return torch.cat(heads, 1)

    def attention(self, x: Tensor, at: str = "layers.0.", window: int | None = None) -> Tensor:
        """Attend from each position to itself and those before it within the window."""
        own, positions = f"{at}self_attn.", torch.arange(len(x))
        q, k, v = (
            self.product(x, f"{own}{n}_proj").view(len(x), -1, self.c.head_dim) for n in "qkv"
        )
        if self.c.qk_norm:
            q, k = self.norm(q, f"{own}q_norm"), self.norm(k, f"{own}k_norm")
        distance = positions[:, None] - positions[None]
        masked = (distance < 0) | (distance >= (window or len(x)))
        return self.product(
            self.attend(self.rotate(q, positions), self.rotate(k, positions), v, masked),
            f"{own}o_proj",
        )

    def mlp(self, x: Tensor, at: str = "layers.0.") -> Tensor:
        return self.gated(x, f"{at}mlp.")

    def gated(self, x: Tensor, at: str) -> Tensor:
        gate, up = (self.product(x, f"{at}{n}_proj") for n in ("gate", "up"))
        return self.product(gate / (1 + (-gate).exp()) * up, f"{at}down_proj")


class PairTwin(Twin):
    """EAGLE-style heads: a drafted token is paired with the head's own state of its parent."""

    def states(self, tokens: tuple[int, ...]) -> Tensor:
        """Return the states paired with the embeddings of all tokens but the first. [T - 1, Hd]"""
        raise NotImplementedError

    def run_pairs(self, ids: list[int], states: Tensor) -> Tensor:
        """Run these pairs. [T, Hd]"""
        raise NotImplementedError

    def next_state(self, outputs: Tensor) -> Tensor:
        """Return the state of a drafted token from the output of its parent."""
        return outputs

    def lm_head(self, outputs: Tensor) -> Tensor:
        raise NotImplementedError

    def outputs(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        """Run the pairs of the committed tokens from `first` on, then those of the path."""
        ids, states = list(tokens[first + 1 :]), self.states(tokens[:-1])[first:]
        outputs = self.run_pairs(ids, states)
        for token in path:
            states = torch.cat((states, self.next_state(outputs[-1:])))
            ids.append(token)
            outputs = self.run_pairs(ids, states)
        return outputs

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        return self.over_target_vocab(self.lm_head(self.outputs(tokens, path, first)[-1]))


class EagleTwin(PairTwin):
    """EAGLE-3."""

    def __init__(self, head: Any) -> None:
        super().__init__(head, head.config.layer)
        self.config = head.config

    def fuse(self, features: Tensor) -> Tensor:
        c = self.config
        if c.norm_before_fc:
            features = self.norm(features, "input_norm")
        if c.fc_norm:
            parts = features.split(c.target_hidden, -1)
            features = torch.cat(
                [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1
            )
        return self.product(features, "fc")

    def states(self, tokens: tuple[int, ...]) -> Tensor:
        return self.fuse(states_of(tokens, self.config.aux_hidden_layers))

    def run_pairs(self, ids: list[int], states: Tensor) -> Tensor:
        return self.layer(self.embedded(ids), states)

    def layer(self, embedded: Tensor, state: Tensor) -> Tensor:
        at = "layers.0."
        normed = self.norm(state, f"{at}hidden_norm")
        if self.config.join:
            state = self.product(
                torch.cat((self.norm(embedded, f"{at}embed_norm"), normed), -1), f"{at}input_proj"
            )
            x = self.norm(state, f"{at}input_layernorm")
        else:
            x = torch.cat((self.norm(embedded, f"{at}input_layernorm"), normed), -1)
        out = self.attention(x, at, self.c.windows[0])
        x = (normed if self.config.norm_before_residual else state) + out
        return x + self.mlp(self.norm(x, f"{at}post_attention_layernorm"), at)

    def next_state(self, outputs: Tensor) -> Tensor:
        return self.norm(outputs, "norm") if self.config.norm_output else outputs

    def lm_head(self, outputs: Tensor) -> Tensor:
        normed = self.norm(outputs, "norm")
        return normed @ self.w.get("lm_head.weight", self.target_head).T


class ParallelTwin(EagleTwin):
    """P-EAGLE, over the whole text and all masks."""

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        """Only the length of the path matters."""
        features = states_of(tokens[:-1], self.config.aux_hidden_layers)[first:]
        masks = self.w["mask_hidden"].view(1, -1).expand(len(path), -1)
        x = self.run_pairs(
            [*tokens[first + 1 :], *[self.config.mask_token] * len(path)],
            self.fuse(torch.cat((features, masks))),
        )
        for i in range(1, self.c.layers):
            at = f"layers.{i}."
            x = x + self.attention(self.norm(x, f"{at}input_layernorm"), at, self.c.windows[i])
            x = x + self.mlp(self.norm(x, f"{at}post_attention_layernorm"), at)
        return self.over_target_vocab(self.lm_head(x[-1]))


class Eagle1Twin(PairTwin):
    """EAGLE-1."""

    def __init__(self, head: Any) -> None:
        super().__init__(head, head.layer)

    def states(self, tokens: tuple[int, ...]) -> Tensor:
        return last_states(tokens)

    def run_pairs(self, ids: list[int], states: Tensor) -> Tensor:
        x = self.product(torch.cat((self.embedded(ids), states), -1), "fc")
        x = x + self.attention(x)
        return x + self.mlp(self.norm(x, "layers.0.post_attention_layernorm"))

    def lm_head(self, outputs: Tensor) -> Tensor:
        return outputs @ self.w.get("lm_head.weight", self.target_head).T


class MtpTwin(PairTwin):
    """Multi-token modules."""

    AT = "mtp_layers.0."
    STATE_FIRST = False

    def __init__(self, module: Any) -> None:
        super().__init__(module, module.layer)

    def states(self, tokens: tuple[int, ...]) -> Tensor:
        return last_states(tokens)

    def run_pairs(self, ids: list[int], states: Tensor) -> Tensor:
        pair = [self.norm(self.embedded(ids), f"{self.AT}token_layernorm"),
                self.norm(states, f"{self.AT}hidden_layernorm")]  # fmt: skip
        x = self.product(
            torch.cat(pair[::-1] if self.STATE_FIRST else pair, -1), f"{self.AT}input_proj"
        )
        x = x + self.attention(self.norm(x, f"{self.AT}input_layernorm"), self.AT)
        x = x + self.mlp(self.norm(x, f"{self.AT}post_attention_layernorm"), self.AT)
        return self.norm(x, f"{self.AT}final_layernorm")

    def lm_head(self, outputs: Tensor) -> Tensor:
        return outputs @ self.w.get("lm_head.weight", self.target_head).T


class MimoTwin(MtpTwin):
    """The multi-token module in a checkpoint of MiMo, which joins states and embeddings in that
    order."""

    AT = "model.mtp_layers.0."
    STATE_FIRST = True

    def __init__(self, path: Path, config: ModelConfig) -> None:
        stored = load_file(path / "model.safetensors")
        self.w, self.c = {name: tensor.double() for name, tensor in stored.items()}, config
        self.w["embed_tokens.weight"] = self.w["model.embed_tokens.weight"]
        self.cos, self.sin = rope_tables(config, config.ropes[0], 300, torch.float64)

    def logits_of(self, tokens: list[int], states: Tensor) -> Tensor:
        """Return the logits after the target's last states, before its norm, of all tokens but the
        last. [V]"""
        outputs = self.run_pairs(tokens[1:], self.norm(states.double(), "model.norm"))
        return self.w["lm_head.weight"] @ outputs[-1]


class QwenMtpTwin(Twin):
    """The multi-token module in a Qwen3-Next or Qwen3.5 checkpoint, from its own tensors: norms
    multiply by 1 + w, each head's queries stand before its gates, and a quarter of the channels
    rotates."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        stored = load_file(path / "model.safetensors")
        self.w = {name: tensor.double() for name, tensor in stored.items()}
        self.c = config
        self.cos, self.sin = rope_tables(config, config.ropes[0], 300, torch.float64)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return norm(x, 1 + self.w[f"{name}.weight"], self.c.norm_eps)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """[T, heads, D]"""
        cos, sin = self.cos[positions], self.sin[positions]
        half = cos.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    def outputs(self, ids: list[int], states: Tensor) -> Tensor:
        """Run pairs of these tokens and the target's last states, before its norm. [T, H]"""
        embedded = self.w["model.embed_tokens.weight"][ids]
        states = self.norm(states.double(), "model.norm")
        pair = (
            self.norm(embedded, "mtp.pre_fc_norm_embedding"),
            self.norm(states, "mtp.pre_fc_norm_hidden"),
        )
        return self.run(torch.cat(pair, -1))

    def run(self, pairs: Tensor) -> Tensor:
        at = "mtp.layers.0."
        x = self.product(pairs, "mtp.fc")
        x = x + self.attention(self.norm(x, f"{at}input_layernorm"), at)
        x = x + self.mlp(self.norm(x, f"{at}post_attention_layernorm"), at)
        return self.norm(x, "mtp.norm")

    def attention(self, x: Tensor, at: str = "", window: int | None = None) -> Tensor:
        own, c, count, positions = f"{at}self_attn.", self.c, len(x), torch.arange(len(x))
        both = self.product(x, f"{own}q_proj").view(count, c.heads, 2 * c.head_dim)
        q, gate = both.chunk(2, -1)
        k, v = (self.product(x, f"{own}{n}_proj").view(count, -1, c.head_dim) for n in "kv")
        q = self.rotate(self.norm(q, f"{own}q_norm"), positions)
        k = self.rotate(self.norm(k, f"{own}k_norm"), positions)
        attended = self.attend(q, k, v, positions[:, None] < positions)
        return self.product(attended / (1 + (-gate.flatten(1)).exp()), f"{own}o_proj")

    def mlp(self, x: Tensor, at: str = "") -> Tensor:
        at = f"{at}mlp."
        if self.c.experts is None:
            return self.gated(x, at)
        scores = self.product(x, f"{at}gate").softmax(-1)
        shared = self.gated(x, f"{at}shared_expert.")
        gate = self.product(x, f"{at}shared_expert_gate")
        rows = []
        for token in range(len(x)):
            chosen = scores[token].topk(self.c.experts.used)
            weights = chosen.values / chosen.values.sum()
            row = shared[token] / (1 + (-gate[token]).exp())
            for weight, expert in zip(weights, chosen.indices.tolist(), strict=True):
                row = row + weight * self.gated(x[token], f"{at}experts.{expert}.")
            rows.append(row)
        return torch.stack(rows)

    def lm_head(self, outputs: Tensor) -> Tensor:
        head = "model.embed_tokens" if self.c.tied else "lm_head"
        return self.product(outputs, head)


class TransformersMtpTwin:
    """A multi-token module as transformers computes it: a decoder layer of the model's family, and
    norms and a product around it. Both are in float64."""

    def __init__(self, model: Any, module: Any) -> None:
        self.model, self.module = model, module

    @torch.no_grad()
    def outputs(self, ids: list[int], states: Tensor) -> Tensor:
        """Run pairs of these tokens and the target's last states, before its norm. [T, H]"""
        positions, count = torch.arange(len(ids))[None], len(ids)
        states = self.model.model.norm(states.double())
        mask = torch.full((count, count), -torch.inf, dtype=torch.float64).triu(1)
        outputs: Tensor = self.module(
            self.model.get_input_embeddings()(torch.tensor([ids])),
            states[None],
            position_embeddings=self.model.model.rotary_emb(states, positions),
            attention_mask=mask[None, None],
            position_ids=positions,
            cache=None,
        )
        return outputs[0]

    @torch.no_grad()
    def lm_head(self, outputs: Tensor) -> Tensor:
        logits: Tensor = self.model.lm_head(outputs)
        return logits


def nextn_twin(path: Path, config: ModelConfig) -> TransformersMtpTwin:
    """Read the module behind the layers of a GLM-4.5 or DeepSeek V3 checkpoint."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpLayer

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    model.set_experts_implementation("eager")  # others cannot multiply in float64
    last, at = config.layers - 1, f"model.layers.{config.layers}."
    kinds = type(model.model.layers[last]), type(model.model.norm)
    module = MtpLayer(model.config, *kinds, last).double().eval()
    stored = load_file(path / "model.safetensors")
    found = {n.removeprefix(at): t for n, t in stored.items() if n.startswith(at)}
    for copied in ("embed_tokens.weight", "shared_head.head.weight"):  # the target's
        del found[copied]
    weights = {"post_norm.weight": found.pop("shared_head.norm.weight")}
    for name in [name for name in found if name.startswith(("enorm", "hnorm", "eh_proj"))]:
        weights[name] = found.pop(name)
    experts: dict[str, list[Tensor]] = {"gate": [], "up": [], "down": []}
    for expert in range(model.config.n_routed_experts):
        for part, matrices in experts.items():
            matrices.append(found.pop(f"mlp.experts.{expert}.{part}_proj.weight"))
    gates, ups, downs = (torch.stack(matrices) for matrices in experts.values())
    found["mlp.experts.gate_up_proj"] = torch.cat((gates, ups), 1)
    found["mlp.experts.down_proj"] = downs
    module.load_state_dict(weights | {f"mtp_block.{n}": tensor for n, tensor in found.items()})
    return TransformersMtpTwin(model, module)


# names of embedding norm, state norm, product and last norm, which is the model's own in ERNIE 4.5
EXAONE_PARTS = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
ERNIE_PARTS = ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", "")


class FirstLayerTwin:
    """A multi-token module whose layer is built like its model's first one: that layer is
    transformers', in float64, and what is around it is written here. For EXAONE 4.5 as vLLM
    computes it, for ERNIE 4.5 as its authors' code for training does."""

    def __init__(
        self, path: Path, layer: str, parts: tuple[str, str, str, str], windowed: bool = True
    ) -> None:
        """Without `windowed` the layer has full attention, and rotates nothing beside windows."""
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager"
        ).double()
        stored = load_file(path / "model.safetensors")
        self.w = {name: tensor.double() for name, tensor in stored.items()}
        self.config, self.parts = self.model.config, parts
        self.layer = type(self.model.model.layers[0])(self.config, 0).double().eval()
        own = {n.removeprefix(layer): t for n, t in self.w.items() if n.startswith(layer)}
        self.layer.load_state_dict(own)
        self.windowed = windowed
        if not windowed:
            self.layer.self_attn.is_sliding = False

    def norm(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.w[f"{name}.weight"], self.config.rms_norm_eps)

    @torch.no_grad()
    def outputs(self, ids: list[int], states: Tensor) -> Tensor:
        """Run pairs of these tokens and the target's last states, before its norm. What an output
        is paired with is a state, so it has a last norm where states have one. [T, H]"""
        embed_norm, state_norm, product, last = self.parts
        embedded, states = self.w["model.embed_tokens.weight"][ids], states.double()
        if last:
            states = self.norm(states, "model.norm")
        pair = torch.cat((self.norm(embedded, embed_norm), self.norm(states, state_norm)), -1)
        x = (pair @ self.w[f"{product}.weight"].T)[None]
        positions = torch.arange(len(ids))
        distance = positions[:, None] - positions
        has_windows = self.windowed and hasattr(self.config, "layer_types")
        window = self.config.sliding_window if has_windows else None
        visible = (distance >= 0) & (distance < (window or len(ids)))
        mask = torch.zeros(visible.shape, dtype=x.dtype).masked_fill(~visible, -torch.inf)
        out = self.layer(
            x,
            attention_mask=mask[None, None],
            position_ids=positions[None],
            position_embeddings=self.model.model.rotary_emb(x, positions[None]),
        )
        out = (out[0] if isinstance(out, tuple) else out)[0]
        return self.norm(out, last) if last else out

    @torch.no_grad()
    def lm_head(self, outputs: Tensor) -> Tensor:
        normed = outputs if self.parts[-1] else self.norm(outputs, "model.norm")
        logits: Tensor = self.model.lm_head(normed)
        return logits


class BlockTwin(Twin):
    """Block drafters: DFlash and DSpark (2607.05147)."""

    def __init__(self, head: Any) -> None:
        super().__init__(head, head.config.layer)
        self.config = head.config
        self.outputs = functools.cache(self._outputs)

    def _outputs(self, tokens: tuple[int, ...], first: int = 0) -> Tensor:
        """Run the block after `tokens`, whose states are known from `first` on. [S, Hd]"""
        c = self.config
        states = states_of(tokens[:-1], c.aux_hidden_layers)[first:]
        context = self.norm(self.product(states, "fc"), "hidden_norm")
        x = self.embedded([tokens[-1], *[c.mask_token] * (c.block - 1)])
        positions = torch.arange(first, len(tokens) - 1 + c.block)
        for i in range(self.c.layers):
            at = f"layers.{i}."
            normed = self.norm(x, f"{at}input_layernorm")
            x = x + self.block_attention(i, normed, context, positions)
            x = x + self.mlp(self.norm(x, f"{at}post_attention_layernorm"), at)
        return self.norm(x, "norm")

    def block_attention(self, i: int, x: Tensor, context: Tensor, positions: Tensor) -> Tensor:
        """Attend from the slots x to all context and one another, unless a window forbids it."""
        c = self.c
        own = f"layers.{i}.self_attn."
        both = torch.cat((context, x))
        start = len(context)
        parts = (("q", x), ("k", both), ("v", both))
        q, k, v = (self.product(y, f"{own}{n}_proj").view(len(y), -1, c.head_dim) for n, y in parts)
        if c.qk_norm:
            q, k = self.norm(q, f"{own}q_norm"), self.norm(k, f"{own}k_norm")
        slots, keys = torch.arange(len(x))[:, None], torch.arange(len(both))[None]
        window = c.windows[i]
        masked = keys < (start - window if window else 0)
        if window and self.config.window_causal:
            masked = masked | (keys > start + slots)
        q, k = self.rotate(q, positions[start:]), self.rotate(k, positions)
        return self.product(self.attend(q, k, v, masked), f"{own}o_proj")

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        c, outputs = self.config, self.outputs(tokens, first)
        slot = len(path) + (0 if c.sample_from_anchor else 1)
        if c.own_head:
            logits = self.w["lm_head.weight"] @ outputs[slot]
        else:
            logits = self.view.head(outputs[slot, None])[0].double()
        if c.markov:
            logits = logits + self.markov_bias(outputs[: slot + 1], (*tokens, *path))
        return self.over_target_vocab(logits)

    def confidence(self, tokens: tuple[int, ...], path: tuple[int, ...]) -> float:
        """Return the confidence in the token after the path."""
        known = self.w["markov_head.markov_w1.weight"][(*tokens, *path)[-1]]
        read = torch.cat((self.outputs(tokens)[len(path)], known))
        return float(self.product(read, "confidence_head.proj").sigmoid())

    def markov_bias(self, outputs: Tensor, tokens: tuple[int, ...]) -> Tensor:
        """Return the Markov head's bias: outputs [slots up to this one, Hd], `tokens` before it."""
        kind, table = self.config.markov.kind, self.w["markov_head.markov_w1.weight"]
        known, rank = table[tokens[-1]], table.shape[1]
        if kind == "gated":
            gate = self.product(torch.cat((outputs[-1], known)), "markov_head.gate_proj").sigmoid()
            known = known * gate
        if kind == "rnn":
            state, before = torch.zeros(rank).double(), list(tokens[-len(outputs) :])
            if not self.config.sample_from_anchor:  # the anchor stands before its slot and the next
                before = [before[1] if len(before) > 1 else before[0], *before[1:]]
            for h, token in zip(outputs, before, strict=True):
                z = self.product(torch.cat((state, table[token], h)), "markov_head.joint_proj")
                gate, new, out = z[:rank].sigmoid(), z[rank : 2 * rank].tanh(), z[2 * rank :].tanh()
                state, known = gate * state + (1 - gate) * new, out
        return self.product(known, "markov_head.markov_w2")
