"""Recurrent states have the bits of one-token passes after any passes, commits and prefix hits."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.cache import recurrent
from forerun.cache.attention import Segment
from forerun.errors import StateError
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.models.decoder import load_decoder
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from tests import tiny

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
NAMES = ["qwen3_5", "granite4-hybrid", "lfm2_moe", "nemotron_h", "falcon_h1", "minimax_text"]
names = pytest.mark.parametrize("name", NAMES)
PAGE = 4


@functools.cache
def decoder(name: str) -> NativeDecoder:
    native.start(2)
    path = tiny.family(name)
    return NativeDecoder(load_config(path), path, "float32", 256)


def runner(name: str, slots: int = 3) -> Runner:
    return Runner(decoder(name), tokens=1024, page=PAGE, slots=slots)


def chain(count: int) -> list[int]:
    return list(range(-1, count - 1))


def text(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, tiny.VOCAB), k=count)


def read(run: Runner, slot: int, tokens: list[int], known: int = 0) -> Tensor:
    """Read and commit tokens; return the logits of all."""
    cache = run.cache
    assert cache.pages.grow(slot, cache.length[slot] + len(tokens))
    segment = Segment(slot, tokens, chain(len(tokens)), list(range(len(tokens))), known=known)
    logits = run.forward([segment]).logits
    cache.commit(slot, range(len(tokens)))
    return logits


def alone(name: str, tokens: list[int]) -> Tensor:
    """Return the logits after a text that is read token by token."""
    run = runner(name)
    return [read(run, 0, [token])[0] for token in tokens][-1]


def random_pass(texts: list[list[int]], dice: random.Random, *runs: Runner) -> list[Segment]:
    """Return trees behind known tokens, in several slots, and reserve their rows."""
    segments, slots = [], dice.sample(range(3), dice.randint(1, 3))
    for slot in slots:
        known, nodes = dice.choice([1, 1, 2, 9]), dice.randint(0, 6)
        parents = chain(known)
        parents += [dice.randint(max(known - 1, i - 3), i - 1) for i in range(known, known + nodes)]
        tokens = text(known + nodes, dice.randrange(99))
        assert all(run.cache.pages.grow(slot, len(texts[slot]) + len(tokens)) for run in runs)
        certain = dice.choice([0, known - 1, known])
        segments.append(Segment(slot, tokens, parents, list(range(len(tokens))), known=certain))
    return segments


def random_path(segment: Segment, dice: random.Random) -> list[int]:
    """Return the start of the path to the last node, with all known nodes."""
    node, path = len(segment.tokens) - 1, list[int]()
    while node >= 0:
        path.insert(0, node)
        node = segment.parents[node]
    return path[: max(segment.known, dice.randint(1, len(path)))]


@names
@pytest.mark.parametrize("seed", [0, 1])
def test_random_passes_and_commits_give_the_bits_of_single_tokens(name: str, seed: int) -> None:
    """Trees behind known tokens, in several slots, with paths that skip nodes."""
    check_random_passes(name, seed)


@names
def test_every_instruction_set_gives_the_bits_of_single_tokens(
    name: str, instructions: str
) -> None:
    decoder(name)  # starts the kernels with the best instruction set
    native.start(2, instructions)
    check_random_passes(name, 3)


def check_random_passes(name: str, seed: int) -> None:
    """Compare random passes and commits with passes over single tokens."""
    dice, run = random.Random(seed), runner(name)
    texts: list[list[int]] = [[], [], []]
    for _ in range(7):
        segments = random_pass(texts, dice, run)
        logits = run.forward(segments).logits.split([len(s.tokens) for s in segments])
        for segment, rows in zip(segments, logits, strict=True):
            path = random_path(segment, dice)
            texts[segment.slot] += [segment.tokens[i] for i in path]
            run.cache.commit(segment.slot, path)
            assert torch.equal(rows[path[-1]], alone(name, texts[segment.slot]))


@names
def test_kernels_agree_with_the_reference_in_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares logits, states, records, histories and copies."""
    monkeypatch.setattr(recurrent, "INTERVAL", 8)
    path = tiny.family(name, gain=0.6)
    compiled = NativeDecoder(load_config(path), path, "float32", 256)
    plain = load_decoder(path, torch.float32, torch.device("cpu"), 256)
    runs = [Runner(model, tokens=1024, page=PAGE, slots=3) for model in (compiled, plain)]
    texts = compare_random_passes(*runs)
    close(*(read(run, 0, texts[0][run.cache.length[0] :]) for run in runs))


def compare_random_passes(*runs: Runner) -> list[list[int]]:
    """Compare logits, states, records and copies after random passes and commits, and the cached
    prefix of the first text; return the texts."""
    states: list[Any] = [run.cache.recurrent for run in runs]
    texts: list[list[int]] = [[], [], []]
    dice = random.Random(2)
    for _ in range(12):
        segments = random_pass(texts, dice, *runs)
        paths = [random_path(segment, dice) for segment in segments]
        close(*(run.forward(segments).logits for run in runs))
        for segment, path in zip(segments, paths, strict=True):
            texts[segment.slot] += [segment.tokens[i] for i in path]
            for run in runs:
                run.cache.commit(segment.slot, path)
        close(*(each.data for each in states))
    for slot, written in enumerate(texts):
        for run in runs:
            run.cache.pages.seal(slot, written, len(written))
            run.cache.close(slot)
    copies, expected = (each._copies for each in states)
    assert copies.keys() == expected.keys() and len(copies) > 3
    for digest, copy in copies.items():
        close(copy, expected[digest])
    assert [run.cache.open(0, texts[0]) for run in runs] == [len(texts[0]) // 8 * 8] * 2
    return texts


def close(found: Tensor, expected: Tensor) -> None:
    assert torch.allclose(found.cpu(), expected, rtol=1e-3, atol=1e-3)


@names
def test_nodes_of_earlier_passes_can_be_parents(name: str) -> None:
    """A draft model feeds its tree level by level before anything is committed."""
    run, prefix, tokens = runner(name), text(11), text(6, 1)
    parents = [-1, 0, 0, 1, 2, 4]
    read(run, 0, prefix)
    assert run.cache.pages.grow(0, 20)
    for first, last in ((0, 1), (1, 3), (3, 5), (5, 6)):
        wants = list(range(last - first))
        segment = Segment(0, tokens[first:last], parents[:last], wants, offset=first)
        logits = run.forward([segment]).logits
    assert torch.equal(logits[-1], alone(name, [*prefix, *(tokens[i] for i in (0, 2, 4, 5))]))
    run.cache.commit(0, [0, 2, 4])
    found = read(run, 0, [7])[0]
    assert torch.equal(found, alone(name, [*prefix, *(tokens[i] for i in (0, 2, 4)), 7]))


@names
def test_uncommitted_nodes_survive_a_commit_of_the_tokens_before_them(name: str) -> None:
    """A draft model commits its lag after reading it, and goes on from the root."""
    run, prefix, lag = runner(name), text(9), text(5, 3)
    read(run, 0, prefix)
    assert run.cache.pages.grow(0, 24)
    run.forward([Segment(0, lag, chain(5), [4])])
    run.cache.commit(0, range(4))
    for first, token in enumerate((6, 7, 8), 1):
        segment = Segment(0, [token], chain(first + 1), [0], offset=first)
        logits = run.forward([segment]).logits
        drafted = [6, 7, 8][:first]
        assert torch.equal(logits[0], alone(name, [*prefix, *lag, *drafted]))
    run.cache.commit(0, [0, 1])
    assert torch.equal(read(run, 0, [9])[0], alone(name, [*prefix, *lag, 6, 9]))


@names
@pytest.mark.parametrize(
    "cut", [(30,), (5, 25), (1,) * 30], ids=["one chunk", "two chunks", "single tokens"]
)
def test_a_prefix_is_reused_from_a_copy_of_its_state(
    name: str, cut: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "INTERVAL", 8)
    run, tokens = runner(name), text(30)
    assert run.cache.open(0, tokens) == 0
    done = 0
    for size in cut:
        read(run, 0, tokens[done : done + size], known=size if size > 1 else 0)
        done += size
    read(run, 0, [9])  # the next pass applies pending tokens
    run.cache.pages.seal(0, tokens, 30)
    longer = [*tokens[:27], 5, 6]
    assert run.cache.open(1, longer) == 24
    assert torch.equal(read(run, 1, longer[24:])[-1], alone(name, longer))
    other = [*tokens[:9], 5, 6]
    assert run.cache.open(2, other) == 8
    assert torch.equal(read(run, 2, other[8:])[-1], alone(name, other))
    run.cache.pages.check()


def test_two_clients_that_alternate_share_their_system_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recurrent, "INTERVAL", 16)
    run, system = runner("qwen3_5"), text(40)
    for turn in range(6):
        prompt = [*system, *text(5, turn % 2), *text(turn, 9)]
        start = run.cache.open(turn % 2, prompt)
        assert start >= (32 if turn else 0)
        found = read(run, turn % 2, prompt[start:], known=len(prompt) - start)[-1]
        assert torch.equal(found, alone("qwen3_5", prompt))
        run.cache.pages.seal(turn % 2, prompt, len(prompt))
        run.cache.close(turn % 2)


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "minimax_text"])
def test_long_prompts_are_reused_up_to_the_last_copy(name: str) -> None:
    """Copies are made every 256 tokens, so at most 256 are read again. The lengths are those of
    public reports of lost reuse; chunks end between the borders."""
    native.start(2)
    path = tiny.family(name)
    long = NativeDecoder(load_config(path), path, "float32", 4096)
    run = Runner(long, tokens=16384, page=16, slots=2)

    def last(slot: int, prompt: list[int], start: int) -> Tensor:
        for at in range(start, len(prompt), 700):
            part = prompt[at : at + 700]
            found = read(run, slot, part, known=len(part))[-1]
        run.cache.pages.seal(slot, prompt, len(prompt))
        run.cache.close(slot)
        return found

    for seed, length in enumerate((1072, 2000, 2144, 4000)):
        prompt = text(length, seed)
        assert run.cache.open(0, prompt) == 0
        expected = last(0, prompt, 0)
        start = run.cache.open(1, prompt)
        assert start == (length - 1) // 256 * 256
        assert torch.equal(last(1, prompt, start), expected)


def test_copies_are_bounded_and_evicted_by_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "INTERVAL", 8)
    monkeypatch.setattr(recurrent, "COPY_BYTES", 0)
    run = runner("qwen3_5")
    states = run.cache.recurrent
    assert states is not None and states.most_copies == recurrent.MIN_COPIES
    for seed in range(5):
        tokens = text(30, seed)
        run.cache.open(0, tokens)
        read(run, 0, tokens, known=30)
        run.cache.pages.seal(0, tokens, 30)
        run.cache.close(0)
        assert len(states._copies) <= states.most_copies
    assert run.cache.open(0, [*text(30, 4), 3]) > 0
    assert run.cache.open(1, [*text(30, 0), 3]) == 0


def test_only_pending_tokens_can_be_rewound() -> None:
    """A longer rewind empties the slot, and its text is read again."""
    run, tokens = runner("qwen3_5"), text(12)
    run.cache.open(0, tokens)
    read(run, 0, tokens[:8], known=8)
    read(run, 0, tokens[8:])
    run.cache.rewind(0, 10)
    assert run.cache.length[0] == 10
    assert torch.equal(read(run, 0, [5])[0], alone("qwen3_5", [*tokens[:10], 5]))
    run.cache.rewind(0, 7)
    assert run.cache.length[0] == 0
    assert torch.equal(read(run, 0, tokens)[-1], alone("qwen3_5", tokens))


def test_a_closed_slot_has_no_state() -> None:
    """A text that is read without `open`, as for embeddings, starts from an empty state."""
    run, tokens = runner("qwen3_5"), text(12)
    for _ in range(2):
        assert run.cache.pages.grow(0, 12)
        assert torch.equal(read(run, 0, tokens)[-1], alone("qwen3_5", tokens))
        run.cache.close(0)


def test_a_pass_that_was_not_committed_is_refused() -> None:
    run, tokens = runner("qwen3_5"), text(12)
    assert run.cache.pages.grow(0, 24)
    run.forward([Segment(0, tokens, chain(12), [11], known=12)])
    with pytest.raises(StateError, match="not committed"):
        run.forward([Segment(0, tokens, chain(12), [11], known=12)])
    with pytest.raises(StateError, match="must be committed"):
        run.cache.commit(0, [0, 1])


def test_a_long_text_without_known_tokens_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = text(150)
    found = read(runner("qwen3_5"), 0, tokens)[-1]
    assert torch.equal(found, alone("qwen3_5", tokens))
