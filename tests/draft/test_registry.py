"""Names of drafts: what they stand for, and what is said of those that stand for nothing."""

import pytest

from forerun import LLM, ConfigError, SamplingParams
from forerun.config import parse_draft
from tests import tiny


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("auto", ("auto", "")),
        ("off", ("off", "")),
        ("ngram", ("ngram", "")),
        ("model:some/where", ("model", "some/where")),
        ("eagle3:a+b:c", ("eagle3", "a+b:c")),
        ("suffix+eagle3:a+b", ("suffix+eagle3", "a+b")),
        ("ngram+block:x", ("ngram+block", "x")),
    ],
)
def test_names(spec: str, found: tuple[str, str]) -> None:
    assert parse_draft(spec) == found


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("sufix", "did you mean 'suffix'"),
        ("model", "write model:DIRECTORY"),
        ("suffix:x", "takes no argument"),
        ("suffix+ngram", "goes before a draft with weights"),
        ("suffix+auto", "goes before a draft with weights"),
        ("suffix+", "there is no draft ''"),
        ("model:x+suffix+", None),
    ],
)
def test_names_that_stand_for_nothing(spec: str, said: str | None) -> None:
    if said is None:
        assert parse_draft(spec) == ("model", "x+suffix+")  # a directory may be called so
        return
    with pytest.raises(ConfigError, match=said):
        parse_draft(spec)


def test_both_draft_where_each_can_and_the_text_is_the_same() -> None:
    """Copies and drafts with weights in one text, and plain decoding's tokens."""
    llm = LLM(tiny.spoken(), draft=f"suffix+model:{tiny.spoken(0.1)}", depth=3, kv_tokens=512)
    params = SamplingParams(max_tokens=60, temperature=0.6, seed=3, ignore_eos=True)
    prompt = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return"
    drafted = llm.generate(prompt, params)[0]
    assert {"suffix", "model"} <= drafted.stats.by_source.keys()
    assert drafted.token_ids == llm.generate(prompt, params, draft="off")[0].token_ids
    assert drafted.token_ids == llm.generate(prompt, params, draft="model")[0].token_ids
