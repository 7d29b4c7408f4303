"""The draft `auto`: suffix matching before the drafter that comes with forerun for a model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.catalog.survey import survey
from forerun.draft import kinds
from forerun.draft.eagle.module import save_head
from forerun.draft.kinds import automatic, bundled_for
from forerun.kernels import native
from forerun.models.hub import DEFAULT
from forerun.models.local import LocalModel
from tests import tiny
from tests.draft.helpers import needs_native

PLACES = (
    f"/a/{DEFAULT}.Q4_1.gguf", f"/a/{DEFAULT.lower()}-q8_0.gguf", f"/hub/models--X--{DEFAULT}/snapshots/0a1b",
    f"/hub/models--X--{DEFAULT}-GGUF/snapshots/0a1b/model.gguf",
)  # fmt: skip
OTHER = Path("/a/Qwen3-0.6B.gguf")


def head() -> object:
    return tiny.eagle(tiny.eagle_config("llama", draft_vocab=50))


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A head for the tiny model, as if it came with forerun for the default model."""
    monkeypatch.setattr(kinds, "BUNDLED", tmp_path / "drafters")
    save_head(head(), tmp_path / "drafters" / DEFAULT)
    return tmp_path / "drafters" / DEFAULT


def test_the_bundled_head_of_a_model_is_found_by_its_name(shipped: Path) -> None:
    with_head = f"suffix+eagle3:{shipped}"
    for place in map(Path, PLACES):
        assert bundled_for(place) == shipped
        assert automatic("auto", place, "avx512") == with_head
        assert automatic("auto", place, "avx2") == with_head
        assert automatic("auto", place, "portable") == "suffix", "a head does not pay there"
        assert automatic("auto", place, "") == "suffix", "a head does not pay in torch"
        assert automatic("ngram", place, "avx512") == "ngram", "an explicit draft is kept"
    assert bundled_for(OTHER) is None
    assert automatic("auto", OTHER, "avx512") == "suffix"
    shutil.rmtree(shipped)
    assert bundled_for(Path(PLACES[0])) is None, "an installation without it"


@needs_native
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_auto_drafts_with_the_bundled_head_and_changes_no_text(
    temperature: float, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "HEAD_PAYS", (native.start(),))
    shutil.copytree(tiny.family("llama"), model := tmp_path / DEFAULT)
    llm, other = LLM(model, kv_tokens=1024), LLM(tiny.family("llama"), kv_tokens=1024)
    assert (llm.draft, other.draft) == ("suffix+eagle3", "suffix")
    params = SamplingParams.pure(max_tokens=40, temperature=temperature, seed=5, ignore_eos=True)
    prompts = [[5, 6, 7], [9, 8] * 4, [3, 1, 4, 1, 5]]
    (row,) = survey([LocalModel("x", model, "here")])
    assert row.draft == llm.draft, "forerun models names what serve drafts with"
    plain = [c.token_ids for c in other.generate(prompts, params, draft="off")]
    eagle3 = {"draft": "eagle3", "depth": 3}
    for options in ({}, {"draft": "auto"}, {"depth": 3}, eagle3, {"draft": "off"}):
        found = llm.generate(prompts, params, **options)
        assert [c.token_ids for c in found] == plain
        if options is eagle3:
            assert {name for c in found for name in c.stats.by_source} == {"eagle3"}
