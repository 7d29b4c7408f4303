"""`forerun check` passes a correct engine, and every known fault makes it fail and say where."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from forerun import LLM
from forerun.check import certificate, engine_checks, oracle
from forerun.check.certificate import LOSSLESS, Scope, certify, rule_checks
from forerun.check.engine_checks import EngineChecks, Schedule, Text, draft_probs
from forerun.check.oracle import ENUMERABLE, Children, enumerate_rule
from forerun.errors import ConfigError
from forerun.types import Draft, Proposal
from forerun.verify import RULES
from tests import tiny
from tests.check.faults import FAULTS
from tests.cli.test_main import run

ROUNDS, SEEDS = oracle.NUM_ROUNDS, oracle.SEEDS


@pytest.fixture(scope="module")
def pair():
    """Directories of a tiny target and of a draft model that often agrees with it."""
    return tiny.family("llama"), tiny.drafter("llama", noise=0.3)


@pytest.fixture(scope="module")
def llm(pair):
    return LLM(
        pair[0], draft=f"model:{pair[1]}", draft_quantization="none", kv_tokens=2048, width=2
    )


@pytest.fixture
def engine(llm):
    return EngineChecks(llm, 2, 12)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Fewer toy models, rounds with real random numbers, and texts of two drafters."""
    monkeypatch.setattr(oracle, "TOY_MODELS", [("exact", 2, 1), ("exact", 2, 2), ("float", 3, 2)])
    monkeypatch.setattr(oracle, "SEEDS", range(1))
    monkeypatch.setattr(oracle, "NUM_ROUNDS", 2000)
    monkeypatch.setattr(engine_checks, "COUNT", engine_checks.BATCH)


def scope(names=LOSSLESS, **options):
    sizes = {"texts": 2, "tokens": 12, "samples": 120}
    return Scope(tuple(names), ("suffix", "model"), **sizes | options)


def ignore(findings):
    pass


def test_a_correct_engine_is_certified(llm):
    reported = []
    made = certify(llm, scope(), reported.append)
    assert made.passed, made.failed
    assert [finding for part in reported for finding in part] == made.findings
    assert {part[0].part: len(part) for part in reported} == {
        "rules": 8, "forward": 1, "texts": 9, "distribution": 7, "faults": 7,
    }  # fmt: skip
    json.dumps(made.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "name, rule, parts",
    [
        ("lenient", "token", {"rules"}),
        ("skipped-rejection", "token", {"rules", "distribution"}),
        ("noise-by-round", "match", {"texts"}),
        ("late-match", "match", {"rules", "texts"}),
        ("lenient-match", "match", {"rules", "texts"}),
    ],
)
def test_a_fault_fails_the_certificate_in_the_expected_parts(name, rule, parts, llm, monkeypatch):
    monkeypatch.setattr(certificate, "FAULTS", FAULTS)
    made = certify(llm, scope([rule], fault=name), ignore)
    assert not made.passed and parts <= {finding.part for finding in made.failed}


@pytest.mark.parametrize("name", ["no-residual", "skipped-rejection"])
def test_the_distribution_of_the_running_engine_shows_faults(name, engine):
    assert engine.check_distribution(FAULTS[name].rule("token"), "model", 6000).passed is False
    assert engine.check_distribution(RULES["token"], "model", 400).passed


def greedy_as_sampled(draft: Draft, node: int, q: np.ndarray) -> list[Children]:
    """Return children like a drafter that treats its most likely token as sampled from q."""
    return [([(int(np.argmax(q)), Proposal.SAMPLED)], q, 1)]


@pytest.mark.parametrize("rule", ["token", "block", "tree"])
def test_a_greedy_token_treated_as_sampled_is_found(rule):
    schemes = {"greedy as sampled": greedy_as_sampled}
    assert not enumerate_rule(rule, ENUMERABLE[rule], schemes).passed


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name, rule",
    [(name, rule) for name, f in FAULTS.items() for rule in f.rules if name != "noise-by-round"],
)
def test_every_fault_is_found_on_toy_models_and_measured(name, rule, monkeypatch):
    """The measured error must exceed the rounding errors of float64."""
    monkeypatch.setattr(oracle, "SEEDS", SEEDS)
    monkeypatch.setattr(oracle, "NUM_ROUNDS", ROUNDS)
    failed = [
        f for f in (check() for check in rule_checks(rule, FAULTS[name])) if f.passed is False
    ]
    assert failed
    for finding in failed:
        details = finding.details
        if "tokens" in details:
            assert abs(details["error"]) > details["allowed"] == oracle.ROUNDING
            assert f"is {abs(details['error']):.2g} too" in finding.text
        elif "evidence" in details:
            assert re.search(r"occurs \S+ percentage points too (often|seldom)", finding.text)
        else:
            assert "gives no probability" in finding.text


def test_faults_change_only_the_rules_they_name():
    for fault in FAULTS.values():
        for name in set(LOSSLESS) - set(fault.rules):
            assert fault.rule(name) is RULES[name]


def test_a_divergence_has_position_tokens_and_margin(engine):
    """Compare a plain text with a copy in which one token was changed."""
    right = engine.plain_texts
    tokens = right[3].tokens.copy()
    tokens[5] = (tokens[5] + 1) % 50
    (found,) = engine._divergences({2: right[2], 3: Text(tokens, [])}, Schedule(1, 7, 2))
    assert (found.prompt, found.position) == (1, 5)
    assert (found.plain, found.speculative) == (right[3].tokens[5], tokens[5])
    assert found.margin > 0, "the best score with its noise is the token that was drawn"
    failed = engine._texts_finding("match with x", [2, 3], 1, [found])
    assert failed.passed is False and "token 5" in failed.text
    engine.logit_noise = found.margin
    near = engine._texts_finding("match with x", [2, 3], 1, [found])
    assert near.passed is True and "near ties" in near.text


def test_nothing_is_certified_without_time(llm):
    made = certify(llm, scope(["match"], seconds=0.0), ignore)
    assert made.untested and not made.failed and not made.passed
    assert "raise --seconds" in made.untested[0].text


def test_torch_kernels_may_diverge_at_near_ties_only(pair):
    llm = LLM(pair[0], kernels="torch", draft="suffix", kv_tokens=2048)
    sizes = {"texts": 2, "tokens": 16, "samples": 100}
    made = certify(llm, Scope(("match",), ("suffix",), **sizes), ignore)
    assert made.passed, made.failed
    assert made.precision == "float32, torch on cpu"


def test_draft_probs_count_deterministic_children_as_certain():
    draft = Draft.root(0)
    draft.add(2, 0, "toy", Proposal.SAMPLED)
    draft.add(1, 0, "toy")
    draft.probs = np.array([[0.25, 0.25, 0.5], [0, 0, 0], [0, 0, 0]])
    assert draft_probs(draft, 0, 3).tolist() == [0.25, 1.0, 0.5]
    assert draft_probs(draft, 1, 3) is None


def changed(engine, change):
    """Apply `change` to the logits of forward passes over several tokens."""
    logits = engine.logits
    engine.logits = lambda tokens, first=0, step=None: (
        logits(tokens, first, step) if step == 1 else change(logits(tokens, first, step))
    )
    return engine


def test_different_logits_are_reported_with_position_and_size(engine):
    def rounded(logits):
        logits[3, 7] += 2.0**-10
        return logits

    finding = changed(engine, rounded).check_forward()
    assert finding.passed is False and engine.logit_noise == pytest.approx(2.0**-10, rel=0.01)
    assert "logit of token 7 after position 3, 2 tokens per pass" in finding.text
    assert "the native kernels allow no difference" in finding.text
    engine.exact = False
    assert engine.check_forward().passed is True


def test_nan_logits_fail_on_any_kernels(engine):
    engine.exact = False
    assert changed(engine, lambda logits: logits.log()).check_forward().passed is False
    assert engine.logit_noise == np.inf


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rules": ("typical",)}, "changes the output by design"),
        ({"rules": ("match",), "fault": "lenint"}, "lenient"),
        ({"rules": ("match",), "tokens": 1}, "--tokens 1"),
        ({"rules": ("match",), "seconds": -1.0}, "--seconds -1"),
    ],
)
def test_invalid_scopes_are_reported_in_one_line(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        Scope(**{"drafts": ()} | options)
    assert "\n" not in str(error.value)


def test_deadlines_share_the_time_left_among_the_checks_of_a_part(monkeypatch):
    monkeypatch.setattr(certificate.time, "monotonic", lambda: 110.0)
    remaining = [SimpleNamespace(part=part) for part in ("texts", "texts", "distribution")]
    assert certificate._deadline(remaining, 100.0, 40.0) == 115.0
    assert certificate._deadline(remaining[2:], 100.0, 40.0) == 140.0
    assert certificate._deadline(remaining, 100.0, 10.0) < 110.0


@pytest.fixture
def check(monkeypatch, capsys):
    return lambda *words: run(monkeypatch, capsys, "check", *map(str, words))


SMALL = ("--texts", 1, "--tokens", 8, "--samples", 50, "--draft", "suffix")


def test_command_line(pair, check):
    code, out, err = check(pair[0], *SMALL, "--rule", "match", "--verbose")
    assert code == 0 and out.startswith("certified: ")
    assert "FAILED" not in out and len(err.splitlines()) == 5
    assert len(out.split("all checks:\n")[1].splitlines()) == 6
    code, out, err = check(pair[0], *SMALL, "--rule", "match", "--json")
    assert code == 0 and json.loads(out)["passed"] is True and not err


def test_command_line_fails_with_a_fault(pair, check):
    words = (pair[0], *SMALL, "--rule", "token", "--inject", "lenient")
    code, out, _ = check(*words)
    lines = [line for line in out.splitlines() if line]
    assert code == 1 and lines[0].startswith("NOT certified: ") and "as expected" in lines[1]
    assert lines[2].startswith("FAILED  rules: token: ") and "all checks" not in out
    code, out, _ = check(*words, "--json")
    assert code == 1 and json.loads(out)["failed"] >= 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--rule", "typical"), "by design"),
        (("--inject", "nothing"), "no such fault"),
        (("--draft", "model:nowhere/at-all"), "nowhere"),
        (("no/such/model",), "no/such/model"),
    ],
)
def test_command_line_bad_input(pair, check, arguments, message):
    model = [pair[0]] if arguments[0].startswith("--") else []
    code, out, err = check(*model, *arguments)
    assert code == 2 and message in err and out == ""
    assert len([line for line in err.splitlines() if line.startswith("forerun:")]) == 1
