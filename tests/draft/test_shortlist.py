"""Draft models that score part of the vocabulary: the text is the target's, and drafts are those of a
reference twin with the full lm head and -inf for all other tokens.

Also tested: the option and the file beside a model, both kernels, all rules, batches, models of
another vocabulary, and lists that do not fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, ConfigError, LoadError
from forerun.draft.draft_model import DraftModel, draft_model
from forerun.engine.engine import Engine
from forerun.models.files import SHORTLIST
from forerun.models.shortlist import Shortlist
from forerun.runtime.torch_runner import Runner
from forerun.types import Forward
from tests import other_vocabularies, tiny
from tests.draft.helpers import KERNELS, needs_native, pure_params, refused
from tests.engine import build

PROMPTS = [[5, 6, 7, 8], [9] * 6, [3, 1, 4, 1, 5]]
UNLISTED = [token for token in range(tiny.VOCAB) if token not in tiny.SHORTLIST]


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "list"
    Shortlist(torch.tensor(tiny.SHORTLIST), tiny.VOCAB).save(path)
    return path


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rule", ["match", "token", "block", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kernels", KERNELS)
def test_only_listed_tokens_are_drafted_and_the_text_is_unchanged(
    kernels: str, temperature: float, rule: str, listed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"kernels": kernels, "rule": rule, "kv_tokens": 1024, "depth": 4}
    draft = f"model:{tiny.drafter('llama')}"
    llm = LLM(tiny.family("llama"), draft=draft, draft_shortlist=str(listed), **options)
    proposer, drafted = llm.engine.proposers["model"], set()
    propose = proposer.propose

    def recording(requests: Any) -> Any:
        found = propose(requests)
        for each in found:
            drafted.update(each.tokens[1:])
            assert each.probs is None or not each.probs[:, UNLISTED].any()
        return found

    monkeypatch.setattr(proposer, "propose", recording)
    speculative = [c.token_ids for c in llm.generate(PROMPTS, pure_params(30, temperature, seed=3))]
    assert drafted <= set(tiny.SHORTLIST) and len(drafted) > 5
    plain = [
        c.token_ids
        for c in llm.generate(PROMPTS, pure_params(30, temperature, seed=3), draft="off")
    ]
    if rule == "match" or not temperature:
        assert speculative == plain
    assert {token for text in plain for token in text} & set(UNLISTED), "the drafter lacks some"


class Masked(Runner):
    """The reference twin: the full lm head, with -inf for unlisted tokens."""

    def forward(self, segments: Any, aux_hidden_layers: Any = ()) -> Forward:
        found = super().forward(segments, aux_hidden_layers)
        masked = found.logits.index_fill(1, torch.tensor(UNLISTED), -torch.inf)
        return Forward(masked, found.features)

    def draft_chains(self, links: Any, vocab: int) -> None:
        return None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rule", ["match", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kernels", KERNELS)
def test_drafts_are_those_of_the_full_head_without_unlisted_tokens(
    kernels: str, width: int, temperature: float, rule: str
) -> None:
    """Each request has the same tokens and the same numbers of drafted and accepted ones."""
    make: Any = tiny.decoder if kernels == "torch" else tiny.native_decoder
    room = {"tokens": 512, "page": 4, "slots": 8}
    target, small = tiny.family("llama"), tiny.drafter("llama")
    counted = []
    for runner in (
        Runner(make(small, shortlist=tiny.SHORTLIST), **room),
        Masked(make(small), **room),
    ):
        proposer = DraftModel(runner, tiny.VOCAB, width)
        engine = Engine(Runner(make(target), **room), {"model": proposer}, rule=rule, chunk=5)
        requests = build.run(engine, "model", temperature)
        counted.append([(list(r.output), r.stats.drafted, r.stats.accepted) for r in requests])
    assert counted[0] == counted[1]


def test_a_list_beside_a_model_is_used_and_an_option_comes_before_it(
    tmp_path: Path, listed: Path
) -> None:
    target = tiny.family("llama")
    directory = shutil.copytree(tiny.drafter("llama"), tmp_path / "draft")
    Shortlist(torch.tensor([3, 4, 5]), tiny.VOCAB).save(directory / SHORTLIST)
    for option, size in ((None, 3), (str(listed), len(tiny.SHORTLIST))):
        llm: Any = LLM(target, draft=f"model:{directory}", draft_shortlist=option, kv_tokens=512)
        assert len(llm.engine.proposers["model"].runner.decoder.shortlist) == size
    alone = LLM(directory, draft="suffix", kv_tokens=512)
    assert alone.decoder.shortlist is None, "a target predicts all tokens"


@needs_native
def test_a_target_that_drafts_for_itself(listed: Path) -> None:
    options: Any = {"draft_shortlist": str(listed), "kv_tokens": 512, "depth": 4}
    llm = LLM(tiny.family("llama"), draft="self:int8", **options)
    drafted = llm.generate(PROMPTS, pure_params(30, seed=3))
    plain = llm.generate(PROMPTS, pure_params(30, seed=3), draft="off")
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert sum(c.stats.by_source["self"].accepted for c in drafted) > 5


def test_lists_that_do_not_fit_are_refused_in_one_line(tmp_path: Path) -> None:
    target, draft = tiny.family("llama"), f"model:{tiny.drafter('llama')}"
    Shortlist(torch.tensor([1, 2, 65]), 66).save(tmp_path / "longer")
    for name, message in (
        ("longer", "66 tokens, but the draft model has 64"),
        ("nowhere", "there is no shortlist"),
    ):
        with refused(LoadError, message):
            LLM(target, draft=draft, draft_shortlist=str(tmp_path / name), kv_tokens=512)
    with pytest.raises(ConfigError, match="is no file"):
        LLM(target, draft=draft, draft_shortlist=5)
    runner = Runner(
        tiny.decoder(tiny.drafter("llama"), shortlist=(60, 63)), tokens=64, page=4, slots=1
    )
    with pytest.raises(LoadError, match="none of the 60 tokens"):
        draft_model(runner, "there", 60, 1)


@pytest.mark.parametrize("rule", ["match", "token"])
def test_models_of_another_vocabulary(rule: str, tmp_path: Path) -> None:
    """The list is of the draft model's tokens; one that shares none with the target is refused."""
    vocab, to_target = (
        other_vocabularies.size("bytes"),
        other_vocabularies.shared("bytes").to_target,
    )
    unshared = [i for i, token in enumerate(to_target) if token < 0]
    Shortlist(torch.arange(0, vocab, 2), vocab).save(tmp_path / "list")
    Shortlist(torch.tensor(unshared), vocab).save(tmp_path / "others")
    draft, options = (
        f"model:{other_vocabularies.drafter('bytes')}",
        {"kv_tokens": 1024, "rule": rule},
    )
    llm = LLM(tiny.repetitive(), draft=draft, draft_shortlist=str(tmp_path / "list"), **options)
    drafted = llm.generate("the name of", pure_params(30, 0.0, seed=3), depth=4)[0]
    plain = llm.generate("the name of", pure_params(30, 0.0, seed=3), draft="off", depth=4)[0]
    assert drafted.token_ids == plain.token_ids and drafted.stats.drafted
    with pytest.raises(LoadError, match="no token that the target shares"):
        LLM(tiny.repetitive(), draft=draft, draft_shortlist=str(tmp_path / "others"), **options)
