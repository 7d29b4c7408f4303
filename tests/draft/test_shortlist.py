"""Drafters that say part of the vocabulary: the text is the target's, and drafts are those of the
naive twin.

The twin has the whole head, and -inf for whatever is not listed. Protects: the option and the file
beside a model, both kernels, all rules, batches, drafts of another vocabulary, lists that do not
fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from forerun import LLM, ConfigError, LoadError, SamplingParams
from forerun.draft.draft_model import DraftModel, draft_model
from forerun.engine.engine import Engine
from forerun.kernels import native
from forerun.models.files import SHORTLIST
from forerun.models.shortlist import Shortlist
from forerun.runtime.torch_runner import Runner
from forerun.types import Forward
from tests import other_words, tiny
from tests.engine import build

PROMPTS = [[5, 6, 7, 8], [9] * 6, [3, 1, 4, 1, 5]]
KERNELS = [
    "torch",
    pytest.param(
        "native", marks=pytest.mark.skipif(native.library() is None, reason="not compiled")
    ),
]


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "list"
    Shortlist(torch.tensor(tiny.LISTED), tiny.VOCAB).save(path)
    return path


def params(temperature: float) -> SamplingParams:
    return SamplingParams.pure(max_tokens=30, temperature=temperature, seed=3, ignore_eos=True)


@pytest.mark.parametrize("rule", ["match", "token", "block", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kernels", KERNELS)
def test_nothing_else_is_drafted_and_the_text_is_the_targets(
    kernels: str, temperature: float, rule: str, listed: Path
) -> None:
    llm = LLM(
        tiny.family("llama"), draft=f"model:{tiny.drafter('llama')}", draft_shortlist=str(listed), kernels=kernels,
        kv_tokens=1024, depth=4, rule=rule,
    )  # fmt: skip
    proposer, drafted = llm.engine.proposers["model"], set()
    propose = proposer.propose

    def seeing(rows: object) -> list[object]:
        found = propose(rows)  # type: ignore[arg-type]
        for draft in found:
            drafted.update(draft.tokens[1:])
            assert (
                draft.probs is None
                or not draft.probs[:, [i for i in range(64) if i not in tiny.LISTED]].any()
            )
        return found  # type: ignore[return-value]

    proposer.propose = seeing  # type: ignore[method-assign,assignment]
    said = llm.generate(PROMPTS, params(temperature))
    assert drafted <= set(tiny.LISTED) and len(drafted) > 5
    plain = llm.generate(PROMPTS, params(temperature), draft="off")
    if rule == "match" or not temperature:
        assert [c.token_ids for c in said] == [c.token_ids for c in plain]
    assert {t for c in plain for t in c.token_ids} - set(tiny.LISTED), (
        "the target says what the drafter cannot"
    )


class Masked(Runner):
    """The naive twin."""

    def forward(self, segments, aux_hidden_layers=()) -> Forward:  # type: ignore[no-untyped-def]
        found = super().forward(segments, aux_hidden_layers)
        others = [i for i in range(found.logits.shape[1]) if i not in tiny.LISTED]
        return Forward(found.logits.index_fill(1, torch.tensor(others), -torch.inf), found.features)

    def draft_chains(self, links, vocab) -> None:  # type: ignore[no-untyped-def]
        return None


@pytest.mark.parametrize("rule", ["match", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kernels", KERNELS)
def test_drafts_are_those_of_the_whole_head_without_the_rest(
    kernels: str, width: int, temperature: float, rule: str
) -> None:
    """Request by request the same tokens in as many steps, natively to the last bit."""
    make, room = (
        tiny.decoder if kernels == "torch" else tiny.native_decoder,
        {"tokens": 512, "page": 4, "slots": 8},
    )
    target, small = tiny.family("llama"), tiny.drafter("llama")
    counted = []
    for runner in (Runner(make(small, said=tiny.LISTED), **room), Masked(make(small), **room)):  # type: ignore[operator]
        proposer = DraftModel(runner, tiny.VOCAB, width)
        engine = Engine(Runner(make(target), **room), {"model": proposer}, rule=rule, chunk=5)  # type: ignore[operator]
        requests = build.run(engine, "model", temperature)
        counted.append([(list(r.output), r.stats.drafted, r.stats.accepted) for r in requests])
    assert counted[0] == counted[1]


def test_a_list_beside_a_model_is_used_and_an_option_comes_before_it(
    tmp_path: Path, listed: Path
) -> None:
    target = tiny.family("llama")
    directory = shutil.copytree(tiny.drafter("llama"), tmp_path / "draft")
    Shortlist(torch.tensor([3, 4, 5]), tiny.VOCAB).save(directory / SHORTLIST)
    beside = LLM(target, draft=f"model:{directory}", kv_tokens=512)
    asked = LLM(target, draft=f"model:{directory}", draft_shortlist=str(listed), kv_tokens=512)
    sizes = [len(llm.engine.proposers["model"].runner.decoder.shortlist) for llm in (beside, asked)]  # type: ignore[attr-defined]
    assert sizes == [3, len(tiny.LISTED)]
    assert LLM(directory, draft="suffix", kv_tokens=512).decoder.shortlist is None, (
        "a target says all that it can"
    )


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not compiled")
def test_a_target_that_drafts_for_itself(listed: Path) -> None:
    llm = LLM(
        tiny.family("llama"), draft="self:int8", draft_shortlist=str(listed), kv_tokens=512, depth=4
    )
    said = llm.generate(PROMPTS, params(0.8))
    assert [c.token_ids for c in said] == [
        c.token_ids for c in llm.generate(PROMPTS, params(0.8), draft="off")
    ]
    assert sum(c.stats.by_source["self"].accepted for c in said) > 5


def test_lists_that_do_not_fit_are_refused_in_one_line(tmp_path: Path) -> None:
    target, draft = tiny.family("llama"), f"model:{tiny.drafter('llama')}"
    Shortlist(torch.tensor([1, 2, 65]), 66).save(tmp_path / "longer")
    for name, says in (
        ("longer", "66 tokens, but the draft model has 64"),
        ("nowhere", "there is no shortlist"),
    ):
        with pytest.raises(LoadError, match=says) as error:
            LLM(target, draft=draft, draft_shortlist=str(tmp_path / name), kv_tokens=512)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="is no file"):
        LLM(target, draft=draft, draft_shortlist=5)
    runner = Runner(tiny.decoder(tiny.drafter("llama"), said=(60, 63)), tokens=64, page=4, slots=1)
    with pytest.raises(LoadError, match="none of the 60 tokens"):
        draft_model(runner, "there", 60, 1)


@pytest.mark.parametrize("rule", ["match", "token"])
def test_models_of_another_vocabulary(rule: str, tmp_path: Path) -> None:
    """The list is of the draft model's tokens; one that shares none with the target is refused."""
    vocab, to_target = other_words.size("bytes"), other_words.shared("bytes").to_target
    Shortlist(torch.arange(0, vocab, 2), vocab).save(tmp_path / "list")
    Shortlist(torch.tensor([i for i, own in enumerate(to_target) if own < 0]), vocab).save(
        tmp_path / "others"
    )

    def load(name: str) -> LLM:
        draft = f"model:{other_words.drafter('bytes')}"
        return LLM(
            tiny.spoken(),
            draft=draft,
            draft_shortlist=str(tmp_path / name),
            kv_tokens=1024,
            rule=rule,
        )

    llm = load("list")
    said, plain = (
        llm.generate("the name of", params(0.0), draft=draft, depth=4)[0] for draft in (None, "off")
    )
    assert said.token_ids == plain.token_ids and said.stats.drafted
    with pytest.raises(LoadError, match="no token that the target shares"):
        load("others")
