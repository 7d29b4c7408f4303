"""The target's distributions are those of transformers, and outputs captured during generation have
the bits of reading the same text."""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from forerun import LLM, ConfigError, SamplingParams
from forerun.engine.request import Request
from forerun.train import target as target_module
from forerun.train.capture import CapturedText, CaptureStore, Recorder
from forerun.train.data import Corpus, Example
from forerun.train.options import Training
from forerun.train.target import PAGE, RECORDED, Target, example_of, split_batch
from tests import tiny
from tests.train.conftest import SMALL, Notes

TEXTS = [Example(tuple(range(3, 30)), 1), Example(tuple(range(40, 9, -2)), 7), Example((5, 6), 1)]
PROMPTS = [list(range(3 + 5 * i, 3 + 5 * i + 7 + i)) for i in range(6)]


@pytest.fixture(scope="module")
def reference() -> Tensor:
    """transformers' logits along TEXTS, [B, N, V]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny.with_tokenizer(), dtype=torch.float32
    )
    ids = torch.zeros(3, 27, dtype=torch.int64)
    for i, text in enumerate(TEXTS):
        ids[i, : len(text.tokens)] = torch.tensor(text.tokens)
    with torch.inference_mode():
        logits: Tensor = model.eval()(ids[:, :-1]).logits
    return logits


@pytest.mark.parametrize("slots", [1, 3])
def test_distributions_are_those_of_the_model(
    target: Target, reference: Tensor, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts have several lengths and are read in as many passes as the logits need."""
    monkeypatch.setattr(target_module, "MAX_LOGITS", slots * 27 * target.vocab)
    batch = target.batch(TEXTS)
    assert batch.mask.sum(1).tolist() == [26, 9, 1] and batch.positions == 36
    assert batch.mask[1].nonzero()[:, 0].tolist() == list(range(6, 15))
    expected = reference.log_softmax(-1)
    assert torch.allclose(batch.probs.log_probs[batch.mask], expected[batch.mask], atol=2e-3)
    for i, j in batch.mask.nonzero().tolist():
        token = TEXTS[i].tokens[j + 1]
        assert batch.token_log_probs[i, j] == pytest.approx(expected[i, j, token].item(), abs=2e-3)
    assert torch.isfinite(batch.probs.log_probs).all()


def test_distributions_with_temperature_smaller_vocabulary_and_top_tokens(
    target: Target, reference: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = target.batch(TEXTS, 0.5, 60)
    expected = (reference[..., :60] / 0.5).softmax(-1)
    assert torch.allclose(warm.probs.log_probs.exp()[warm.mask], expected[warm.mask], atol=2e-3)
    greedy = target.batch(TEXTS, 0.0)
    found = greedy.probs.log_probs[greedy.mask].exp().argmax(-1)
    assert found.equal(reference.argmax(-1)[greedy.mask])
    assert set(greedy.token_log_probs[greedy.mask].exp().tolist()) <= {0.0, 1.0}
    monkeypatch.setattr("forerun.train.losses.FULL_VOCAB", 16)
    top = target.batch(TEXTS)
    assert top.probs.token_ids is not None
    values = reference.log_softmax(-1).topk(target.top).values
    assert torch.allclose(top.probs.log_probs[top.mask][:, :-1], values[top.mask], atol=2e-3)
    assert top.probs.log_probs[top.mask].exp().sum(-1).tolist() == pytest.approx([1.0] * 36)


def test_continuations_are_a_function_of_prompt_and_seed(target: Target) -> None:
    prompts = [TEXTS[0].tokens[:9], TEXTS[1].tokens[:5]]

    def continued(prompts: Sequence[tuple[int, ...]], seeds: Sequence[int]) -> list[Example]:
        return [example_of(text) for text in target.continue_prompts(prompts, seeds, 0.8)]

    one, other = continued(prompts, [4, 5])
    assert one.prompt_length == 9 and one.tokens[:9] == prompts[0] and other.prompt_length == 5
    assert all(len(e.tokens) == SMALL["tokens"] or e.tokens[-1] == 2 for e in (one, other))
    assert continued(prompts[::-1], [5, 4]) == [other, one]
    assert continued(prompts, [4, 6])[1] != other


def with_llm(**options: object) -> Target:
    """Return a target on an engine with these options."""
    found = Target(str(tiny.repetitive()), Training(**SMALL))
    found.llm = LLM(str(tiny.repetitive()), draft="suffix", page=PAGE, **options)  # type: ignore[arg-type]
    found.recorder = found.llm.engine.proposers[RECORDED] = Recorder()
    found.aux_hidden_layers = (1, 2)
    return found


def test_outputs_do_not_depend_on_the_precision_of_training() -> None:
    target = with_llm(dtype="float32", kernels="torch", kv_tokens=2048)
    texts = [Example(tuple(range(5, 5 + n)), 1) for n in (20, 12, 33)]
    plain = target.batch(texts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = target.batch(texts)
    assert torch.equal(plain.probs.log_probs, mixed.probs.log_probs)


def test_unusable_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 256"):
        Target(str(tiny.with_tokenizer()), Training(tokens=257))
    with pytest.raises(ConfigError, match="no tokenizer"):
        Target(str(tiny.family("llama")), Training(**SMALL))


@pytest.fixture(scope="module")
def writer() -> Target:
    """A target that always drafts, even if that does not pay for a tiny model."""
    target = Target(str(tiny.repetitive()), Training(**SMALL))
    target.llm.engine.add = functools.partial(target.llm.engine.add, depth=4)  # type: ignore[method-assign]
    return target


def sampled(count: int, **how: object) -> list[SamplingParams]:
    params: dict[str, object] = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 32} | how
    return [SamplingParams(**params, seed=seed) for seed in range(count)]  # type: ignore[arg-type]


def both(target: Target, requests: Sequence[Request]) -> list[tuple[CapturedText, CapturedText]]:
    """Return each text as captured during generation and as read afterwards."""
    pairs = []
    for request in requests:
        example = example_of(request)
        (read,) = split_batch(target.batch([example]), [example], target.aux_hidden_layers)
        pairs.append((target.captured(request, example, target.vocab), read))
    return pairs


def same(one: CapturedText, other: CapturedText) -> bool:
    a, b = one.tensors(), other.tensors()
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


@pytest.mark.parametrize("layers", [(), (0, 1, 2)])
@pytest.mark.parametrize("full", [True, False])
def test_captured_outputs_equal_those_of_reading_the_text(
    writer: Target, layers: tuple[int, ...], full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts were accepted and rejected, and tokens were sampled with filters."""
    monkeypatch.setattr(writer, "aux_hidden_layers", layers)
    if not full:
        monkeypatch.setattr("forerun.train.losses.FULL_VOCAB", 16)
        monkeypatch.setattr(writer, "top", 9)
    requests = writer.generate(PROMPTS, sampled(6), record_vocab=writer.vocab)
    assert sum(request.stats.accepted for request in requests) > 10
    pairs = both(writer, requests)
    assert all(same(*pair) for pair in pairs)
    assert all((recorded.likeliest is None) == full for recorded, _ in pairs)
    shape = pairs[0][0].hidden_states.shape
    assert shape[:2] == (len(layers), len(requests[0].tokens) - 1)


def test_a_cached_prefix_is_read_once(writer: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "aux_hidden_layers", (1, 2))
    prompts = [[*range(50, 85), last] for last in (3, 4, 5)]
    writer.generate(prompts[:1], sampled(1), record_vocab=writer.vocab)
    requests = writer.generate(prompts, sampled(3, max_tokens=12), record_vocab=writer.vocab)
    assert [request.stats.cached_tokens for request in requests] == [2 * PAGE] * 3
    read: list[Example] = []
    batch = writer.batch
    with monkeypatch.context() as patched:
        patched.setattr(
            writer, "batch", lambda texts, **how: (read.extend(texts), batch(texts, **how))[1]
        )
        found = [writer.captured(r, example_of(r), writer.vocab) for r in requests]
    assert [len(example.tokens) for example in read] == [2 * PAGE + 1]
    assert all(
        same(one, read) for one, (_, read) in zip(found, both(writer, requests), strict=True)
    )


def test_texts_ending_in_a_draft_are_captured(
    writer: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit or a stop token ends the text, so that the round has more tokens than the text."""
    monkeypatch.setattr(writer, "aux_hidden_layers", (2,))
    greedy = functools.partial(sampled, 1, temperature=0.0)
    (full_text,) = writer.generate(PROMPTS[:1], greedy(), record_vocab=writer.vocab)
    for count in range(8, 30, 7):
        stop = full_text.tokens[full_text.prompt_length + count]
        for how in ({"max_tokens": count}, {"stop_token_ids": (stop,)}):
            requests = writer.generate(PROMPTS[:1], greedy(**how), record_vocab=writer.vocab)
            assert len(requests[0].tokens) < len(full_text.tokens)
            assert all(same(*pair) for pair in both(writer, requests))


def test_prompts_can_be_learned_too(writer: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is needed for a base model that continues its own text."""
    monkeypatch.setattr(writer, "aux_hidden_layers", (0, 2))
    (request,) = writer.generate(PROMPTS[:1], sampled(1), record_vocab=writer.vocab)
    example = Example(tuple(request.tokens[:-3]), 1)
    (read,) = split_batch(writer.batch([example]), [example], writer.aux_hidden_layers)
    assert same(writer.captured(request, example, writer.vocab), read)


def test_captured_outputs_after_a_preemption() -> None:
    target = with_llm(kv_tokens=7 * PAGE, context=48, max_rows=6)
    requests = target.generate(PROMPTS, sampled(6), record_vocab=target.vocab)
    assert sum(request.stats.preemptions for request in requests) > 1
    assert all(same(*pair) for pair in both(target, requests))


def test_captured_outputs_on_torch_agree_to_rounding() -> None:
    target = with_llm(dtype="float32", kernels="torch", kv_tokens=2048)
    requests = target.generate(PROMPTS, sampled(6), record_vocab=target.vocab)
    for recorded, read in both(target, requests):
        one, other = recorded.tensors(), read.tensors()
        for name in ("log_probs", "token_log_probs", "hidden_states"):
            assert torch.allclose(one[name].float(), other[name].float(), rtol=2e-2, atol=2e-2)


def test_only_the_latest_texts_are_recorded(writer: Target) -> None:
    """Generation without recording keeps them; texts that are not recorded are read again."""
    (request,) = writer.generate(PROMPTS[:1], sampled(1), record_vocab=writer.vocab)
    writer.generate(PROMPTS[1:2], sampled(1))
    assert tuple(request.tokens) in writer.recorder.finished
    writer.generate(PROMPTS[1:2], sampled(1), record_vocab=writer.vocab)
    assert tuple(request.tokens) not in writer.recorder.finished
    example = example_of(request)
    assert writer.captured(request, example, writer.vocab).example == example


def test_a_store_keeps_a_bounded_set_of_texts(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    texts = corpus.examples[:3]
    captured = split_batch(target.batch(texts), texts, target.aux_hidden_layers)
    store = CaptureStore(tmp_path / "store", 2, Notes())
    for keep in (False, True):
        store.open(keep)
        for one in captured:
            store.add(one)
        assert [store.find(text) is not None for text in texts] == [True, True, False]
        found = store.find(texts[0])
        assert found is not None and same(found, captured[0])
        store.close(remove=False)
    numbered = CaptureStore(tmp_path / "numbered", 2, Notes())
    numbered.open(keep=False)
    for number, one in enumerate(captured):
        numbered.write(number, one)
    assert [numbered.read(n) is not None for n in range(4)] == [False, True, True, False]
    assert len(list((tmp_path / "numbered").iterdir())) == 2
    numbered.close(remove=True)
    assert not (tmp_path / "numbered").exists()
