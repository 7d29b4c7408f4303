"""The line of statistics, the measured speed of plain decoding, and the wrapping of lines."""

import pytest

from forerun import Completion
from forerun.cli import terminal
from forerun.cli.terminal import Clock, summary
from forerun.engine.stats import RequestStats


def completion(rounds: list[tuple[int, int]], reason: str = "stop") -> Completion:
    tokens = sum(accepted + 1 for _, accepted in rounds)
    stats = RequestStats(
        prompt_tokens=10, completion_tokens=tokens, steps=len(rounds), rounds=rounds
    )
    stats.drafted, stats.first_token_seconds, stats.seconds = sum(d for d, _ in rounds), 1.0, 3.0
    return Completion("", [0] * tokens, reason, stats, [], None, 7, [0] * 10)


def test_summary_shows_finish_reason_speed_and_context() -> None:
    done = completion([(0, 0), (3, 3), (3, 1)], "length")
    assert summary(done, 100, None) == [
        "7 tokens (cut at max-tokens)", "2 tokens/s", "context 17 of 100", "2.33 per pass"
    ]  # fmt: skip
    assert summary(done, 17, None)[0] == "7 tokens (context full)"
    assert summary(done, 100, 0.25)[2] == "0.6 times plain"
    assert "7" not in "".join(summary(completion([(0, 0)]), 100, 1.0)), (
        "neither the speed of a single step nor the seed is shown"
    )


def test_plain_answers_are_not_compared_with_plain_decoding() -> None:
    assert not any("plain" in part for part in summary(completion([(0, 0)] * 8), 100, 0.25))


@pytest.mark.parametrize("plain_steps", [terminal.ENOUGH - 1, terminal.ENOUGH])
def test_plain_speed_is_measured_on_steps_without_a_draft(
    plain_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = [(0, 0), *[(0, 0)] * plain_steps, (4, 2)]
    times = iter([0.0, *(5.0 + 0.5 * i for i in range(plain_steps)), 90.0])
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: next(times))
    clock = Clock()
    clock.start()
    for _ in rounds:
        clock.tick()
    clock.stop(completion(rounds))
    assert clock.plain == (0.5 if plain_steps == terminal.ENOUGH else None)


def test_answers_with_unobserved_steps_are_ignored() -> None:
    clock = Clock()
    clock.start()
    clock.stop(completion([(0, 0)] * 9))
    assert clock.plain is None


def on_screen(text: str, width: int, pieces: int = 3) -> list[str]:
    """Return the lines that a terminal of this width shows of a text in pieces of this size."""
    lines = terminal.WrappedLines(lambda: width)
    parts = [
        part
        for at in range(0, len(text), pieces)
        for part in lines.add(text[at : at + pieces], "x")
    ]
    return [
        line.rstrip() for line in "".join(shown for shown, _ in [*parts, *lines.rest()]).split("\n")
    ]


@pytest.mark.parametrize("pieces", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("the quick brown fox jumps", ["the quick", "brown fox", "jumps"]),
        ("exactly ten", ["exactly", "ten"]),
        ("0123456789 ten", ["0123456789", "ten"]),
        ("a\nb c\n\nd", ["a", "b c", "", "d"]),
        ("01234567890123 x", ["01234567890123 x"]),  # the terminal breaks a longer word
        ("ab 你好你好你好", ["ab 你好你", "好你好"]),
        ("", [""]),
    ],
)
def test_words_are_not_split_at_line_ends(text: str, lines: list[str], pieces: int) -> None:
    """Terminals break lines at any character."""
    assert on_screen(text, 10, pieces) == lines


def test_a_word_is_held_back_until_it_ends_and_keeps_its_styles() -> None:
    lines = terminal.WrappedLines(lambda: 10)
    assert lines.add("one tw", "cyan") == [("one", "cyan"), (" ", "")]
    assert lines.add("o", "") == []
    assert lines.add("!\n", "green") == [("tw", "cyan"), ("o", ""), ("!", "green"), ("\n", "")]
    assert lines.rest() == []
