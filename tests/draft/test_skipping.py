"""The search for the layers that self-speculation skips.

Its estimates are what the drafts achieve, layers that do nothing are skipped, nothing stays in the
target's cache, and the choice is stored, where a damaged file is ignored.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forerun import LLM, CapacityError, SamplingParams
from forerun.cache.attention import Segment
from forerun.draft import self_speculation as selection
from forerun.draft.proposer import DraftRequest
from forerun.draft.self_speculation import (
    LayerChoice,
    SampleText,
    SelfSpeculation,
    evaluate,
    generate_texts,
    parse_layers,
    rank_layers,
    search,
)
from forerun.models.decoder import Decoder, load_decoder
from forerun.runtime.torch_runner import Runner
from forerun.verify import Noise
from tests import tiny
from tests.draft.helpers import pure_params

PROMPTS = [[5, 6, 7], [9, 4, 8, 30, 21], [3, 1, 4, 1, 5]]


def runner(idle: tuple[int, ...] = ()) -> Runner:
    """A model of three layers, of which `idle` ones change nothing."""
    directory = tiny.family("llama")
    decoder = load_decoder(directory, torch.float64, torch.device("cpu"), 256)
    assert isinstance(decoder, Decoder)
    for layer in idle:
        own = decoder.weights.layers[layer]
        own.out.weight.zero_()
        own.down.weight.zero_()
    return Runner(decoder, tokens=512, page=16, slots=2)


def texts_of(target: Runner) -> list[SampleText]:
    return generate_texts(target, PROMPTS, 24, ())


@pytest.fixture(autouse=True)
def equal_layer_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the time of a forward pass its number of layers."""
    monkeypatch.setattr(selection, "_forward_seconds", lambda r: float(len(r.decoder.layer_ids)))


def test_sample_texts_are_generated_greedily_by_the_model() -> None:
    target = runner()
    llm = LLM(tiny.family("llama"), draft="off", dtype="float64", kernels="torch", kv_tokens=512)
    params = SamplingParams.pure(max_tokens=24, ignore_eos=True)
    outputs = [list(c.token_ids) for c in llm.generate(PROMPTS, params)]
    assert [list(t.tokens[t.start :]) for t in texts_of(target)] == outputs
    (ended,) = generate_texts(target, PROMPTS[:1], 24, [outputs[0][5]])
    assert ended.tokens[-1] == outputs[0][5] and len(ended.tokens) <= len(PROMPTS[0]) + 6
    # an end token at the end of a prompt ends no text
    (text,) = generate_texts(target, PROMPTS[:1], 24, [PROMPTS[0][-1]])
    assert text.start == len(PROMPTS[0]) < len(text.tokens)


@pytest.mark.parametrize("kept", [(0, 1), (0,), (0, 2)])
def test_estimates_of_a_choice_are_what_its_drafts_achieve(kept: tuple[int, ...]) -> None:
    """Drafts behind each position of the texts are compared with how the texts go on."""
    target = runner()
    texts, accepted = texts_of(target), []
    found = evaluate(target, kept, texts, 3.0)
    for text in texts:
        for end in range(text.start, len(text.tokens)):
            tokens = list(text.tokens[:end])
            target.cache.pages.grow(0, len(tokens) + selection.MAX_DEPTH)
            if len(tokens) > 1:
                target.forward([Segment.chain(0, tokens[:-1])])
                target.cache.commit(0, range(len(tokens) - 1))
            (draft,) = SelfSpeculation(target, kept).propose(
                [DraftRequest(0, tokens, SamplingParams(), Noise(1, 0), selection.MAX_DEPTH)]
            )
            pairs = zip(draft.tokens[1:], text.tokens[end:], strict=False)
            longest = min(selection.MAX_DEPTH, len(text.tokens) - end)
            accepted.append(next((i for i, (a, b) in enumerate(pairs) if a != b), longest))
            target.cache.close(0)
    # a layer behind a skipped one sees other keys
    tolerance = 0.05 if 1 not in kept and 2 in kept else 1e-9
    first_rate = sum(n > 0 for n in accepted) / len(accepted)
    assert found.agrees == pytest.approx(first_rate, abs=tolerance)
    mean = 1 + sum(min(n, found.depth) for n in accepted) / len(accepted)
    assert found.times == pytest.approx(mean / (1 + found.depth * len(kept) / 3), abs=tolerance)
    assert 0 < found.agrees < 1


def test_layers_that_do_nothing_are_skipped() -> None:
    target = runner(idle=(1,))
    texts = texts_of(target)
    assert rank_layers(target, texts)[0] == 1
    messages: list[str] = []
    found = search(target, texts, 60.0, messages.append)
    assert 1 not in found.layers and messages
    assert found.times >= evaluate(target, (0, 2), texts, 3.0).times
    assert not any(target.cache.length) and target.cache.pages.available == target.cache.pages.count


def test_a_choice_is_stored_and_a_damaged_file_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    searched, find = [], selection.find_layers
    monkeypatch.setattr(
        selection, "find_layers", lambda *a, **k: (searched.append(1), find(*a, **k))[1]
    )
    params, num_drafted = pure_params(20), []
    for _ in range(2):
        llm = LLM(tiny.family("llama"), draft="self:layers=auto", kv_tokens=512)
        out = llm.generate([5, 6, 7], params, depth=3)[0]
        assert out.token_ids == llm.generate([5, 6, 7], params, draft="off")[0].token_ids
        num_drafted.append(out.stats.by_source["self"].drafted)
    assert len(searched) == 1 and min(num_drafted) > 10
    assert "self:layers=auto drafts with" in capsys.readouterr().err
    (path,) = (tmp_path / "layers").iterdir()
    kept = LayerChoice(**json.loads(path.read_text()))
    assert path.stat().st_size < 300
    valid = {"layers": list(kept.layers), "agrees": 1, "depth": 2, "times": 1.5}
    wrong = [
        {"agrees": float("nan")},
        {"agrees": -1},
        {"times": float("inf")},
        {"times": 0},
        {"depth": float("inf")},
        {"layers": 5},
        {"layers": [[0]]},
        {"layers": ["0"]},
        {"agrees": None},
        {"agrees": 10**400},
    ]
    for broken in (
        "",
        "{}",
        '{"layers": [99], "agrees": 1, "depth": 1, "times": 1}',
        '{"layers": [1, 0]}',
        "null",
        "[" * 100_000,
        *(json.dumps(valid | change) for change in wrong),
    ):
        path.write_text(broken)
        capsys.readouterr()
        assert selection.load_layers(llm.engine.target, tiny.family("llama")) is None
        warning = capsys.readouterr().err
        assert warning.count("\n") == 1 and "is damaged and ignored" in warning
    path.write_text(json.dumps(valid))
    expected = LayerChoice(tuple(kept.layers), 1.0, 2, 1.5)
    assert selection.load_layers(llm.engine.target, tiny.family("llama")) == expected


def test_a_cache_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    with pytest.raises(CapacityError, match="set a larger kv_tokens"):
        LLM(tiny.family("llama"), draft="self:layers=auto", kv_tokens=64)


@pytest.mark.parametrize(
    ("layers", "text"),
    [((0, 1, 2, 9), "0-2,9"), ((4,), "4-4"), ((0, 2, 3), "0,2-3"), ((0, 1, 5, 6, 7), "0-1,5-7")],
)
def test_lists_of_layers_are_formatted_as_they_are_parsed(
    layers: tuple[int, ...], text: str
) -> None:
    assert selection.format_layers(layers) == text
    assert parse_layers(text, 10) == layers
