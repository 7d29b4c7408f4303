"""Laws along texts are transformers' own, where they should be; what the target continues follows
from the seed."""

import pytest
import torch
import transformers

from forerun import LLM, ConfigError, ForerunError
from forerun.train import capture
from forerun.train.capture import PAGE, Target
from forerun.train.data import Corpus, Document, Example, Passage
from forerun.train.settings import Training
from forerun.train.stream import Stream
from tests import tiny
from tests.train.conftest import SMALL, documents

TEXTS = [Example(tuple(range(3, 30)), 1), Example(tuple(range(40, 9, -2)), 7), Example((5, 6), 1)]


@pytest.fixture(scope="module")
def theirs() -> torch.Tensor:
    """transformers' log-laws along TEXTS. [B, N, V]"""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny.worded(), dtype=torch.float32
    ).eval()
    ids = torch.zeros(3, 27, dtype=torch.int64)
    for i, text in enumerate(TEXTS):
        ids[i, : len(text.tokens)] = torch.tensor(text.tokens)
    with torch.inference_mode():
        return model(ids[:, :-1]).logits


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_laws_are_those_of_the_model(
    target: Target, theirs: torch.Tensor, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In as many passes as the logits need; texts of several lengths do not get in each other's
    way."""
    monkeypatch.setattr(capture, "LOGITS", at_once * 27 * target.vocab)
    batch = target.batch(TEXTS)
    assert batch.mask.sum(1).tolist() == [26, 9, 1] and batch.positions == 36
    assert batch.mask[1].nonzero()[:, 0].tolist() == list(range(6, 15))
    assert torch.allclose(batch.law.logs[batch.mask], theirs.log_softmax(-1)[batch.mask], atol=2e-3)
    for i, j in batch.mask.nonzero().tolist():
        assert batch.said[i, j] == pytest.approx(
            theirs[i, j].log_softmax(-1)[TEXTS[i].tokens[j + 1]].item(), abs=2e-3
        )
    assert torch.isfinite(batch.law.logs).all()


def test_laws_at_a_temperature_over_fewer_tokens_and_of_the_likeliest(
    target: Target, theirs: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = target.batch(TEXTS, 0.5, 60)
    assert torch.allclose(
        warm.law.logs.exp()[warm.mask], (theirs[..., :60] / 0.5).softmax(-1)[warm.mask], atol=2e-3
    )
    greedy = target.batch(TEXTS, 0.0)
    assert greedy.law.logs[greedy.mask].exp().argmax(-1).equal(theirs.argmax(-1)[greedy.mask])
    assert set(greedy.said[greedy.mask].exp().tolist()) <= {0.0, 1.0}
    monkeypatch.setattr("forerun.train.losses.FULL", 16)
    top = target.batch(TEXTS)
    assert top.law.tokens is not None and top.law.logs.shape == (3, 26, target.top + 1)
    expected = theirs.log_softmax(-1).topk(target.top).values
    assert torch.allclose(top.law.logs[top.mask][:, :-1], expected[top.mask], atol=2e-3)
    assert top.law.logs[top.mask].exp().sum(-1).tolist() == pytest.approx([1.0] * 36, abs=1e-5)


def test_the_target_goes_on_as_the_engine_would(target: Target) -> None:
    prompts = [TEXTS[0].tokens[:9], TEXTS[1].tokens[:5]]
    one, other = target.continued(prompts, [4, 5], 0.8)
    assert one.given == 9 and one.tokens[:9] == prompts[0] and other.given == 5
    assert all(len(e.tokens) == SMALL["tokens"] or e.tokens[-1] == 2 for e in (one, other))
    assert target.continued(prompts[::-1], [5, 4], 0.8) == [other, one]
    assert target.continued(prompts, [4, 6], 0.8)[1] != other


def test_a_step_can_be_repeated_whatever_came_before(target: Target, corpus: Corpus) -> None:
    settings = Training(**(SMALL | {"on_policy": 0.4, "accumulate": 2}))
    straight = Stream(corpus, target, settings)
    steps = [straight.step(n) for n in range(8)]
    assert Stream(corpus, target, settings).step(6) == steps[6] and straight.step(2) == steps[2]
    texts = [straight.text(number) for step in steps for part in step for number in part]
    written = [text for text in texts if text.given == SMALL["prompt_tokens"]]
    assert [len(part) for part in steps[0]] == [3, 3] and len(written) == int(0.4 * len(texts))
    others = [text for text in texts if text.given == 1]
    assert set(others[: len(corpus.examples)]) == set(corpus.examples)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (1.0, 12), (0.25, 3)])
def test_the_share_that_the_target_writes(
    target: Target, corpus: Corpus, share: float, count: int
) -> None:
    stream = Stream(corpus, target, Training(**(SMALL | {"on_policy": share})))
    texts = [stream.text(number) for n in range(4) for part in stream.step(n) for number in part]
    assert sum(text.given > 1 for text in texts) == count


def test_a_target_says_the_same_where_a_drafter_is_judged_in_bfloat16() -> None:
    """A float32 target in torch: its cache would refuse bfloat16, and its laws would be others."""
    target = Target(str(tiny.worded()), Training(**SMALL))
    target.llm = LLM(
        str(tiny.worded()),
        dtype="float32",
        kernels="torch",
        draft="suffix",
        kv_tokens=2048,
        page=PAGE,
    )
    texts = [Example(tuple(range(5, 5 + n)), 1) for n in (20, 12, 33)]
    plain = target.batch(texts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        judged = target.batch(texts)
    assert torch.equal(plain.law.logs, judged.law.logs) and judged.law.logs.dtype == torch.float32


def test_what_cannot_be_trained_on(target: Target) -> None:
    with pytest.raises(ConfigError, match="at most 256"):
        Target(str(tiny.worded()), Training(tokens=257))
    with pytest.raises(ConfigError, match="no tokenizer"):
        Target(str(tiny.family("llama")), Training(**SMALL))
    short = Corpus(documents(['"a"']), target.tokenizer, 48, 8)
    with pytest.raises(ForerunError, match="use --on-policy 1"):
        Stream(short, target, Training(**SMALL))
    texts = Corpus(documents(["[10,12,10,12,10,12,10,12]"]), target.tokenizer, 48, 45)
    assert texts.examples and not texts.prompts
    with pytest.raises(ForerunError, match="longer than prompt_tokens"):
        Stream(texts, target, Training(**SMALL))
    chats = Corpus([Document("a", "a", (Passage("grey " * 60, "x"),))], target.tokenizer, 48, 8)
    with pytest.raises(ForerunError, match=r"1 prompts leave no room .* use a larger --tokens"):
        Stream(chats, target, Training(**SMALL))
