"""Draft syntax: what drafts stand for, and the errors for those that stand for nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun import LLM, ConfigError, SamplingParams, draft_spec
from forerun.config import Config
from forerun.draft_spec import (
    WEIGHTLESS,
    draft_name,
    drafts_in,
    joined,
    kind_of_name,
    names_in,
    parse_draft,
)
from tests import tiny
from tests.engine import build


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("auto", (("auto", ""),)),
        ("off", (("off", ""),)),
        ("ngram", (("ngram", ""),)),
        ("recycle", (("recycle", ""),)),
        ("lookahead:window=4,pool=2", (("lookahead", "window=4,pool=2"),)),
        ("suffix+recycle:a/table", (("suffix", ""), ("recycle", "a/table"))),
        ("model:some/where", (("model", "some/where"),)),
        ("mtp", (("mtp", ""),)),
        ("suffix+mtp", (("suffix", ""), ("mtp", ""))),
        ("mtp:some/where", (("mtp", "some/where"),)),
        ("eagle3:a+b:c", (("eagle3", "a+b:c"),)),
        ("suffix+eagle:a+b", (("suffix", ""), ("eagle", "a+b"))),
        ("suffix+eagle3:a+b", (("suffix", ""), ("eagle3", "a+b"))),
        ("ngram+suffix+block:x", (("ngram", ""), ("suffix", ""), ("block", "x"))),
        ("model:x+suffix", (("model", "x+suffix"),)),  # a directory may be called so
        ("model:a (b)&c", (("model", "a (b)&c"),)),
    ],
)
def test_drafts_joined_by_plus_are_parsed(spec: str, found: tuple[tuple[str, str], ...]) -> None:
    assert parse_draft(spec) == found
    assert draft_name(spec) == "+".join(name for name, _ in found)


def test_a_path_ends_before_a_registered_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = "model:some/where|mine"
    assert parse_draft(spec) == (("model", "some/where|mine"),)
    monkeypatch.setattr(draft_spec, "plugins", lambda: {"mine": None})
    assert parse_draft(spec) == (("model", "some/where"), ("mine", ""))


@pytest.mark.parametrize(
    ("spec", "name", "arguments"),
    [
        ("suffix|recycle", "suffix+recycle", ["", ""]),
        ("suffix&eagle3:a/b", "suffix&eagle3", ["", "a/b"]),
        ("suffix|ngram&model:x", "suffix+ngram&model", ["", "", "x"]),
        ("(suffix|ngram)&model:x", "(suffix+ngram)&model", ["", "", "x"]),
        ("(suffix|model:a(1))&recycle", "(suffix+model)&recycle", ["", "a(1)", ""]),
        ("((suffix))", "suffix", [""]),
        ("suffix&(ngram&recycle)", "suffix&ngram&recycle", ["", "", ""]),
        (
            "retrieval:a,b&self:layers=0-3,9|eagle3:x",
            "retrieval&self+eagle3",
            ["a,b", "layers=0-3,9", "x"],
        ),
        ("model:some&eagle3:thing|suffix", "model&eagle3+suffix", ["some", "thing", ""]),
        ("suffix|eagle3:x?model:y&ngram", "suffix+eagle3?model&ngram", ["", "x", "y", ""]),
        ("(suffix|eagle3:x)?(model:y?ngram)", "(suffix+eagle3)?model?ngram", ["", "x", "y", ""]),
        ("suffix&(eagle3:x?model:y)", "suffix&(eagle3?model)", ["", "x", "y"]),
        ("suffix>model:x", "suffix>model", ["", "x"]),
        ("recycle|eagle3:a>model:x&suffix", "recycle+eagle3>model&suffix", ["", "a", "x", ""]),
        ("(suffix|ngram)>model:x>self:int4", "(suffix+ngram)>model>self", ["", "", "x", "int4"]),
        ("suffix|ahead(model:x)", "suffix+ahead(model)", ["", "x"]),
        ("ahead((suffix>model:a+b))&recycle", "ahead(suffix>model)&recycle", ["", "a+b", ""]),
        ("model:x|ahead(self:int4)", "model+ahead(self)", ["x", "int4"]),
        ("model:x?model:y&model:z", "model?model#2&model#3", ["x", "y", "z"]),
    ],
)
def test_compositions_are_parsed(spec: str, name: str, arguments: list[str]) -> None:
    assert draft_name(spec) == name
    assert [argument for _, argument in parse_draft(spec)] == arguments
    assert [kind_of_name(leaf) for leaf in names_in(name)] == [
        kind for kind, _ in parse_draft(spec)
    ]
    assert len(set(names_in(name))) == len(arguments), "each part has a name of its own"


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (["suffix"], "suffix"),
        (["model:x", "eagle3:y"], "(model:x)?(eagle3:y)"),
        (
            ["model:x", "suffix", "eagle3:y&recycle", "ngram"],
            "(model:x)?suffix?(eagle3:y&recycle)?ngram",
        ),
        (["suffix", "ngram"], "suffix?ngram"),
        (["suffix|ngram", "recycle"], "(suffix|ngram)?recycle"),
    ],
)
def test_a_list_of_drafts_is_joined_into_one(specs: list[str], expected: str) -> None:
    assert joined(specs) == Config(draft=expected).draft == expected
    assert Config(draft=specs).draft == expected  # type: ignore[arg-type]


@given(st.text(alphabet="+|?&>():,#suffixngrammodel0=-ahead", max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """The name of a draft stands for the same kinds in the same order."""
    try:
        name = draft_name(text)
    except ConfigError:
        return
    assert [kind_of_name(leaf) for leaf in names_in(name)] == [
        kind for kind, _ in parse_draft(text)
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sufix", "did you mean 'suffix'"),
        ("model", "write model:DIRECTORY"),
        ("suffix:x", "takes no argument"),
        ("suffix|lookahead:depth=3", "does not take 'depth=3'"),
        ("suffix+suffix", "'suffix' stands twice"),
        ("suffix&(ngram|suffix)", "'suffix' stands twice"),
        ("suffix+auto", "'auto' cannot go with others"),
        ("off&suffix", "'off' cannot go with others"),
        (
            "suffix+sufix",
            r"there is no draft 'sufix' \(at character 8 of 'suffix.sufix'\): did you mean 'suffix'",
        ),
        ("suffix+", r"there is no draft '' \(at character 8"),
        ("", "there is no draft ''"),
        ("(suffix", r"no \) for each of its \("),
        ("suffix)", "is one . too many"),
        ("((suffix)&ngram))", "is one . too many"),
        ("(" * 9 + "suffix" + ")" * 9, "too deep"),
        ("ahead(" * 9 + "suffix" + ")" * 9, "too deep"),
        ("ahead(suffix", r"no \) for each of its \("),
        ("ahead", "there is no draft 'ahead'"),
        ("suffix|(ngram&model)", r"write model:DIRECTORY .*\(at character 15"),
    ],
)
def test_drafts_that_stand_for_nothing_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_draft(spec)


def test_commas_within_a_draft_do_not_end_it() -> None:
    text = "suffix, retrieval:a,b+suffix,self:layers=0-3,9,28-29,self:int4,retrieval:one,two,nonsense,auto,none"
    assert drafts_in(text) == [
        "suffix",
        "retrieval:a,b+suffix",
        "self:layers=0-3,9,28-29",
        "self:int4",
        "retrieval:one,two,nonsense",
        "auto",
        "none",
    ]
    assert drafts_in(" , ") == []


def test_each_drafter_without_weights_is_built_and_in_the_engine_tests() -> None:
    llm = LLM(tiny.repetitive(), kv_tokens=512)
    assert set(WEIGHTLESS) <= set(llm.engine.proposers) and set(WEIGHTLESS) <= set(build.PROPOSERS)


def test_two_models_draft_for_one_target() -> None:
    """Each has a name of its own, which requests may use; else the better one drafts."""
    llm = LLM(
        tiny.repetitive(),
        draft=[f"model:{tiny.repetitive(0.3)}", f"model:{tiny.repetitive(0.02)}"],
        kv_tokens=512,
    )
    params = SamplingParams.pure(max_tokens=60, temperature=0.6, seed=3, ignore_eos=True)
    plain = llm.generate("The name", params, draft="off")[0].token_ids
    for draft, names in (
        (None, {"model", "model#2"}),
        ("model#2", {"model#2"}),
        ("model&model#2", {"model", "model#2"}),
    ):
        for depth in (2, "auto"):
            (output,) = llm.generate("The name", params, draft=draft, depth=depth)
            assert output.token_ids == plain and {*output.stats.by_source} <= names
    with pytest.raises(ConfigError, match=r"has no draft 'model#3'"):
        llm.generate("The name", params, draft="model#3")
