"""The costs and acceptance rates that the depth policy learned are saved for other processes, and a
damaged file is ignored."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.engine import cost_store
from forerun.engine.acceptance import Acceptance
from forerun.engine.cost_store import MIN_PASSES, CostStore
from forerun.engine.depth import MIN_PLAIN_PASSES, DepthPolicy
from forerun.types import Draft
from tests import tiny


def trained_policy() -> DepthPolicy:
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
    """Return a store that has saved `policy` to `path`."""
    store = CostStore(policy, path)
    store._saved_passes = 0
    store.save()
    return store


def test_another_process_starts_from_the_saved_state(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x.json"
    first = CostStore(trained_policy(), path)
    first.save()
    assert not path.exists(), "no forward pass was recorded since"
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


def test_new_measurements_replace_saved_ones(tmp_path: Path) -> None:
    """The costs follow a machine that became three times slower within some passes."""
    saved(trained_policy(), tmp_path / "x.json")
    policy = CostStore(DepthPolicy(), tmp_path / "x.json").policy
    for _ in range(60):
        for tokens in (1, 2, 5):
            policy.record_forward(tokens, 0.03 + 0.003 * tokens)
    assert policy.cost_table()[0][1] == pytest.approx(0.033, rel=0.2)


def damaged_files() -> dict[str, str]:
    good = trained_policy().state()
    weights = good["sources"]["eagle3"]
    changed = {
        "negative": {"costs": {"forwards": [[1, -1.0, 3]], "drafts": {}}},
        "huge seconds": {"costs": {"forwards": [[1, 1e300, 3]], "drafts": {}}},
        "zero tokens": {"costs": {"forwards": [[0, 1.0, 3]], "drafts": {}}},
        "strings": {"costs": {"forwards": [["a", "b", "c"]], "drafts": {}}},
        "counts": {"sources": {"eagle3": [1e30, 0, 0, 0]}},
        "few counts": {"sources": {"eagle3": [1.0]}},
        "nan": {"sources": {"eagle3": [float("nan"), 0, 0, 0]}},
        "few confidence bins": {"confidence": {"1 eagle3": [[0.0], [0.0]]}},
        "draft size that is no number": {"costs": {"forwards": [], "drafts": {"many eagle3": []}}},
        "infinite sizes": {"costs": good["costs"] | {"forwards": [[float("inf"), 1.0, 3]]}},
        "infinite counts": {"costs": good["costs"] | {"forwards": [[1, 1.0, float("inf")]]}},
        "sizes of nan": {"costs": good["costs"] | {"forwards": [[float("nan"), 1.0, 3]]}},
        "seconds of nan": {"costs": good["costs"] | {"prefills": [[1, float("nan"), 3]]}},
        "enormous numbers": {"sources": {"eagle3": [10**400, *weights[1:]]}},
        "enormous sizes": {"costs": good["costs"] | {"forwards": [[10**30, 1.0, 3]]}},
        "tiny seconds": {"costs": good["costs"] | {"forwards": [[1, 1e-300, 3]]}},
        "zero weights": {"sources": {"eagle3": [0.0] * len(weights)}},
        "more accepted than seen": {"confidence": {"1 eagle3": [[5.0] * 32, [1.0] * 32]}},
        "sources in a list": {"sources": [1]},
        "drafts in a list": {"costs": good["costs"] | {"drafts": [1]}},
    }
    files = {name: json.dumps(good | change) for name, change in changed.items()}
    return files | {
        "truncated": json.dumps(good)[:-40],
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
        "deep and complete": "[" * 9000 + "]" * 9000,
    }


@pytest.mark.parametrize("name", damaged_files())
def test_a_damaged_file_is_ignored_and_replaced(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text(damaged_files()[name])
    policy = CostStore(DepthPolicy(), tmp_path / "x.json").policy
    assert policy.state() == DepthPolicy().state(), "no part of it was loaded"
    check_one_note(tmp_path / "x.json", capsys)
    saved(trained_policy(), tmp_path / "x.json")
    capsys.readouterr()
    assert CostStore(DepthPolicy(), tmp_path / "x.json").policy.state() != DepthPolicy().state()
    assert not capsys.readouterr().err, "the file was replaced"


def check_one_note(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = capsys.readouterr()
    assert output.err.startswith(f"note: {path} is damaged and ignored (")
    assert output.err.count("\n") == 1
    assert not output.out
    assert len(output.err) < 500 + len(str(path))


@pytest.mark.parametrize(
    "kind", ["directory", "pipe", "dangling link", "not UTF-8", "huge", "circular link"]
)
def test_anything_but_a_readable_file_is_ignored(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Opening never blocks, and no more is read than the store would have written."""
    path = tmp_path / "x.json"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind.endswith("link"):
        path.symlink_to(path if kind == "circular link" else tmp_path / "nowhere")
    elif kind == "not UTF-8":
        path.write_bytes(b"\xff\xfe{}")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    policy = CostStore(DepthPolicy(), path).policy
    assert policy.state() == DepthPolicy().state()
    check_one_note(path, capsys)


def test_an_unreadable_file_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`read_text` is patched since the tests may run as root, which file modes do not stop."""

    def denied(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "x.json"
    path.write_text(json.dumps(trained_policy().state()))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", denied)
        assert CostStore(DepthPolicy(), path).policy.state() == DepthPolicy().state()
    assert "(Permission denied)" in capsys.readouterr().err
    assert CostStore(DepthPolicy(), path).policy.state() != DepthPolicy().state()
    assert not capsys.readouterr().err


def test_a_missing_or_valid_file_prints_no_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CostStore(DepthPolicy(), tmp_path / "x.json")
    CostStore(DepthPolicy(), None)
    (tmp_path / "x.json").write_text(json.dumps(trained_policy().state()))
    assert CostStore(DepthPolicy(), tmp_path / "x.json").policy.state() != DepthPolicy().state()
    assert not capsys.readouterr().err


def test_a_path_that_cannot_be_written_disables_saving(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = saved(trained_policy(), tmp_path / "file" / "x.json")
    assert store.path is None
    store.save()


@pytest.mark.parametrize("rule", ["match", "token"])
def test_saved_costs_do_not_change_the_output(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second engine drafts from its first pass on. Small models save nothing."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    params = SamplingParams.pure(max_tokens=60, seed=1, ignore_eos=True)
    options = {"draft": "suffix", "kv_tokens": 512}
    plain = LLM(tiny.repetitive(), **options).generate("The name of the name", params)[0].token_ids
    assert not list(tmp_path.rglob("*.json"))
    monkeypatch.setattr(cost_store, "MIN_WEIGHT_BYTES", 0)
    monkeypatch.setattr(cost_store, "MIN_PASSES", 1)
    first = LLM(tiny.repetitive(), rule=rule, **options)
    first.generate("The name of the name", params)
    (path,) = tmp_path.rglob("*.json")
    assert "name" not in path.read_text().replace("names", "")
    second = LLM(tiny.repetitive(), rule=rule, **options)
    assert second.engine.policy.costs.num_passes > 0
    other = LLM(tiny.repetitive(), rule=rule, **options | {"draft": "ngram"})
    assert other.engine.policy.costs.num_passes == 0
    completion = second.generate("The name of the name", params)[0]
    assert rule == "token" or completion.token_ids == plain
