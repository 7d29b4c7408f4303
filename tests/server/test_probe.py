"""The check of drafters at the start of a server: it warns of drafters that do not fit the target."""

from __future__ import annotations

import pytest

from forerun import LLM
from forerun.server.probe import probe
from tests import other_vocabularies, tiny


@pytest.mark.parametrize("draft", ["off", "suffix", "model", "suffix+model", "other words"])
def test_a_drafter_that_fits_is_not_reported(draft: str) -> None:
    if draft == "other words":
        draft = f"model:{other_vocabularies.drafter('shuffled')}"
    elif draft.endswith("model"):
        draft = f"{draft}:{tiny.repetitive(0.1)}"
    assert probe(LLM(tiny.repetitive(), draft=draft, dtype="float64", kv_tokens=1024)) == ""


def test_a_draft_model_with_low_acceptance_is_reported() -> None:
    draft = f"suffix+model:{tiny.with_tokenizer(5.0)}"
    warning = probe(LLM(tiny.repetitive(), draft=draft, dtype="float64", kv_tokens=1024))
    assert "the draft model does not pay with this target" in warning and "same family" in warning


def test_probe_works_without_a_tokenizer() -> None:
    llm = LLM(tiny.family("llama"), draft=f"model:{tiny.drafter('llama')}", kv_tokens=512)
    assert isinstance(probe(llm), str)
