"""Random model pairs in packed GGUF files: blocks, agreement, tensor types, readable files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.random import SFC64, Generator
from tokenizers import Tokenizer

from forerun import LLM, ConfigError, SamplingParams
from forerun.bench import packed_pair as module
from forerun.bench.packed_pair import (
    RandomModel,
    Successors,
    encode,
    grown_tokenizer,
    make_packed_pair,
    random_rows,
)
from forerun.bench.recipe import PairRecipe
from forerun.bench.shapes import (
    SHAPES,
    ModelShape,
    RandomTensor,
    named_shape,
    num_parameters,
    stored_type,
    tensors_of,
)
from forerun.load import load_tokenizer
from forerun.models.gguf.blocks import floats
from forerun.models.gguf.container import open_gguf
from tests.bench.pairs import check_drafts, check_with_transformers, prompts_of
from tests.cli.test_main import run

SMALL: dict[str, Any] = dict(
    layers=3, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=256, vocab=512,
    context=256, prompts=8, prompt_tokens=24, draft_layers=1,
)  # fmt: skip
MIXTURE: dict[str, Any] = SMALL | dict(experts=4, experts_per_token=2, expert_size=256)
HYBRID: dict[str, Any] = SMALL | dict(linear_heads=4, linear_key_heads=2, linear_head_dim=64)
PAIRS: dict[str, dict[str, Any]] = {
    "llama": SMALL | dict(format="q4_k_m"),
    "qwen3": SMALL | dict(format="q8_0", family="qwen3", agree=0.6),
    "qwen3moe": MIXTURE | dict(format="q4_k_m", agree=0.9),
    "qwen2moe": MIXTURE | dict(format="q8_0", shared_expert_size=64),
    "olmoe": MIXTURE | dict(format="mxfp4", family="olmoe", kv_heads=4),
    "gpt-oss": MIXTURE | dict(format="mxfp4", family="gpt-oss", heads=8),
    "qwen35": HYBRID | dict(format="q4_k_m", family="qwen35"),
    "qwen35moe": HYBRID | MIXTURE | dict(format="q8_0", family="qwen35moe", shared_expert_size=64),
    "bfloat16": MIXTURE,
    "shapes": SMALL | dict(format="q4_k_m", draft_shape="small"),
}
SMALL_SHAPE = dict(  # of a draft model; registered as "small" by a fixture
    family="qwen3", layers=1, hidden=288, heads=3, kv_heads=1, head_dim=96, intermediate=96,
    vocab=9, draft_layers=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL_SHAPE)


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "BF16", "F32"])
def test_random_blocks_have_the_requested_deviation(kind: str) -> None:
    for deviation in (0.02, 0.0031):
        tensor = RandomTensor("x", (300, 1024), deviation)
        rows = random_rows(kind, (300, 1024), tensor, Generator(SFC64(0)))
        values = floats(kind, rows)
        assert values.shape == (300, 1024) and values.isfinite().all()
        assert values.std().item() == pytest.approx(deviation, rel=0.02)
        assert values.mean().abs().item() < 0.02 * deviation
        assert len(values.unique(dim=0)) == 300


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_K", "Q6_K", "BF16", "F32"])
def test_codes_are_stored_exactly(kind: str) -> None:
    """The unit is exact in half precision, so nothing is rounded."""
    odd = 2 * Generator(SFC64(0)).integers(16, size=(5, 512), dtype=np.int8) - 15
    unit = 63 / 64 if kind == "Q4_K" else 0.25
    expected = torch.from_numpy(odd.astype(np.float32) * np.float32(unit))
    assert torch.equal(floats(kind, encode(kind, odd, unit)), expected)
    if kind not in ("Q5_0", "Q4_K"):
        wide = np.arange(-31, 33, dtype=np.int8).clip(max=31).repeat(8).reshape(1, -1)
        assert torch.equal(floats(kind, encode(kind, wide, 0.25)), torch.from_numpy(wide * 0.25))


# ---------------------------------------------------------------- pairs


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PAIRS)
def test_the_models_of_a_pair_have_the_requested_agreement(name: str, tmp_path: Path) -> None:
    recipe = PairRecipe(**PAIRS[name])
    pair = make_packed_pair(tmp_path / "pair", recipe)
    assert abs(pair.agreement.agree - recipe.agree) <= recipe.tolerance
    assert pair.measured_layers == recipe.layers and pair.agreement.looping == 0
    meta = json.loads((tmp_path / "pair" / "meta.json").read_text())
    assert meta["measured"]["agree"] == pair.agreement.agree and meta["eps"] is None
    prompts = prompts_of(pair)
    assert len({prompt[-1] for prompt in prompts}) == len(prompts) == 8
    texts = [tuple(c.token_ids) for c in check_drafts(pair, 48, margin=0.6, kv_tokens=2048)]
    assert len(set(texts)) == 8 and all(min(text) >= 3 for text in texts)


def test_layers_decide_between_equally_likely_successors(tmp_path: Path) -> None:
    """After a token with two equally likely successors, the text before it decides."""
    recipe = PairRecipe(**PAIRS["llama"] | dict(agree=0.0))
    pair = make_packed_pair(tmp_path / "pair", recipe)
    llm = LLM(pair.directory / pair.target, draft="off", kv_tokens=1024, max_rows=16)
    params = SamplingParams.pure(max_tokens=1, ignore_eos=True)
    prompts = [[*range(10 * i, 10 * i + 12), 200 + last] for last in range(8) for i in range(1, 9)]
    found = [c.token_ids[0] for c in llm.generate(prompts, params)]
    successors = [Counter(found[i : i + 8]) for i in range(0, 64, 8)]
    assert any(len(counts) == 2 for counts in successors)
    assert sum(max(counts.values()) for counts in successors) > 40


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["qwen3moe", "qwen2moe", "olmoe"])
def test_transformers_measures_the_same_agreement(name: str, tmp_path: Path) -> None:
    pair = make_packed_pair(tmp_path / "pair", PairRecipe(**PAIRS[name] | dict(format="bfloat16")))
    check_with_transformers(pair, 64, within=0.03)


def test_a_large_target_is_measured_with_fewer_layers(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "LARGEST_MEASURED", 0)
    recipe = PairRecipe(**PAIRS["qwen3moe"] | dict(vocab=2000, prompts=16))
    pair = make_packed_pair(tmp_path / "pair", recipe)
    assert pair.measured_layers == 2
    parts = sorted(path.name for path in pair.directory.iterdir())
    assert parts == ["draft.gguf", "meta.json", "prompts.json", "target.gguf"]
    comparison = module.PairComparison(
        pair.directory / pair.target,
        pair.directory / pair.draft,
        prompts_of(pair),
        tokens=64,
        is_packed=True,
    )
    assert abs(comparison.agree - 0.9) <= 0.05


def test_a_seed_gives_the_same_files(tmp_path: Path) -> None:
    def contents(name: str, seed: int) -> dict[str, bytes]:
        pair = make_packed_pair(tmp_path / name, PairRecipe(**PAIRS["gpt-oss"], seed=seed))
        return {part: (pair.directory / part).read_bytes() for part in (pair.target, pair.draft)}

    one, again, other = contents("one", 3), contents("again", 3), contents("other", 4)
    assert one == again and one["target.gguf"] != other["target.gguf"]


def test_an_unreachable_agreement_takes_the_nearest(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_ATTEMPTS", 1)
    lines: list[str] = []
    recipe = PairRecipe(**PAIRS["llama"] | {"agree": 0.95, "tolerance": 1e-6})
    pair = make_packed_pair(tmp_path / "pair", recipe, lambda *words: lines.append(words[0]))
    assert any("was not reached" in line for line in lines) and pair.agreement.agree > 0.8


def test_a_failure_leaves_no_files(tmp_path: Path, monkeypatch) -> None:
    usage = module.disk_usage(tmp_path)
    monkeypatch.setattr(module, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ConfigError, match="are free on its disk"):
        make_packed_pair(tmp_path / "pair", PairRecipe(**PAIRS["llama"]))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- files


def test_the_file_has_the_tensor_types_of_q4_k_m(tmp_path: Path) -> None:
    recipe = PairRecipe(**MIXTURE | dict(format="q4_k_m", layers=9))
    successors = Successors.draw(recipe)
    tokenizer = grown_tokenizer(recipe.vocab)
    path = tmp_path / "model.gguf"
    RandomModel(recipe, "q4_k_m", (0, 0), successors).write(path, tokenizer, lambda *_: None)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    kinds = {name: tensor.tensor_type.name for name, tensor in stored.items()}
    assert kinds == {name: entry.kind for name, entry in open_gguf(path).tensors.items()}
    for stem in ("attn_v", "ffn_down_exps"):
        by_layer = [kinds[f"blk.{i}.{stem}.weight"] for i in range(9)]
        larger = [i for i, kind in enumerate(by_layer) if kind == "Q6_K"]
        assert larger == [0, 3, 6, 7, 8] and set(by_layer) == {"Q4_K", "Q6_K"}
    assert kinds["token_embd.weight"] == kinds["blk.0.ffn_gate_exps.weight"] == "Q4_K"
    assert kinds["output.weight"] == "Q6_K" and kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    assert kinds["output_norm.weight"] == kinds["blk.0.attn_q_norm.weight"] == "F32"
    sizes = {name: tuple(tensor.shape.tolist()[::-1]) for name, tensor in stored.items()}
    assert sizes == {tensor.name: tensor.shape for tensor in tensors_of(recipe)}
    narrow = RandomTensor("blk.0.ffn_down.weight", (64, 96)), RandomTensor("x.weight", (64, 96))
    assert [stored_type(t, ModelShape(), "q4_k_m") for t in narrow] == ["Q8_0", "Q5_0"]
    deviations = {"blk.4.attn_q.weight": 1.2 / 16, "blk.4.ffn_up_exps.weight": 1 / 16}
    for name, deviation in deviations.items():
        values = gguf.dequantize(stored[name].data, stored[name].tensor_type)
        assert values.std() == pytest.approx(deviation, rel=0.02)


def test_tensors_are_generated_in_small_chunks(monkeypatch) -> None:
    monkeypatch.setattr(module, "CHUNK_VALUES", 1024)
    recipe = PairRecipe(**PAIRS["gpt-oss"])
    model = RandomModel(recipe, recipe.format, (0, 0), Successors.draw(recipe))
    for index, tensor in enumerate(model.tensors):
        parts = list(model._rows(tensor, index, 0.0))
        assert max(part.nbytes for part in parts) <= 4096
        assert sum(part.nbytes for part in parts) == model.stored_bytes(tensor)


def test_a_large_vocabulary_contains_joined_words(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "TRAINED_TOKENS", 600)
    tokenizer = grown_tokenizer(3000)
    path = tmp_path / "model.gguf"
    recipe = PairRecipe(**SMALL | dict(vocab=3000, format="q8_0"))
    model = RandomModel(recipe, "q8_0", (0, 0), Successors.draw(recipe))
    model.write(path, tokenizer, lambda *_: None)
    texts = ["def f(self):\n    return import_module(name)", " naïve\t\x00 text 1234"]
    stored = load_tokenizer(path)
    assert stored is not None
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert stored.encode(text) == ids and tokenizer.decode(ids) == text
    texts_of = [tokenizer.id_to_token(i) for i in range(3000)]
    assert len(set(texts_of)) == 3000 and texts_of[:3] == ["<s>", "</s>", "<pad>"]
    reached = sum(tokenizer.encode(text).tokens == [text] for text in texts_of[600:])
    assert reached > 1500  # the tokenizer splits the text of the others in another way


def test_a_vocabulary_larger_than_all_pairs_has_unused_tokens(monkeypatch) -> None:
    trained = Tokenizer.from_str(module.train_tokenizer(270).to_str())
    monkeypatch.setattr(module, "train_tokenizer", lambda vocab: trained)
    monkeypatch.setattr(module, "TRAINED_TOKENS", 270)
    tokenizer = grown_tokenizer(20000)
    assert tokenizer.get_vocab_size() == 20000
    kinds = module.gguf_tokenizer(tokenizer)["tokenizer.ggml.token_type"]
    assert set(kinds[:3]) == {3} and kinds[-1] == 5 and 0 < kinds.count(1) < 20000


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3-30b-a3b", 30.5, 3.0),
        ("gpt-oss-20b", 20.9, 3.6),
        ("olmoe-1b-7b", 6.9, 1.2),
        ("moe-3b", 2.5, 0.3),
        ("llama-3.1-8b", 8.0, 7.5),
        ("qwen3-8b", 8.2, 7.6),
        ("qwen3-4b", 4.4, 4.0),  # the published model's head is its embedding
        ("llama-3.2-1b", 1.5, 1.2),
        ("llama-3.2-3b", 3.6, 3.2),
        ("qwen3-0.6b", 0.75, 0.6),
        ("qwen3.5-0.8b", 1.0, 0.75),
        ("qwen3.5-4b", 4.84, 4.2),
        ("qwen3.6-35b-a3b", 34.7, 2.9),
    ],
)
def test_named_shapes_have_the_published_parameters(name: str, total: float, active: float) -> None:
    recipe = PairRecipe(**named_shape(name), format="q4_k_m")
    found = [size / 1e9 for size in num_parameters(recipe)]
    assert found == pytest.approx([total, active], abs=0.06) and recipe.is_packed


def test_bench_pair_with_a_named_shape(tmp_path: Path, monkeypatch, capsys) -> None:
    sizes = {"layers": 2, "hidden": 256, "vocab": 512, "experts": 4, "experts_per_token": 2}
    sizes |= {"expert_size": 64, "prompts": 4, "prompt_tokens": 24, "context": 128}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    words = ["bench", "pair", "--shape", "moe-3b", "--format", "q8_0", "--out"]
    code, text, _ = run(monkeypatch, capsys, *words, str(tmp_path / "a"), "--json", *flags)
    pair = json.loads(text)
    assert code == 0 and pair["recipe"]["heads"] == 16 and pair["recipe"]["layers"] == 2
    assert pair["recipe"]["family"] == "qwen3moe" and pair["measured"]["positions"] == 256
    code, text, _ = run(monkeypatch, capsys, *words, str(tmp_path / "b"), *flags)
    lines = text.splitlines()
    assert code == 0 and "M a token" in lines[0] and "eps" not in lines[0]
    assert f"--model {tmp_path / 'b' / 'target.gguf'}" in lines[-1]
    code, text, err = run(monkeypatch, capsys, "bench", "pair", "--out", "x", "--shape", "moe-3")
    assert (code, text, len(err.splitlines())) == (2, "", 1) and "did you mean 'moe-3b'" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "lama"}, "did you mean 'llama'"),
        ({"family": "gpt-oss", "format": "mxfp4"}, "has experts, but experts=0"),
        ({"family": "qwen3", "experts": 4}, "has no experts, but experts=4"),
        ({"experts": 4}, "experts_per_token=0 is out of range: give 1 to 4"),
        ({"experts": 4, "experts_per_token": 5}, "experts_per_token=5"),
        ({"experts": 4, "experts_per_token": 2}, "expert_size=0"),
        (MIXTURE | {"family": "olmoe"}, "kv_heads=2 contradicts heads=4"),
        (MIXTURE | {"family": "olmoe", "shared_expert_size": 64}, "qwen2moe and qwen35moe, and no"),
        (MIXTURE | {"family": "gpt-oss"}, "use format=q8_0"),
        ({"format": "q4"}, "format='q4'"),
        ({"format": "mxfp4"}, "use q4_k_m"),
        ({"format": "q8_0", "hidden": 100}, "hidden=100 is no multiple of 32"),
        ({"format": "q8_0", "eps": 0.5}, "eps is an option of pairs whose draft model"),
        ({"format": "q8_0", "middle_layers": 5}, "middle_layers is an option"),
        ({"draft_shape": "smal"}, "did you mean 'small'"),
        ({"draft_shape": "gpt-oss-20b"}, "use another draft_shape"),
        ({"family": "qwen3", "linear_heads": 4}, "linear_heads=4 contradicts family=qwen3"),
        ({"family": "qwen35"}, "linear_heads=0 contradicts family=qwen35"),
        (HYBRID | {"family": "qwen35"}, "qwen35 is not written in bfloat16"),
        (HYBRID | {"family": "qwen35", "linear_heads": 3}, "linear_heads=3 is no multiple"),
    ],
)
def test_invalid_recipes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PairRecipe(**options)
