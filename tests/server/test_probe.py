"""A drafter that is none for its target is told before anybody waits for it; one that is, is
not."""

from __future__ import annotations

import pytest

from forerun import LLM
from forerun.server.probe import probe
from tests import other_words, tiny


@pytest.mark.parametrize("draft", ["off", "suffix", "model", "suffix+model", "across"])
def test_what_works_is_not_told(draft: str) -> None:
    where = other_words.drafter("shuffled") if draft == "across" else tiny.spoken(0.1)
    spec = (
        f"{draft.replace('across', 'model')}:{where}" if draft not in ("off", "suffix") else draft
    )
    llm = LLM(tiny.spoken(), draft=spec, dtype="float64", kv_tokens=1024)
    assert probe(llm) == ""


def test_a_model_that_says_something_else_is_told() -> None:
    llm = LLM(
        tiny.spoken(), draft=f"suffix+model:{tiny.worded(5.0)}", dtype="float64", kv_tokens=1024
    )
    assert "the draft model does not pay with this target" in probe(llm) and "same family" in probe(
        llm
    )


def test_without_a_tokenizer() -> None:
    llm = LLM(tiny.family("llama"), draft=f"model:{tiny.drafter('llama')}", kv_tokens=512)
    assert isinstance(probe(llm), str)
