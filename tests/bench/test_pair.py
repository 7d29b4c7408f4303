"""Measuring pairs: ordinary model directories, the agreement that was asked for, the same again,
all or nothing."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from forerun import LLM, ConfigError, SamplingParams
from forerun.bench import pair as module
from forerun.bench.pair import Pair, draw_weights, make_pair, next_eps, scaled
from forerun.bench.recipe import PairRecipe
from forerun.models.decoder import load_decoder
from tests.cli.test_main import run
from tests.tiny import PAIR

SMALL = dict(PAIR, vocab=300, prompts=2, prompt_tokens=16, agree=0.0)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def test_the_engine_loads_and_speculates_with_it(pair: Pair) -> None:
    llm = LLM(
        pair.directory / "target",
        draft=f"model:{pair.directory / 'draft'}",
        dtype="float32",
        kv_tokens=1024,
    )
    prompts = json.loads((pair.directory / "prompts.json").read_text())["prompts"]
    assert [len(p) for p in prompts] == [24] * 6 and len({tuple(p) for p in prompts}) == 6
    params = SamplingParams.pure(max_tokens=60, ignore_eos=True)
    plain = llm.generate(prompts, params, draft="off")
    fast = llm.generate(prompts, params, depth=4)
    assert [c.token_ids for c in plain] == [c.token_ids for c in fast]
    length = sum(c.stats.completion_tokens for c in fast) / sum(c.stats.steps for c in fast)
    # the depth of a draft is cut short at the end of an output, hence the room below
    assert pair.agreement.accepted[4] + 1 - 0.6 < length < pair.agreement.accepted[4] + 1 + 0.4


def test_transformers_loads_it_and_agrees_on_the_agreement(pair: Pair) -> None:
    """Greedy text and agreement as transformers has them; our own logits are the same."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    target, draft = (
        load(pair.directory / part, dtype=torch.float32).eval() for part in ("target", "draft")
    )
    prompts = torch.tensor(json.loads((pair.directory / "prompts.json").read_text())["prompts"])
    with torch.inference_mode():
        texts = target.generate(prompts, max_new_tokens=128, do_sample=False, eos_token_id=None)
        said = texts[:, prompts.shape[1] :]
        drafted = draft(texts[:, :-1]).logits[:, prompts.shape[1] - 1 :].argmax(-1)
    assert abs((drafted == said).float().mean().item() - pair.agreement.agree) < 0.02
    assert abs(pair.agreement.agree - 0.7) <= 0.03
    assert pair.agreement.positions == said.numel()
    tokenizer = transformers.AutoTokenizer.from_pretrained(pair.directory / "target")
    assert len(tokenizer) == 512 == target.config.vocab_size
    assert (
        tokenizer.decode(tokenizer("def f(x):\n    return x")["input_ids"])
        == "def f(x):\n    return x"
    )


def test_the_draft_is_the_start_of_the_target(pair: Pair) -> None:
    cpu = torch.device("cpu")
    target, draft = (
        load_decoder(pair.directory / part, torch.float32, cpu) for part in ("target", "draft")
    )
    for mine, theirs in zip(draft.weights.layers, target.weights.layers, strict=False):
        assert torch.equal(mine.qkv.weight, theirs.qkv.weight) and torch.equal(
            mine.down.weight, theirs.down.weight
        )
    assert torch.equal(draft.weights.head.weight, target.weights.head.weight)
    assert len(draft.weights.layers) == 1 and len(target.weights.layers) == 3
    base = draw_weights(pair.recipe)
    name = "model.layers.2.mlp.down_proj.weight"
    assert torch.equal(
        scaled(base, pair.recipe, pair.eps)[name], (base[name].float() * pair.eps).bfloat16()
    )


def test_a_seed_gives_the_same_files(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("again", 3), ("other", 4)):
        make_pair(tmp_path / name, PairRecipe(**SMALL, seed=seed))
    one, again, other = (contents(tmp_path / name) for name in ("one", "again", "other"))
    assert one == again
    assert one["target/model.safetensors"] != other["target/model.safetensors"]
    assert one["prompts.json"] == other["prompts.json"]


def test_more_tokens_than_the_library_has_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "library_texts", lambda characters: ["x = 1\n"])
    make_pair(tmp_path / "pair", PairRecipe(**SMALL))
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "pair" / "draft")) == 300


def test_the_defaults_are_the_measuring_pair() -> None:
    r = PairRecipe()
    attention = r.hidden * (2 * r.heads + 2 * r.kv_heads) * r.head_dim
    total = r.layers * (attention + 3 * r.hidden * r.intermediate + 2 * r.hidden) + r.hidden * (
        2 * r.vocab + 1
    )
    assert (round(total / 1e6), r.draft_layers, r.prompt_tokens) == (287, 3, 128)
    assert (r.agree, r.eps, r.beta, r.nsucc, r.temp, r.qk) == (0.8, 0.19, 1.5, 2, 2.0, 1.2)


def test_the_search_for_eps() -> None:
    """A curve that falls as measured ones do: found in a few tries from either side, whatever the
    first guess."""
    for first in (0.001, 0.1, 0.3, 2.0):
        eps, tried = first, {0.0: 1.0}
        for _ in range(module.ROUNDS):
            tried[eps] = 1 / (1 + eps**1.3)
            if abs(tried[eps] - 0.8) <= 0.02:
                break
            eps = next_eps(tried, 0.8)
        assert abs(tried.get(eps, 0) - 0.8) <= 0.02


def test_an_agreement_out_of_reach_takes_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROUNDS", 2)
    lines: list[str] = []
    made = make_pair(
        tmp_path / "pair", PairRecipe(**SMALL | {"agree": 0.0001, "tolerance": 1e-5}), lines.append
    )
    assert any("was not reached" in line for line in lines)
    largest = max(float(line.split()[1].rstrip(":")) for line in lines if line.startswith("eps"))
    assert made.eps == pytest.approx(largest, abs=1e-4)
    assert (
        json.loads((tmp_path / "pair" / "meta.json").read_text())["measured"]["agree"]
        == made.agreement.agree
    )


def test_nothing_is_left_of_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "Judge", fail)
    with pytest.raises(KeyboardInterrupt):
        make_pair(tmp_path / "pair", PairRecipe(**SMALL))
    assert not list(tmp_path.iterdir())


def test_what_is_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("precious")
    code, out, err = run(monkeypatch, capsys, "bench", "pair", "--out", str(tmp_path))
    assert (code, out, len(err.splitlines())) == (2, "", 1) and "not empty" in err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_the_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into an empty directory that exists, with parents that do not."""
    out = tmp_path / "a" / "b"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    code, text, err = run(monkeypatch, capsys, "bench", "pair", "--out", str(out), "--json", *flags)
    assert code == 0 and not err
    assert (
        json.loads(text)["recipe"]["vocab"] == 300
        and (out / "target" / "model.safetensors").is_file()
    )
    assert [p.name for p in out.parent.iterdir()] == ["b"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draft_layers": 24}, "not under layers"),
        ({"heads": 6}, "kv_heads=4"),
        ({"head_dim": 15}, "odd"),
        ({"vocab": 100}, "from 259 up"),
        ({"agree": 1.0}, "agree=1.0"),
        ({"eps": 0.0}, "eps=0"),
        ({"eps": float("nan")}, "eps=nan"),
        ({"prompt_tokens": 5000}, "no room"),
    ],
)
def test_recipes_that_cannot_be(options: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PairRecipe(**options)
