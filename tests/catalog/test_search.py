"""The search for local drafters (bundled, trained, downloaded, small models) and their
measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.catalog.measurements import Measurement, record
from forerun.catalog.search import find_local
from forerun.errors import RequestError
from tests.catalog.hub import directory, eagle_config, target_config
from tests.tiny_gguf import tiny_gguf

BIG = {"token_embd.weight": ("Q8_0", (3, 32)), "blk.0.ffn_up.weight": ("Q8_0", (3, 3200))}


def names(found: list) -> list[str]:
    return [Path(one.facts.name).name for one in found]


def test_all_local_drafters(home: Path) -> None:
    directory(home / "work/mine", eagle_config(), card="---\ndomains: [Law]\n---\n")
    directory(home / "work/model", target_config(), {"model.embed_tokens.weight": (64, 16)})
    directory(home / "work/.hidden/no", eagle_config())
    directory(home / "work/a/b/c/d/e/deep", eagle_config())
    (home / "work/odd").mkdir()
    (home / "work/odd/config.json").write_text("no")
    snapshot = directory(home / "hub/models--org--head/snapshots/c1", eagle_config("org/Other"))
    found, notes = find_local(folders=[home / "work"])
    assert names(found) == ["head", "mine", "SmolLM2-135M-Instruct"] and not notes
    assert [one.origin for one in found] == ["hub", "directory", "bundled"]
    assert found[0].draft == "eagle3:org/head" and found[1].domains == ("law",)
    (snapshot / "model.safetensors").write_bytes(b"cut")
    found, notes = find_local(folders=[home / "work"])
    assert names(found) == ["mine", "SmolLM2-135M-Instruct"]
    assert "not a complete safetensors file" in notes[0]


def test_local_drafters_that_fit_a_target(home: Path) -> None:
    """Find heads that name the target, heads without a name that fit, and much smaller models."""
    target = directory(
        home / "models/Big-8B", target_config(), {"model.embed_tokens.weight": (64, 16)}
    )
    directory(home / "work/named", eagle_config("org/Big-8B"))
    directory(home / "work/fits", eagle_config(None))
    directory(home / "work/other", eagle_config("org/Other"))
    directory(home / "work/wide", eagle_config(None, target_hidden_size=32))
    assert set(names(find_local(str(target), [home / "work"])[0])) == {"named", "fits"}
    big = tiny_gguf(home / "gguf/big.gguf", BIG, llama__embedding_length=32, llama__block_count=1)
    small = tiny_gguf(home / "gguf/small.gguf")
    tiny_gguf(home / "gguf/else.gguf", tokenizer__ggml__tokens=["x", "y", "z"])
    found, _ = find_local(str(big), [home / "gguf"])
    assert [(one.facts.name, one.draft) for one in found] == [(str(small), f"model:{small}")]
    assert [one.facts.name for one in find_local(str(big), [home / "gguf", home / "work"])[0]] == [
        str(small)
    ]


def test_a_target_that_is_not_local_is_refused(home: Path) -> None:
    with pytest.raises(RequestError, match="org/None is not here"):
        find_local("org/None")


def test_measurements_are_attached(home: Path) -> None:
    """Drafters have stored measurements and those of training, and are ordered by their speed on
    the given kind of text."""
    target = directory(
        home / "models/Big-8B", target_config(), {"model.embed_tokens.weight": (64, 16)}
    )
    entries = [
        {"task": "held-out", "temperature": t, "depth": d, "accepted_length": n, "passes": 9}
        for t, d, n in ((0.0, 1, 1.5), (0.0, 4, 2.5), (0.8, 4, 9.0))
    ]
    results = [{"draft": "off", "times_plain": 1.0}, {"draft": "eagle3", "times_plain": 1.3}]
    report = {"target": "org/Big-8B", "measured": [*entries, {"task": 5}, None, "x"]}
    training = json.dumps(report | {"speed": {"results": results}})
    one = directory(home / "work/one", eagle_config("org/Big-8B"), training__json=training)
    two = directory(home / "work/two", eagle_config("org/Big-8B"), training__json="[]")
    record(Measurement("org/Big-8B", str(two), "eagle3", "Code", 3.0, 1.9))
    record(Measurement(str(target), str(two), "eagle3", "law", 1.2, 0.9))
    record(Measurement("org/Other", str(two), "eagle3", "law", 9.9, 9.9))
    record(Measurement("org/Big-8B", str(one), "eagle3", "law", 2.0, 1.2))
    found, _ = find_local(str(target), [home / "work"])
    assert names(found) == ["two", "one"]
    assert [(m.category, m.accepted_length, m.times_plain) for m in found[1].measured] == [
        ("held-out", 2.5, 1.3), ("law", 2.0, 1.2),
    ]  # fmt: skip
    assert names(find_local(str(target), [home / "work"], "law")[0]) == ["one", "two"]
    assert names(find_local(str(target), [home / "work"], "code")[0]) == ["two"]
    assert find_local(str(target), [home / "work"], "poems")[0] == []
    json.dumps([one.as_dict() for one in found])
