"""Multi-token modules: files that cannot be are refused in one line, and targets draft with layers
of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM, LoadError, SamplingParams
from forerun.cache.attention import Segment
from forerun.draft.eagle.mtp import load_module, save_module
from forerun.draft.eagle.proposer import EagleProposer
from forerun.draft.proposer import DraftRequest, view_of
from forerun.models.rope import rope_tables
from forerun.runtime.torch_runner import Runner
from forerun.verify import Noise
from tests import tiny
from tests.draft.heads import ROOM
from tests.draft.published import change, damage
from tests.draft.twins import target

BROKEN = {
    "another kind": (lambda d: change(d, speculators_model_type="eagle3"), "does not describe"),
    "several layers": (lambda d: change(d, num_nextn_predict_layers=3), "3 layers"),
    "no layer": (lambda d: change(d, transformer_layer_config=None), "does not describe"),
    "a tensor less": (lambda d: damage(d, "mtp_layers.0.input_proj.weight"), "input_proj"),
    "another shape": (
        lambda d: damage(d, "mtp_layers.0.input_proj.weight", torch.zeros(3, 3)),
        r"\[3, 3\]",
    ),
    "no file": (lambda d: (d / "model.safetensors").unlink(), "neither"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_directories_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    save_module(tiny.mtp("llama"), tmp_path, None, torch.float32)
    breaking, says = BROKEN[case]
    breaking(tmp_path)
    with pytest.raises(LoadError, match=says) as error:
        load_module(tmp_path, target())
    assert "\n" not in str(error.value)


LISTED = {
    "another number": (lambda d: change(d, draft_vocab_size=41), "41, but its head has 40 rows"),
    "no map": (lambda d: damage(d, "d2t"), "no d2t"),
    "no order": (lambda d: damage(d, "d2t", torch.arange(40).flip(0)), "ascending"),
    "past the end": (lambda d: damage(d, "d2t", torch.full((40,), 25)), "ascending"),
    "no head": (lambda d: damage(d, "lm_head.weight"), "40, but its head has 64 rows"),
    "too large a head": (lambda d: (change(d, draft_vocab_size=65), damage(d, "lm_head.weight", torch.zeros(65, 32))),
                         "65 tokens, more than the 64"),
}  # fmt: skip


@pytest.mark.parametrize("case", LISTED)
def test_maps_of_tokens_that_cannot_be_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    save_module(tiny.mtp("llama", draft_vocab=40), tmp_path, None, torch.float32)
    breaking, says = LISTED[case]
    breaking(tmp_path)
    with pytest.raises(LoadError, match=says) as error:
        load_module(tmp_path, target())
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- out of a target's own checkpoint


def mimo(directory: Path, **changed: Any) -> Path:
    """A tiny MiMo: a Qwen2 with a layer behind it, which joins states and embeddings in that
    order."""
    tiny.hf_model("qwen2", tie_word_embeddings=False, use_sliding_window=False).save_pretrained(
        directory
    )
    raw = json.loads((directory / "config.json").read_text())
    own = {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": 1,
    }
    (directory / "config.json").write_text(json.dumps(raw | own | changed))
    held, before, hidden = (
        load_file(directory / "model.safetensors"),
        "model.mtp_layers.0.",
        raw["hidden_size"],
    )
    torch.manual_seed(5)
    layer = {name.replace("model.layers.1.", before): torch.randn_like(tensor) * 0.5
             for name, tensor in held.items() if name.startswith("model.layers.1.")}  # fmt: skip
    layer |= {
        f"{before}{name}_layernorm.weight": 1 + 0.1 * torch.randn(hidden)
        for name in ("token", "hidden", "final")
    }
    layer[f"{before}input_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.5
    save_file(held | layer, directory / "model.safetensors")
    return directory


def own_logits(path: Path, tokens: list[int]) -> Tensor:
    """What MiMo's layer says after the last of these tokens, written out from its checkpoint.
    [V]"""
    w = {name: tensor.double() for name, tensor in load_file(path / "model.safetensors").items()}
    decoder, n = tiny.decoder(path), len(tokens)
    c = decoder.config
    runner = Runner(decoder, tokens=64, page=64, slots=1)
    runner.cache.pages.grow(0, n)
    segment = Segment(0, tokens[:-1], list(range(-1, n - 2)), [])
    states = runner.forward([segment], (c.layers,)).features[c.layers].double()

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * w[name]

    def product(x: Tensor, name: str) -> Tensor:
        bias = w.get(f"model.mtp_layers.0.{name}.bias")
        return x @ w[f"model.mtp_layers.0.{name}.weight"].T + (0 if bias is None else bias)

    own = "model.mtp_layers.0."
    before = rms(rms(states, "model.norm.weight"), f"{own}hidden_layernorm.weight")
    embedded = rms(w["model.embed_tokens.weight"][tokens[1:]], f"{own}token_layernorm.weight")
    x = product(torch.cat((before, embedded), -1), "input_proj")
    y = rms(x, f"{own}input_layernorm.weight")
    q, k, v = (product(y, f"self_attn.{part}_proj").view(n - 1, -1, c.head_dim) for part in "qkv")
    cos, sin = (table[: n - 1] for table in rope_tables(c, c.ropes[0], 64, torch.float64))
    q, k = (
        torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        for a, b in (q.chunk(2, -1), k.chunk(2, -1))
    )
    share, heads = c.heads // c.kv_heads, []
    for h in range(c.heads):
        scores = (q[:, h] @ k[:, h // share].T / c.head_dim**0.5).masked_fill(
            torch.ones(n - 1, n - 1).triu(1) > 0, -9e9
        )
        heads.append(scores.softmax(-1) @ v[:, h // share])
    x = x + product(torch.cat(heads, -1), "self_attn.o_proj")
    y = rms(x, f"{own}post_attention_layernorm.weight")
    x = x + product(
        torch.nn.functional.silu(product(y, "mlp.gate_proj")) * product(y, "mlp.up_proj"),
        "mlp.down_proj",
    )
    return rms(x, f"{own}final_layernorm.weight")[-1] @ w["lm_head.weight"].T


def test_a_target_s_own_layer_says_what_it_says(tmp_path: Path) -> None:
    """Its biases, its norms, and the state before the embedding; the target does without it."""
    path, tokens = mimo(tmp_path / "mimo"), [5, 6, 7, 9, 11, 3]
    view = view_of(tiny.decoder(path))
    drafter = EagleProposer("mtp", load_module(path, view).double(), view, **ROOM)
    module, runner = drafter.head, Runner(tiny.decoder(path), tokens=64, page=64, slots=1)
    runner.cache.pages.grow(0, 6)
    shown = runner.forward(
        [Segment(0, tokens[:-1], list(range(-1, 4)), [])], (view.layers,)
    ).features
    drafter.open(0, tokens)
    drafter.observe(0, 0, shown)
    row = DraftRequest(0, tokens, SamplingParams(), Noise(1, 5), 1)
    (draft,) = drafter.propose([row])
    said = module.logits(drafter._last[0][None])[0]
    expected = own_logits(path, tokens)
    assert torch.allclose(said, expected, rtol=1e-9, atol=1e-9)
    assert draft.tokens[1] == int(expected.argmax())


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_target_drafts_with_its_own_layer(kernels: str, tmp_path: Path) -> None:
    path = mimo(tmp_path / "mimo")
    llm = LLM(path, draft=f"mtp:{path}", kv_tokens=512, kernels=kernels)
    params = SamplingParams.pure(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True)
    drafted = llm.generate([5, 6, 7, 8], params, depth=3)[0]
    assert drafted.token_ids == llm.generate([5, 6, 7, 8], params, draft="off")[0].token_ids
    assert drafted.stats.by_source["mtp"].drafted > 20


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("none", "no multi-token layers"),
        ("another", "for itself alone"),
        ("torn", "has no mtp_layers.0.mlp"),
    ],
)
def test_a_layer_that_is_not_there_is_one_line(fault: str, says: str, tmp_path: Path) -> None:
    path = mimo(tmp_path / "mimo", **({"num_hidden_layers": 2} if fault == "another" else {}))
    held = load_file(path / "model.safetensors")
    lost = {"none": "mtp_layers", "torn": "mtp_layers.0.mlp"}.get(fault, "nothing")
    save_file(
        {name: tensor for name, tensor in held.items() if lost not in name},
        path / "model.safetensors",
    )
    whole = view_of(tiny.decoder(mimo(tmp_path / "whole")))
    with pytest.raises(LoadError, match=says) as error:
        load_module(path, whole)
    assert "\n" not in str(error.value)
