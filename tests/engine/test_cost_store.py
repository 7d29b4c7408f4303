"""What the depth policy learned outlives its process: counts and seconds only, and no file can do
harm."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.engine import cost_store as learned
from forerun.engine.acceptance import Acceptance
from forerun.engine.cost_store import MIN_PASSES, CostStore
from forerun.engine.depth import MIN_PLAIN_PASSES, DepthPolicy
from forerun.types import Draft
from tests import tiny


def experienced() -> DepthPolicy:
    policy = DepthPolicy()
    for _ in range(40):
        for tokens in (1, 2, 5):
            policy.record_forward(tokens, 0.01 + 0.001 * tokens)
        policy.costs.add_draft("eagle3", 2, 0.002)
        policy.costs.add_draft("eagle3", 2, 0.003, num_requests=4)
        policy.record_verdict("eagle3", Acceptance(), 4, 3)
        draft = Draft.chain(1, [2, 3], "eagle3")
        draft.confidence_bins = [15, 20]
        policy.bins("eagle3", True).add(draft, [0, 1])
    return policy


def saved(policy: DepthPolicy, path: Path) -> CostStore:
    """The store of a policy that has learned enough since it was opened."""
    store = CostStore(policy, path)
    store._saved_passes = 0
    store.save()
    return store


def test_another_process_begins_with_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x.json"
    first = CostStore(experienced(), path)
    first.save()
    assert not path.exists(), "nothing was learned since"
    for _ in range(MIN_PASSES):
        first.policy.record_forward(1, 0.011)
    first.save()
    other = CostStore(DepthPolicy(), path).policy
    assert isinstance(other, DepthPolicy) and other.costs.known(1, MIN_PLAIN_PASSES)
    for tokens in (1, 2, 3, 5):
        expected = first.policy.costs.forward(tokens)
        assert other.costs.forward(tokens) == pytest.approx(expected, rel=0.02)
    assert other.costs.draft("eagle3", 2, 4) == pytest.approx(0.003, rel=0.05)
    expected = first.policy.acceptance_rate("eagle3", Acceptance())
    assert other.acceptance_rate("eagle3", Acceptance()) == pytest.approx(expected)
    assert other.bins("eagle3", True).rates == first.policy.bins("eagle3", True).rates
    assert other.bins("eagle3", False).rates == DepthPolicy().bins("x", False).rates


def test_what_it_knows_gives_way(tmp_path: Path) -> None:
    """A machine that became three times slower is believed after some passes."""
    saved(experienced(), tmp_path / "x.json")
    policy = CostStore(DepthPolicy(), tmp_path / "x.json").policy
    for _ in range(60):
        for tokens in (1, 2, 5):
            policy.record_forward(tokens, 0.03 + 0.003 * tokens)
    assert policy.cost_table()[0][1] == pytest.approx(0.033, rel=0.2)


def broken() -> dict[str, str]:
    good = experienced().state()
    laws = good["sources"]["eagle3"]
    changed = {
        "negative": {"costs": {"forwards": [[1, -1.0, 3]], "drafts": {}}},
        "endless": {"costs": {"forwards": [[1, 1e300, 3]], "drafts": {}}},
        "nothing": {"costs": {"forwards": [[0, 1.0, 3]], "drafts": {}}},
        "words": {"costs": {"forwards": [["a", "b", "c"]], "drafts": {}}},
        "counts": {"sources": {"eagle3": [1e30, 0, 0, 0]}},
        "few counts": {"sources": {"eagle3": [1.0]}},
        "no number": {"sources": {"eagle3": [float("nan"), 0, 0, 0]}},
        "sixteenths": {"confidence": {"1 eagle3": [[0.0], [0.0]]}},
        "octaves": {"costs": {"forwards": [], "drafts": {"many eagle3": []}}},
        "sizes without end": {"costs": good["costs"] | {"forwards": [[float("inf"), 1.0, 3]]}},
        "counts without end": {"costs": good["costs"] | {"forwards": [[1, 1.0, float("inf")]]}},
        "sizes of no number": {"costs": good["costs"] | {"forwards": [[float("nan"), 1.0, 3]]}},
        "seconds of no number": {"costs": good["costs"] | {"prefills": [[1, float("nan"), 3]]}},
        "enormous numbers": {"sources": {"eagle3": [10**400, *laws[1:]]}},
        "enormous sizes": {"costs": good["costs"] | {"forwards": [[10**30, 1.0, 3]]}},
        "no time at all": {"costs": good["costs"] | {"forwards": [[1, 1e-300, 3]]}},
        "no weights": {"sources": {"eagle3": [0.0] * len(laws)}},
        "more than was seen": {"confidence": {"1 eagle3": [[5.0] * 32, [1.0] * 32]}},
        "sources in a list": {"sources": [1]},
        "drafts in a list": {"costs": good["costs"] | {"drafts": [1]}},
    }
    files = {name: json.dumps(good | change) for name, change in changed.items()}
    return files | {
        "half": json.dumps(good)[:-40],
        "empty": "",
        "list": "[]",
        "null": "null",
        "text": '"x"',
        "number": "7",
        "other keys": '{"version": 9}',
        "zeros": "\0" * 100,
        "no JSON": "hello",
        "digits": "9" * 5000,
        "deep list": "[" * 100_000,
        "deep object": '{"a":' * 100_000,
        "deep": "[" * 9000 + "]" * 9000,
    }


@pytest.mark.parametrize("name", broken())
def test_a_file_that_is_damaged_is_none(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text(broken()[name])
    policy = CostStore(DepthPolicy(), tmp_path / "x.json").policy
    assert policy.state() == DepthPolicy().state(), "nothing of it is half believed"
    told_once(tmp_path / "x.json", capsys)
    saved(experienced(), tmp_path / "x.json")
    capsys.readouterr()
    assert CostStore(DepthPolicy(), tmp_path / "x.json").policy.state() != DepthPolicy().state()
    assert not capsys.readouterr().err, "it was replaced"


def told_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = capsys.readouterr()
    assert said.err.startswith(f"note: {path} is damaged and ignored (")
    assert said.err.count("\n") == 1
    assert not said.out
    assert len(said.err) < 500 + len(str(path))


@pytest.mark.parametrize(
    "kind", ["directory", "pipe", "link to nowhere", "no text", "huge", "link in circles"]
)
def test_whatever_is_in_its_place_is_none(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is waited for, and no more is read than a process would have written."""
    path = tmp_path / "x.json"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind.startswith("link"):
        path.symlink_to(path if kind == "link in circles" else tmp_path / "nowhere")
    elif kind == "no text":
        path.write_bytes(b"\xff\xfe{}")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    policy = CostStore(DepthPolicy(), path).policy
    assert policy.state() == DepthPolicy().state()
    told_once(path, capsys)


def test_a_file_that_may_not_be_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tests may run as root, whom no mode of a file stops."""

    def denied(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "x.json"
    path.write_text(json.dumps(experienced().state()))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", denied)
        assert CostStore(DepthPolicy(), path).policy.state() == DepthPolicy().state()
    assert "(Permission denied)" in capsys.readouterr().err
    assert CostStore(DepthPolicy(), path).policy.state() != DepthPolicy().state()
    assert not capsys.readouterr().err


def test_no_file_and_a_sound_one_are_told_nothing_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CostStore(DepthPolicy(), tmp_path / "x.json")
    CostStore(DepthPolicy(), None)
    (tmp_path / "x.json").write_text(json.dumps(experienced().state()))
    assert CostStore(DepthPolicy(), tmp_path / "x.json").policy.state() != DepthPolicy().state()
    assert not capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = saved(experienced(), tmp_path / "file" / "x.json")
    assert kept.path is None
    kept.save()


@pytest.mark.parametrize("rule", ["match", "token"])
def test_the_text_is_the_same_with_it(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second engine drafts from its first pass on. Small models have no file."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    params = SamplingParams.pure(max_tokens=60, seed=1, ignore_eos=True)
    options = {"draft": "suffix", "kv_tokens": 512}
    plain = LLM(tiny.spoken(), **options).generate("The name of the name", params)[0].token_ids
    assert not list(tmp_path.rglob("*.json"))
    monkeypatch.setattr(learned, "MIN_WEIGHT_BYTES", 0)
    monkeypatch.setattr(learned, "MIN_PASSES", 1)
    first = LLM(tiny.spoken(), rule=rule, **options)
    first.generate("The name of the name", params)
    (path,) = tmp_path.rglob("*.json")
    assert "name" not in path.read_text().replace("names", "")
    second = LLM(tiny.spoken(), rule=rule, **options)
    assert second.engine.policy.costs.num_passes > 0
    other = LLM(tiny.spoken(), rule=rule, **options | {"draft": "ngram"})
    assert other.engine.policy.costs.num_passes == 0
    said = second.generate("The name of the name", params)[0]
    assert rule == "token" or said.token_ids == plain
