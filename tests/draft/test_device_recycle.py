"""Successor tables on a device hold the entries and grow the trees of tables in main memory, one
request at a time or in rounds."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
import torch

from forerun import rng
from forerun.draft.device_recycle import DeviceRecycle, DeviceTable
from forerun.draft.proposer import DraftRequest
from forerun.draft.recycle import NONE, WAYS, Recycle, SuccessorTable
from forerun.sampling.params import SamplingParams
from forerun.types import Draft
from forerun.verify import Noise

CPU, VOCAB, ENTRIES = torch.device("cpu"), 40, 64


def teach(table: SuccessorTable | DeviceTable, portions: int = 3) -> None:
    """Teach a table so much that entries are pushed out."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(portions):
        logits = 3 * torch.randn(30, VOCAB, generator=generator)
        logits[4], logits[7, 5:] = torch.nan, -torch.inf
        before, last = torch.randint(0, VOCAB, (2, 30), generator=generator).tolist()
        table.learn([NONE, *before[1:]], last, logits)


def assert_same_table(ours: DeviceTable, theirs: SuccessorTable) -> None:
    keys = ours.held.keys[:-WAYS].numpy().view(np.uint64)
    assert np.array_equal(keys, theirs.keys)
    held = theirs.keys != 0
    assert held.any()
    assert np.array_equal(ours.held.tokens[:-WAYS].numpy()[held], theirs.tokens[held])
    logs = ours.held.logs[:-WAYS].numpy()[held]
    np.testing.assert_allclose(logs, theirs.logs[held], rtol=0, atol=0.05)


def test_a_device_table_learns_what_a_table_in_main_memory_learns() -> None:
    ours, theirs = DeviceTable(CPU, False, ENTRIES), SuccessorTable(ENTRIES)
    teach(ours)
    teach(theirs)
    assert_same_table(ours, theirs)
    assert_same_table(DeviceTable.of(theirs, CPU, False), theirs)


def test_the_likeliest_tokens_of_a_gpus_logits_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table in main memory reads logits on a GPU, and those that are not float32, in torch."""
    ours, theirs = SuccessorTable(ENTRIES), SuccessorTable(ENTRIES)
    learn = SuccessorTable.learn
    monkeypatch.setattr(
        SuccessorTable,
        "learn",
        lambda table, before, last, logits: learn(table, before, last, logits.double()),
    )
    teach(ours)
    monkeypatch.undo()
    monkeypatch.setattr(SuccessorTable, "learn", SuccessorTable.learn_twin)
    teach(theirs)
    held = theirs.keys != 0
    assert np.array_equal(ours.keys, theirs.keys)
    assert np.array_equal(ours.tokens[held], theirs.tokens[held])
    np.testing.assert_allclose(ours.logs[held], theirs.logs[held], rtol=0, atol=1e-5)


@pytest.mark.parametrize("has_rates", [False, True])
@pytest.mark.parametrize("is_trained", [False, True])
def test_the_device_proposer_drafts_what_the_one_in_main_memory_drafts(
    has_rates: bool, is_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a batch differ in tenant, temperature, depth and rule."""
    # the native one rounds logarithms
    monkeypatch.setattr(SuccessorTable, "learn", SuccessorTable.learn_twin)
    trained = SuccessorTable(256) if is_trained else None
    if trained is not None:
        teach(trained, portions=5)
    theirs, ours = Recycle(trained), DeviceRecycle(CPU, False, trained)
    generator, longest = random.Random(3), 0
    for proposer in (theirs, ours):
        for slot, tenant in enumerate(["a", "b", "a", ""]):
            proposer.open(slot, [1, 2], tenant=tenant)
        torch_generator = torch.Generator().manual_seed(5)
        for slot in (0, 1, 0):
            draft = Draft.root(3)
            for token in range(6):
                draft.add(token, max(0, token - 2), "x")
            proposer.learn(slot, [7, 3], draft, torch.randn(7, VOCAB, generator=torch_generator))
    for _ in range(12):
        requests = []
        for slot in range(4):
            rates = array("f", [generator.random() for _ in range(32)]) if has_rates else None
            text = [generator.randrange(8) for _ in range(generator.choice([1, 3]))]
            requests.append(
                DraftRequest(
                    slot=slot,
                    tokens=text,
                    params=SamplingParams(temperature=generator.choice([0.0, 0.8])),
                    noise=Noise(slot, len(text) - 1),
                    depth=generator.randrange(1, 6),
                    coupled=generator.random() < 0.8,
                    branching=generator.random() < 0.6,
                    confidence_rates=rates,
                )
            )
        for found, expected in zip(ours.propose(requests), theirs.propose(requests), strict=True):
            assert (found.tokens, found.parents) == (expected.tokens, expected.parents)
            assert found.confidence_bins == expected.confidence_bins
            assert found.path_probs == pytest.approx(expected.path_probs, rel=1e-4)
            longest = max(longest, len(found))
    assert longest > 5


def test_rounds_need_tables_of_one_tenant() -> None:
    proposer = DeviceRecycle(CPU, False)
    for slot, tenant in enumerate(["a", "a", "b"]):
        proposer.open(slot, [1], tenant=tenant)
    drafter = proposer.drafter([0, 1])
    assert drafter is not None and drafter is proposer.drafter([1])
    assert proposer.drafter([0, 2]) is None
    proposer.forget()
    again = proposer.drafter([0])
    assert again is not None and again is not drafter, "its table is another one"


def test_noise_of_rounds_is_that_of_steps() -> None:
    """The key of a level's noise, from the key of the request and the position."""
    noise = Noise(11, 5)
    base = torch.tensor([rng.signed(rng.stream(11, rng.Lane.TARGET))])
    for depth in range(3):
        key = rng.substreams(base, torch.tensor([5 + 1 + depth]))
        assert key.tolist() == [rng.signed(noise.target(depth))]
