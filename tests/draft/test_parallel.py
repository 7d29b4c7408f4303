"""P-EAGLE: what each slot says is what the naive head says there, every layout is read, and no mask stays behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.draft import parallel
from forerun.draft.base import Row
from forerun.draft.eagle_format import load_head
from forerun.draft.eagle_head import EagleHead
from forerun.draft.parallel import ParallelPairs
from forerun.draft.registry import kind_of
from forerun.draft.view import TargetView
from forerun.engine.engine import Engine
from forerun.kernels import native
from forerun.runner import Runner
from forerun.verify import Noise
from tests import tiny
from tests.draft import test_eagle as eagle
from tests.draft.test_eagle import ROOM, states_of, target
from tests.engine import build

FIELDS = dict(
    model_type="llama", hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=64, max_position_embeddings=128, rms_norm_eps=1e-6,
)  # fmt: skip


class Naive(eagle.Naive):
    """The head written out again, over the whole text and all masks: no cache, everything anew for each draft."""

    def plain(self, x: Tensor, at: str) -> Tensor:
        c = self.config.layer
        y = self.norm(x, f"{at}input_layernorm")
        q, k, v = ((y @ self.w[f"{at}self_attn.{n}_proj.weight"].T).view(len(x), -1, c.head_dim) for n in "qkv")
        if c.qk_norm:
            q, k = self.norm(q, f"{at}self_attn.q_norm"), self.norm(k, f"{at}self_attn.k_norm")
        x = x + self.attend(q, k, v).flatten(1) @ self.w[f"{at}self_attn.o_proj.weight"].T
        y = self.norm(x, f"{at}post_attention_layernorm")
        gate, up = (y @ self.w[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return x + (gate / (1 + (-gate).exp()) * up) @ self.w[f"{at}mlp.down_proj.weight"].T

    def levels(self, tokens: tuple[int, ...], depth: int, first: int) -> Tensor:
        """Logits of the levels of a draft, over the head's own tokens, at the target's ids. [depth, V]"""
        features = states_of(tokens[:-1], self.config.boundaries)[first:]
        masks = self.w["mask_hidden"].view(1, -1).expand(depth - 1, -1)
        ids = [*tokens[first + 1 :], *[self.config.mask_token] * (depth - 1)]
        if self.config.own_embedding:
            embedded = self.w["embed_tokens.weight"][ids]
        else:
            embedded = self.view.embed(torch.tensor(ids)).double()
        x = self.layer(embedded, self.fuse(torch.cat((features, masks))))
        for i in range(1, self.config.layer.layers):
            x = self.plain(x, f"layers.{i}.")
        said = self.norm(x[-depth:], "norm") @ self.w["lm_head.weight"].T
        full = torch.full((depth, self.view.vocab), -torch.inf, dtype=torch.float64)
        offsets = self.w.get("d2t", torch.zeros(said.shape[1], dtype=torch.int64))
        full[:, (torch.arange(said.shape[1]) + offsets).long()] = said
        return full


SHAPES: dict[str, dict[str, Any]] = {
    "as published": {"layers": 4},
    "one layer": {"layers": 1},
    "all norms": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "norm before fc, some tokens": {"norm_before_fc": True, "draft_vocab": 40},
    "qwen3, the target's embedding": {"layer": {"model_type": "qwen3", "head_dim": 16}, "own_embedding": False},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [1, 3])
def test_every_level_has_the_logits_of_the_naive_head(shape: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the engine, in small chunks and with preemption, chains and trees, whatever was accepted before."""
    same_as_naive(tiny.parallel("llama", **SHAPES[shape]), width, monkeypatch)


def test_windows_of_some_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.parallel("llama").config
    windowed = tiny.eagle(replace(config, layer=replace(config.layer, windows=(4, 4))))
    same_as_naive(windowed, 1, monkeypatch)


def same_as_naive(head: EagleHead, width: int, patch: pytest.MonkeyPatch) -> None:
    seen, grow_all = [], parallel.grow_all
    decoder = tiny.decoder(tiny.family("llama"))
    drafter = ParallelPairs("eagle3", head.double(), target(), **ROOM | {"tokens": 160}, width=width)

    def seeing(trees: list[Any], said: list[Tensor], *rest: Any) -> None:
        for tree, laws in zip(trees, said, strict=True):
            first = drafter.waiting[tree.row.slot].begin
            seen.append((tuple(tree.row.tokens), tree.row.depth, first, laws.clone()))
        grow_all(trees, said, *rest)

    patch.setattr(parallel, "grow_all", seeing)
    patch.setattr("forerun.draft.features.CHUNK", 5)
    engine = Engine(Runner(decoder, **ROOM | {"tokens": 112}), {"parallel": drafter}, chunk=3)
    requests = [
        engine.add(build.prompts()[i], build.params(i, 0.8, 9), draft="parallel", depth=1 + i) for i in (0, 2, 3)
    ]
    build.finish(engine)
    assert sum(request.stats.drafted for request in requests) > 20
    naive = Naive(head, target())
    for tokens, depth, first, laws in seen[::2]:
        expected = naive.levels(tokens, depth, first)
        assert torch.equal(laws.isinf(), expected.isinf())
        assert torch.allclose(laws, expected, rtol=1e-6, atol=1e-6), (len(tokens), depth, first)


def drafted(head: EagleHead, view: TargetView, tokens: tuple[int, ...], depths: tuple[int, ...]) -> list[list[int]]:
    """Drafts one after the other, of a text that gets a token longer each time."""
    drafter, result = ParallelPairs("eagle3", head, view, **ROOM), []
    drafter.open(0, tokens)
    generator = torch.Generator().manual_seed(3)
    states = {b: torch.randn(len(tokens), view.hidden, generator=generator) for b in drafter.boundaries}
    shown = 0
    for more, depth in enumerate(depths):
        text = tokens[: len(tokens) - len(depths) + 1 + more]
        drafter.observe(0, shown, {b: s[shown : len(text) - 1] for b, s in states.items()})
        shown = len(text) - 1
        row = Row(0, text, SamplingParams(temperature=0.8), Noise(1, shown), depth)
        first, again = (drafter.propose([row])[0].tokens for _ in range(2))
        assert first == again, "proposing changes nothing"
        result.append(first)
    return result


def test_a_deeper_draft_begins_like_a_shallower_one() -> None:
    """And what the masks left does not show in the next round."""
    head, tokens = tiny.parallel("llama"), (5, 6, 7, 8, 9, 10, 11, 12)
    shallow, deep = (drafted(head, target(), tokens, depths) for depths in ((1, 1, 2), (7, 5, 6)))
    assert [len(d) for d in deep] == [8, 6, 7]
    assert [d[: len(s)] for d, s in zip(deep, shallow, strict=True)] == shallow


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_on_the_native_kernels(form: str) -> None:
    """The same drafts in float32; in int8 they may differ, and the text cannot."""
    if native.library() is None:
        pytest.skip("the native kernels were not compiled")
    native.start(2)
    head, tokens = tiny.parallel("llama", draft_vocab=40), (5, 6, 7, 8, 9, 10, 11, 12)
    plain, fast = (drafted(head, view, tokens, (4, 1, 3)) for view in (target(), replace(target(), form=form)))
    assert plain == fast if form == "float32" else [len(d) for d in plain] == [len(d) for d in fast]


# ---------------------------------------------------------------- on disk


def publish(directory: Path, head: EagleHead, raw: dict[str, Any], rename: str = "") -> Path:
    directory.mkdir()
    named = {n.replace("layers.0.", rename) if rename else n: t.clone() for n, t in head.state_dict().items()}
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(named, directory / "model.safetensors")
    return directory


IDS = {"eagle_aux_hidden_state_layer_ids": [2, 0, 3]}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "speculators": (
        {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": 3,
         "transformer_layer_config": FIELDS | {"num_hidden_layers": 2}, "draft_vocab_size": 40, **IDS}, {}, "",
    ),
    "speculators, with norms": (
        {"speculators_model_type": "peagle", "mask_token_id": 3, "norm_before_residual": True, "fc_norm": True,
         "transformer_layer_config": FIELDS | {"num_hidden_layers": 2}, **IDS},
        {"norm_before_residual": True, "fc_norm": True}, "",
    ),
    "vLLM": (
        FIELDS | {"architectures": ["PeagleLlamaForCausalLM"], "num_hidden_layers": 2, "pard_token": 3,
                  "parallel_drafting": True, "eagle_config": IDS}, {}, "midlayer.",
    ),
    "SpecForge": (
        FIELDS | {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 2, "mask_token_id": 3, **IDS}, {}, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_head_is_read_as_it_is(layout: str, tmp_path: Path) -> None:
    raw, changes, rename = LAYOUTS[layout]
    head = tiny.parallel("llama", draft_vocab=40, **changes)
    loaded = load_head(publish(tmp_path / "head", head, raw, rename), target())
    assert kind_of(tmp_path / "head") == "eagle3"
    assert {n: t.tolist() for n, t in loaded.state_dict().items()} == {
        n: t.tolist() for n, t in head.state_dict().items()
    }
    unlike = {"layer"}
    for name in type(head.config).__dataclass_fields__.keys() - unlike:
        assert getattr(loaded.config, name) == getattr(head.config, name), name
    assert loaded.layer.layers == 2


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("width", [1, 2])
def test_a_user_s_head(kernels: str, width: int, tmp_path: Path) -> None:
    """From a directory, beside plain decoding."""
    raw, _, rename = LAYOUTS["vLLM"]
    directory = publish(tmp_path / "head", tiny.parallel("llama"), raw, rename)
    llm = LLM(tiny.family("llama"), draft=f"eagle3:{directory}", kv_tokens=512, kernels=kernels, width=width)
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=30, temperature=temperature, seed=1, ignore_eos=True)
        told = llm.generate([5, 6, 7, 8], params, depth=3)[0]
        assert told.token_ids == llm.generate([5, 6, 7, 8], params, draft="off")[0].token_ids
        assert told.stats.by_source["eagle3"].drafted > 20
