"""`forerun check`: it passes what is right, and every fault it knows makes it fail and say
where."""

import json
import re
import sys

import numpy as np
import pytest

from forerun import LLM, rng
from forerun.check import certificate, faults, law, passes, rules, texts
from forerun.check.certificate import LOSSLESS, Scope, certify
from forerun.check.faults import FAULTS, check_rules
from forerun.check.sources import check_sources
from forerun.check.subject import Ask, Schedule, Subject
from forerun.cli import main as cli
from forerun.errors import ConfigError
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Proposal
from forerun.verify import RULES, Noise
from tests import tiny


@pytest.fixture(scope="module")
def pair():
    """A tiny target and a draft model that is often of its opinion, as directories."""
    return tiny.family("llama"), tiny.drafter("llama", noise=0.3)


@pytest.fixture(scope="module")
def llm(pair):
    return LLM(
        pair[0], draft=f"model:{pair[1]}", draft_quantization="none", kv_tokens=2048, width=2
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Fewer toy models: what each fault needs is kept. Certificates try two faults, but for the one
    that tries all."""
    monkeypatch.setattr(rules, "TOYS", [("exact", 2, 1), ("exact", 2, 2), ("float", 3, 2)])
    monkeypatch.setattr(
        faults, "FAULTS", {name: FAULTS[name] for name in ("lenient", "lenient-match")}
    )


def small(rules_=LOSSLESS, **options):
    return Scope(
        tuple(rules_), ("suffix", "model"), **{"texts": 2, "tokens": 16, "samples": 200} | options
    )


def test_what_is_right_is_certified(llm, monkeypatch):
    monkeypatch.setattr(faults, "FAULTS", FAULTS)
    seen = []
    made = certify(llm, small(), seen.append)
    assert made.passed, made.failed
    assert seen == made.findings
    parts = [finding.part for finding in made.findings]
    assert {part: parts.count(part) for part in dict.fromkeys(parts)} == {
        "rules": 8, "passes": 1, "texts": 9, "law": 7, "faults": sum(len(f.rules) for f in FAULTS.values()),
    }  # fmt: skip
    json.dumps(made.as_dict(), allow_nan=False)


def test_a_certificate_with_a_fault_fails_and_says_where(llm):
    made = certify(llm, small(["token"], fault="skipped-rejection"), lambda finding: None)
    assert not made.passed
    assert {"rules", "law"} <= {finding.part for finding in made.failed}
    assert "the tokens" in made.failed[0].text


@pytest.mark.parametrize("name", ["no-residual", "skipped-rejection"])
def test_the_law_of_the_running_engine_shows_faults(name, llm):
    """Not only on toys: the sequential test sees the fault in what the engine says."""
    subject, prompts = Subject(llm), certificate._prompts(llm, 2)
    assert law.bet(subject, prompts, FAULTS[name].rule("token"), "model", 6000, np.inf).refuted
    assert not law.bet(subject, prompts, RULES["token"], "model", 400, np.inf).refuted


@pytest.mark.parametrize("name", ["noise-by-round", "late-match", "lenient-match"])
def test_texts_of_the_running_engine_show_faults(name, llm):
    made = certify(llm, small(["match"], fault=name), lambda finding: None)
    assert [f for f in made.failed if f.part == "texts"]


def asks(llm, tokens=12):
    prompts = certificate._prompts(llm, 2)
    return [
        Ask(p, SamplingParams(temperature=0.8, seed=i, max_tokens=tokens, ignore_eos=True))
        for i, p in enumerate(prompts)
    ]


def test_divergence_tells_position_tokens_and_margin(llm, monkeypatch):
    """Texts that part are compared with a plain text that was changed on purpose."""
    subject = Subject(llm)
    right = subject.say(asks(llm), RULES["match"], "off", texts.PLAIN)
    wrong = [tokens.tokens.copy() for tokens in right]
    wrong[1][5] = (wrong[1][5] + 1) % 50
    said = {0: right[0], 1: type(right[1])(wrong[1], [])}
    (apart,) = texts._divergences(subject, asks(llm), right, said, Schedule(1, 7, 2))
    assert (apart.prompt, apart.position, apart.plain, apart.speculative) == (
        1,
        5,
        right[1].tokens[5],
        wrong[1][5],
    )
    assert apart.margin > 0
    far = texts._finding("match with x", asks(llm), 1, [apart], noise=0.0)
    assert far.passed is False and "token 5" in far.text
    near = texts._finding("match with x", asks(llm), 1, [apart], noise=apart.margin)
    assert near.passed is True and "near ties" in near.text


def test_margin_is_that_of_the_draw(llm):
    """The best score with its noise is the token that was drawn; the margin is its lead."""
    subject, (ask, _) = Subject(llm), asks(llm)
    said = subject.say([ask], RULES["match"], "off", texts.PLAIN)[0].tokens
    assert texts._margin(subject, [*ask.prompt, *said[:3]], 0.8, ask.params.seed) > 0


def test_no_time_proves_nothing(llm):
    made = certify(llm, small(["match"], seconds=0.0), lambda finding: None)
    assert made.open and not made.failed and not made.passed
    assert "raise --seconds" in made.open[0].text


def test_torch_kernels_may_part_at_near_ties_only(pair):
    llm = LLM(pair[0], kernels="torch", draft="suffix", kv_tokens=2048)
    made = certify(
        llm, Scope(("match",), ("suffix",), texts=2, tokens=16, samples=100), lambda finding: None
    )
    assert made.passed, made.failed
    assert made.form == "float32, torch on cpu"


def test_proposal_counts_given_children_as_certain():
    draft = Draft.root(0)
    draft.add(2, 0, "toy", Proposal.SAMPLED)
    draft.add(1, 0, "toy")
    draft.probs = np.array([[0.25, 0.25, 0.5], [0, 0, 0], [0, 0, 0]])
    assert law.proposal(draft, 0, 3).tolist() == [0.25, 1.0, 0.5]
    assert law.proposal(draft, 1, 3) is None


@pytest.mark.parametrize(
    "options, says",
    [
        ({"rules": ("typical",)}, "changes the output by design"),
        ({"rules": ("match",), "fault": "lenint"}, "lenient"),
        ({"rules": ("match",), "tokens": 1}, "--tokens 1"),
        ({"rules": ("match",), "seconds": -1.0}, "--seconds -1"),
    ],
)
def test_bad_scopes_are_one_line(options, says):
    with pytest.raises(ConfigError, match=says) as error:
        Scope(**{"drafts": ()} | options)
    assert "\n" not in str(error.value)


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["forerun", "check", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


SMALL = ("--texts", 1, "--tokens", 8, "--samples", 50, "--rule", "match", "--draft", "suffix")


def test_command_line(pair, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, pair[0], *SMALL)
    assert code == 0 and "certified:" in out and "FAILED" not in out
    code, out, err = run(monkeypatch, capsys, pair[0], *SMALL, "--json")
    assert code == 0 and json.loads(out)["passed"] is True and not err


def test_command_line_fails_with_a_fault(pair, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, pair[0], *SMALL, "--inject", "lenient-match")
    assert code == 1 and "FAILED" in out and "NOT certified" in out
    code, out, _ = run(monkeypatch, capsys, pair[0], *SMALL, "--inject", "lenient-match", "--json")
    assert code == 1 and json.loads(out)["failed"] >= 1


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("--rule", "typical"), "by design"),
        (("--inject", "nothing"), "no such fault"),
        (("--draft", "model:nowhere/at-all"), "nowhere"),
        (("no/such/model",), "no/such/model"),
    ],
)
def test_command_line_bad_input(pair, arguments, says, monkeypatch, capsys):
    model = [pair[0]] if arguments[0].startswith("--") else []
    code, out, err = run(monkeypatch, capsys, *model, *arguments)
    assert code == 2 and says in err and out == ""
    assert len([line for line in err.splitlines() if line.startswith("forerun:")]) == 1


def test_faults_change_what_they_name_only():
    for fault in FAULTS.values():
        for name in LOSSLESS:
            if name not in fault.rules:
                assert fault.rule(name) is RULES[name]


@pytest.mark.parametrize(
    "name", [name for name, fault in FAULTS.items() if "match" not in fault.rules]
)
def test_every_fault_is_found_and_refutations_show_the_difference(name):
    """In each rule it can be made in, and the first finding that fails says where. No probability
    is said to be wrong beside the very same digits, and rounding alone refutes nothing."""
    for rule in FAULTS[name].rules:
        found = [f for f in check_rules([rule], FAULTS[name]) if f.passed is False]
        assert found[0].subject.startswith(rule)
        assert any(
            word in found[0].text for word in ("come with probability", "comes in", "forbids")
        )
        for failed in found:
            if "said" in failed.details:
                said, target = re.search(
                    r"probability (\S+), but .* with (\S+):", failed.text
                ).groups()
                assert (
                    said != target
                    and failed.details["difference"] > failed.details["allowed"] == rules.ROUNDING
                )
            elif "evidence" in failed.details:
                assert re.search(
                    r"comes in \S+% of cases .* is \S+%, \S+ points too (often|seldom)", failed.text
                )
                assert "10,000 to 1 refutes" in failed.text
            else:
                assert "refused a draft" in failed.text


class Rounded(Subject):
    """A target that rounds where it reads several tokens at once."""

    def logits(self, tokens, first=0, step=None):
        logits = super().logits(tokens, first, step)
        if step != 1:
            logits[3, 7] += 2.0**-10
        return logits


def test_passes_that_differ_say_where_and_by_how_much(llm):
    finding, noise = passes.check_passes(Rounded(llm), certificate._prompts(llm, 1)[0], exact=True)
    assert finding.passed is False and noise == pytest.approx(2.0**-10, rel=0.01)
    together, alone = re.search(
        r"(\S+) instead of (\S+) for token 7 behind row 3, 2 tokens a pass", finding.text
    ).groups()
    assert float(together) - float(alone) == pytest.approx(2.0**-10, rel=0.1)
    assert "the native kernels allow no difference" in finding.text
    tolerated, _ = passes.check_passes(Rounded(llm), certificate._prompts(llm, 1)[0], exact=False)
    assert tolerated.passed is True and "near" not in finding.text


class Undefined(Rounded):
    """A target whose passes over several tokens give no numbers."""

    def logits(self, tokens, first=0, step=None):
        return (
            super().logits(tokens, first, step).log()
            if step != 1
            else super().logits(tokens, first, step)
        )


def test_passes_without_numbers_fail_on_any_kernels(llm):
    finding, noise = passes.check_passes(
        Undefined(llm), certificate._prompts(llm, 1)[0], exact=False
    )
    assert finding.passed is False and noise == np.inf


def test_verbose_lists_every_claim_behind_the_verdict(pair, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, pair[0], *SMALL)
    assert code == 0 and out.startswith("certified: ") and "every claim" not in out
    assert len(err.splitlines()) == 5
    code, more, _ = run(monkeypatch, capsys, pair[0], *SMALL, "--verbose")
    assert code == 0 and len(more.split("every claim:\n")[1].splitlines()) == 6


def test_failures_come_right_behind_the_verdict(pair, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, pair[0], *SMALL, "--inject", "lenient-match")
    lines = [line for line in out.splitlines() if line]
    assert code == 1 and lines[0].startswith("NOT certified: ") and "as it must be" in lines[1]
    assert lines[2].startswith("FAILED  rules: match: ")


def test_drafters_of_one_tree_draw_independently(monkeypatch):
    """The engine itself, with two drafters that sample: the old engine gave both the same noise."""
    assert check_sources(RULES["tree"]).passed
    monkeypatch.setattr(
        Noise, "draft", lambda self, node: rng.stream(self.seed, rng.Lane.DRAFT, self.root, node)
    )
    finding = check_sources(RULES["tree"])
    assert finding.passed is False and "behind token 1" in finding.text
