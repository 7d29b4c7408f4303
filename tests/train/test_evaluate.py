"""What arithmetic expects is what the engine counts, and a fault in either shows; drafts are those
of the module."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from forerun import LLM, ForerunError, SamplingParams
from forerun.train.capture import Batch, Target
from forerun.train.data import Corpus
from forerun.train.deadline import Deadline
from forerun.train.evaluate import Judge
from forerun.train.options import SmallLMOptions
from forerun.train.recipes import SmallLM
from forerun.train.settings import Training, depths_up_to
from tests import tiny
from tests.train.conftest import SMALL, documents

TEXTS = [f'{{"name":"beta {i}","sizes":[{i},{i * 3}]}} true false null' for i in range(40)]
SETTINGS = Training(**(SMALL | {"evaluate_rows": 40, "depth": 2, "temperature": 1.0}))


@dataclasses.dataclass(frozen=True, slots=True)
class Misaligned(SmallLM):
    """Takes the law behind each token for the law behind the next one."""

    def _logits(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return SmallLM._logits(self, module, batch).roll(1, dims=1)


@pytest.fixture(scope="module")
def held_out(target: Target) -> Corpus:
    return Corpus(documents(TEXTS), target.tokenizer, SETTINGS.tokens, SETTINGS.prompt_tokens)


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny.worded(0.03)


@pytest.fixture(scope="module")
def module(target: Target, directory: Path) -> nn.Module:
    return SmallLM(SmallLMOptions()).load(directory, target)


def test_measured_and_analytic_agree(
    target: Target, held_out: Corpus, module: nn.Module, directory: Path
) -> None:
    """Within the noise of some hundred passes at temperature 1; greedy, where there is none, to the
    last pass."""
    recipe = SmallLM(SmallLMOptions(init=str(directory)))
    judge = Judge(target, recipe, held_out, SETTINGS)
    measured = list(judge.measure(module, directory, judge.cases))
    assert [(m.temperature, m.depth) for m in measured] == [
        (t, d) for t in (0.0, 1.0) for d in (1, 2)
    ]
    for entry in measured:
        assert entry.accepted_length > 1.2 and entry.passes > 300
        assert entry.accepted_length == pytest.approx(
            entry.analytic, rel=0.05 if entry.temperature else 0.01
        )
        spans = entry.by_position
        assert list(spans) == [0, 32] and min(spans.values()) <= entry.accepted_length <= max(
            spans.values()
        )


def test_a_figure_is_not_awaited_when_the_time_is_over(
    target: Target, held_out: Corpus, module: nn.Module, directory: Path
) -> None:
    """However slow the machine has become since it was begun; those before it are there."""
    judge = Judge(target, SmallLM(SmallLMOptions(init=str(directory))), held_out, SETTINGS)
    clock = itertools.count().__next__  # each look at it is a second
    assert not list(judge.measure(module, directory, judge.cases, deadline=Deadline(0.05, clock)))
    found = list(
        judge.measure(module, directory, judge.cases, deadline=(late := Deadline(3, clock)))
    )
    assert 0 < len(found) < len(judge.cases) and -2 <= late.left < 0


def test_a_misaligned_drafter_shows(
    target: Target, held_out: Corpus, module: nn.Module, directory: Path
) -> None:
    recipe = Misaligned(SmallLMOptions(init=str(directory)))
    judge = Judge(target, recipe, held_out, SETTINGS)
    measured = list(judge.measure(module, directory, judge.cases))
    assert max(abs(m.accepted_length / m.analytic - 1) for m in measured) > 0.05


def test_rounds_begin_where_tokens_are_hard(
    target: Target, held_out: Corpus, module: nn.Module
) -> None:
    """The mean over all tokens is another number, and the evaluation has both."""
    judge = Judge(target, SmallLM(SmallLMOptions(init=str(tiny.worded(0.03)))), held_out, SETTINGS)
    found = judge.evaluate(module, 7)
    assert found.step == 7 and 0 < found.overlap < 1 and found.perplexity > 1
    assert 1 < found.accepted_length < found.from_any


def test_what_was_written_drafts_as_the_module_would(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    """Exported, loaded by the engine: each greedy draft is the module's own continuation."""
    recipe = SmallLM(SmallLMOptions(layers=2))
    module = recipe.build(target, corpus).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    recipe.export(module, target, tmp_path)
    llm = LLM(
        tiny.worded(),
        draft=f"model:{tmp_path}",
        draft_quantization="none",
        dtype="float32",
        kv_tokens=1024,
    )
    request = llm.engine.add(
        list(range(5, 20)), SamplingParams(max_tokens=24), draft="model", depth=3, trace=True
    )
    drafts, text = 0, list(range(5, 20))
    while llm.engine.busy:
        for event in llm.engine.step_or_raise():
            assert event.round is not None
            for token in event.round.draft.tokens[1:]:
                with torch.inference_mode():
                    logits = module(input_ids=torch.tensor([text])).logits[0, -1]
                assert logits.argmax() == token
                text, drafts = [*text, token], drafts + 1
            text = list(request.tokens)
    assert drafts > 20


def test_no_held_out_text_is_long_enough(target: Target) -> None:
    short = Corpus(documents(["[1]"]), target.tokenizer, 48, 8)
    with pytest.raises(ForerunError, match="no held-out text"):
        Judge(target, SmallLM(SmallLMOptions()), short, SETTINGS)


def test_depths() -> None:
    assert [depths_up_to(k) for k in (1, 2, 4, 5, 8)] == [
        [1],
        [1, 2],
        [1, 2, 4],
        [1, 2, 4, 5],
        [1, 2, 4, 8],
    ]
