"""EAGLE-1 and EAGLE-2 heads: drafted tokens are the naive head's, both layouts are read, others refused in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM, LoadError, SamplingParams
from forerun.draft import pairs
from forerun.draft.eagle1 import FirstHead, load_first_head
from forerun.draft.pairs import Pairs
from forerun.draft.registry import kind_of
from forerun.draft.view import TargetView, view_of
from forerun.engine.engine import Engine
from forerun.models.rope import rope_tables
from forerun.runner import Runner
from tests import tiny
from tests.draft.test_mtp import last_states
from tests.engine import build

ROOM = {"tokens": 1024, "page": 4, "slots": 8}
FIELDS = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=64, max_position_embeddings=128, rms_norm_eps=1e-6,
)  # fmt: skip


def target() -> TargetView:
    return view_of(tiny.decoder(tiny.family("llama")))


class Naive:
    """The head written out from the paper: no cache, everything anew for each path."""

    def __init__(self, head: FirstHead) -> None:
        self.c, self.w = head.layer, {n.removeprefix("layers.0."): w for n, w in head.double().state_dict().items()}
        self.cos, self.sin = rope_tables(self.c, self.c.ropes[0], 256, torch.float64)
        self.decoder = tiny.decoder(tiny.family("llama"))
        self.table = self.w.get("embed_tokens.weight", self.decoder.weights.embed)

    def product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = self.cos[: len(x), 0], self.sin[: len(x), 0]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (self.product(x, f"self_attn.{n}_proj").view(len(x), -1, self.c.head_dim) for n in "qkv")
        heads, ahead = [], torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        for h in range(self.c.heads):
            shared = h // (self.c.heads // self.c.kv_heads)
            scores = self.rotate(q[:, h]) @ self.rotate(k[:, shared]).T / self.c.head_dim**0.5
            heads.append(scores.masked_fill(ahead, -torch.inf).softmax(-1) @ v[:, shared])
        return self.product(torch.cat(heads, -1), "self_attn.o_proj")

    def made(self, ids: list[int], states: Tensor) -> Tensor:
        x = self.product(torch.cat((self.table[ids], states), -1), "fc")
        x = x + self.attention(x)
        y = x / (x.pow(2).mean(-1, keepdim=True) + self.c.norm_eps).sqrt() * self.w["post_attention_layernorm.weight"]
        gate, up = self.product(y, "mlp.gate_proj"), self.product(y, "mlp.up_proj")
        return x + self.product(gate / (1 + (-gate).exp()) * up, "mlp.down_proj")

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        """After the last token of the path: states are the target's for what is committed, then the head's own."""
        ids, states = list(tokens[1:]), last_states(tokens[:-1])
        for token in path:
            states = torch.cat((states, self.made(ids, states)[-1:]))
            ids.append(token)
        return self.made(ids, states)[-1] @ self.decoder.weights.head.weight.T


SHAPES = {
    "as published": {}, "without a bias": {"bias": False}, "biases of queries, keys and values": {"qkv_bias": True},
    "an embedding of its own": {"own": True},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [1, 3])
def test_every_node_has_the_logits_of_the_naive_head(shape: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the engine, in small chunks, chains and trees."""
    seen, grow = [], pairs.grow

    def seeing(trees: list[Any], logits: Tensor, *rest: Any) -> None:
        nodes = [(tree, node) for tree in trees for node in tree.frontier]
        for (tree, node), row in zip(nodes, logits, strict=True):
            path = tuple(tree.draft.tokens[i] for i in tree.draft.path_to(node)[1:])
            seen.append((tuple(tree.row.tokens), path, row.clone()))
        grow(trees, logits, *rest)

    monkeypatch.setattr(pairs, "grow", seeing)
    head, decoder = tiny.eagle1("llama", **SHAPES[shape]).double(), tiny.decoder(tiny.family("llama"))
    proposer = Pairs("eagle", head, view_of(decoder), **ROOM, width=width)
    engine = Engine(Runner(decoder, **ROOM), {"eagle": proposer}, chunk=5)
    requests = [engine.add(build.prompts()[i], build.params(i, 0.8, 7), draft="eagle", depth=3) for i in (2, 3)]
    build.finish(engine)
    assert sum(request.stats.drafted for request in requests) > 20
    naive = Naive(head)
    for tokens, path, row in seen[::width]:
        # the embedding comes in float32
        assert torch.allclose(row, naive.logits(tokens, path), rtol=1e-6, atol=1e-6), (len(tokens), path)


# ---------------------------------------------------------------- on disk


def write(directory: Path, head: FirstHead, name: str = "model.safetensors", **fields: Any) -> Path:
    """A directory as their authors publish it: a copy of the target's embedding is in it."""
    directory.mkdir(exist_ok=True)
    tensors = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    tensors.setdefault("embed_tokens.weight", target().embed(torch.arange(64)).half())
    (directory / "config.json").write_text(json.dumps(FIELDS | fields))
    save_file(tensors, directory / name) if name.endswith("safetensors") else torch.save(tensors, directory / name)
    return directory


def wrapped(directory: Path, head: FirstHead, **fields: Any) -> Path:
    """The same with the fields of the layer apart, as vLLM has it."""
    write(directory, head)
    raw = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": FIELDS | fields}
    (directory / "config.json").write_text(json.dumps(raw))
    tensors = load_file(directory / "model.safetensors")
    renamed = {n if n.startswith("fc") else f"model.{n}": t for n, t in tensors.items() if "embed" not in n}
    save_file(renamed, directory / "model.safetensors")
    return directory


LAYOUTS: dict[str, tuple[dict[str, bool], Callable[[Path, FirstHead], Path]]] = {
    "their authors'": ({}, write),
    "pickled": ({}, lambda d, h: write(d, h, "pytorch_model.bin")),
    "without a bias": ({"bias": False}, lambda d, h: write(d, h, bias=False)),
    "for Qwen2": ({"qkv_bias": True}, lambda d, h: write(d, h, qkv_bias=True, model_type="qwen2")),
    "an embedding of its own": ({"own": True}, write),
    "vLLM's": ({}, wrapped),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_head_is_read_as_it_is(layout: str, tmp_path: Path) -> None:
    """And told from a model by its files alone."""
    options, publish = LAYOUTS[layout]
    head = tiny.eagle1("llama", **options)
    directory = publish(tmp_path / "head", head)
    assert kind_of(directory) == "eagle"
    loaded = load_first_head(directory, target())
    assert {n: t.tolist() for n, t in loaded.state_dict().items()} == {
        n: t.tolist() for n, t in head.state_dict().items()
    }
    assert (loaded.layer.ropes, loaded.layer.norm_eps) == (head.layer.ropes, 1e-6)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("width", [1, 2])
def test_a_user_s_head(kernels: str, width: int, tmp_path: Path) -> None:
    """From a directory, beside plain decoding."""
    directory = write(tmp_path / "head", tiny.eagle1("llama"))
    llm = LLM(tiny.family("llama"), draft=f"eagle:{directory}", kv_tokens=512, kernels=kernels, width=width)
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=30, temperature=temperature, seed=1, ignore_eos=True)
        drafted = llm.generate([5, 6, 7, 8], params, depth=3)[0]
        assert drafted.token_ids == llm.generate([5, 6, 7, 8], params, draft="off")[0].token_ids
        assert drafted.stats.by_source["eagle"].drafted > 20


def change(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def drop(directory: Path, name: str, value: Tensor | None = None) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors if value is None else tensors | {name: value}, directory / "model.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tensor less": (lambda d: drop(d, "layers.0.mlp.up_proj.weight"), "up_proj"),
    "nothing that joins": (lambda d: drop(d, "fc.weight"), "fc.weight"),
    "another shape": (lambda d: drop(d, "layers.0.self_attn.o_proj.weight", torch.zeros(3, 3)), r"\[3, 3\]"),
    "a norm too many": (lambda d: drop(d, "layers.0.input_layernorm.weight", torch.ones(32)), "input_layernorm"),
    "a bias too many": (lambda d: change(d, bias=False), "fc.bias"),
    "a bias too few": (lambda d: change(d, qkv_bias=True), "k_proj.bias"),
    "no flag": (lambda d: change(d, bias="yes"), "true or false"),
    "wider states": (lambda d: drop(d, "fc.weight", torch.zeros(32, 96)), "reads 96 numbers"),
    "another vocabulary": (lambda d: (change(d, vocab_size=65), drop(d, "embed_tokens.weight")), "trained for it"),
    "an embedding of another size": (lambda d: drop(d, "embed_tokens.weight", torch.zeros(65, 32)), r"\[65, 32\]"),
    "two layers": (lambda d: change(d, num_hidden_layers=2), "2 layers"),
    "a head": (lambda d: drop(d, "lm_head.weight", torch.zeros(64, 32)), "eagle3:"),
    "no fields": (lambda d: change(d, model=[1]), "not an object"),
    "no file": (lambda d: (d / "model.safetensors").unlink(), "neither"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_directories_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "head", tiny.eagle1("llama"))
    breaking, says = BROKEN[case]
    breaking(directory)
    with pytest.raises(LoadError, match=says) as error:
        load_first_head(directory, target())
    assert "\n" not in str(error.value)
    assert kind_of(directory) in ("eagle", "eagle3", "model")
