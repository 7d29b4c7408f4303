"""Model pairs: ordinary directories, the requested agreement, reproducible, complete or absent."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from forerun import ConfigError
from forerun.bench import pair as module
from forerun.bench.pair import Pair, accepted_tokens, is_looping, make_pair, next_eps
from forerun.bench.recipe import PairRecipe
from tests.bench.pairs import check_drafts, check_with_transformers, prompts_of
from tests.cli.test_main import run
from tests.tiny import PAIR

SMALL = dict(PAIR, vocab=300, prompts=2, prompt_tokens=16, agree=0.0)


def test_the_engine_speculates_with_a_pair(pair: Pair) -> None:
    prompts = prompts_of(pair)
    assert [len(p) for p in prompts] == [24] * 6 and len({tuple(p) for p in prompts}) == 6
    check_drafts(pair, 60, margin=0.5, dtype="float32", kv_tokens=1024)


def test_transformers_measures_the_same_agreement(pair: Pair) -> None:
    """The draft model consists of the first layer, the embedding and the head of the target."""
    target, draft = check_with_transformers(pair, 128, within=0.02)
    assert abs(pair.agreement.agree - 0.7) <= 0.03
    own, theirs = (model.model.layers[0].mlp.down_proj.weight for model in (draft, target))
    assert torch.equal(own, theirs) and torch.equal(draft.lm_head.weight, target.lm_head.weight)
    assert (len(draft.model.layers), len(target.model.layers)) == (1, 3)


def test_a_seed_gives_the_same_files(tmp_path: Path) -> None:
    def contents(name: str, seed: int) -> dict[str, bytes]:
        make_pair(tmp_path / name, PairRecipe(**SMALL, seed=seed))
        files = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        return {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files}

    one, again, other = contents("one", 3), contents("again", 3), contents("other", 4)
    assert one == again and one["prompts.json"] == other["prompts.json"]
    assert one["target/model.safetensors"] != other["target/model.safetensors"]


def test_a_vocabulary_larger_than_the_text(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "library_texts", lambda characters: ["x = 1\n"])
    make_pair(tmp_path / "pair", PairRecipe(**SMALL))
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "pair" / "draft")) == 300


def test_the_search_for_eps_takes_a_few_attempts() -> None:
    """The curve of the agreement has the form of measured ones; any start finds the value."""
    for start in (0.001, 0.1, 0.3, 2.0):
        eps = start
        tried = {0.0: 1.0}
        for _ in range(module.MAX_ATTEMPTS):
            tried[eps] = 1 / (1 + eps**1.3)
            if abs(tried[eps] - 0.8) <= 0.02:
                break
            eps = next_eps(tried, 0.8)
        assert abs(tried.get(eps, 0) - 0.8) <= 0.02


def test_an_unreachable_agreement_takes_the_nearest(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_ATTEMPTS", 2)
    lines: list[str] = []
    recipe = PairRecipe(**SMALL | {"agree": 0.0001, "tolerance": 1e-5})
    pair = make_pair(tmp_path / "pair", recipe, lines.append)
    assert any("was not reached" in line for line in lines)
    largest = max(float(line.split()[1].rstrip(":")) for line in lines if line.startswith("eps"))
    assert pair.eps == pytest.approx(largest, abs=1e-4)


def test_accepted_tokens_and_looping_texts() -> None:
    same = torch.tensor([[True, True, False, True]])
    assert accepted_tokens(same, 1) == 0.75 and accepted_tokens(same, 2) == pytest.approx(1.0)
    assert is_looping([1, 2, 3] * 40) and not is_looping(list(range(120)))


def test_a_failure_leaves_no_files(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "PairComparison", fail)
    with pytest.raises(KeyboardInterrupt):
        make_pair(tmp_path / "pair", PairRecipe(**SMALL))
    assert not list(tmp_path.iterdir())


def test_bench_pair_with_a_middle_model(tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "a" / "b"
    values = SMALL | {"middle_layers": 2}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    code, text, err = run(monkeypatch, capsys, "bench", "pair", "--out", str(out), "--json", *flags)
    pair = json.loads(text)
    assert code == 0 and not err and pair["recipe"]["vocab"] == 300
    assert all(0 <= share <= 1 for share in pair["middle"])
    parts = sorted(path.name for path in out.iterdir())
    assert parts == ["draft", "meta.json", "middle", "prompts.json", "target"]
    code, text, err = run(monkeypatch, capsys, "bench", "pair", "--out", str(out))
    assert (code, text, len(err.splitlines())) == (2, "", 1) and "not empty" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_layers": 24}, "not less than layers"),
        ({"middle_layers": 2}, "not between"),
        ({"heads": 6}, "kv_heads=4"),
        ({"head_dim": 15}, "odd"),
        ({"vocab": 100}, "from 259 up"),
        ({"agree": 1.0}, "agree=1.0"),
        ({"eps": 0.0}, "eps=0"),
        ({"eps": float("nan")}, "eps=nan"),
        ({"prompt_tokens": 5000}, "no room"),
    ],
)
def test_invalid_recipes(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PairRecipe(**options)
