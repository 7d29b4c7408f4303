"""The line of statistics: what it says, what it leaves out, and from where it knows how fast plain
decoding is."""

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


def test_how_an_answer_ended_how_fast_and_how_full_the_context_is() -> None:
    done = completion([(0, 0), (3, 3), (3, 1)], "length")
    assert summary(done, 100, None) == [
        "7 tokens (cut at max-tokens)", "2 tokens/s", "context 17 of 100", "2.33 per pass"
    ]  # fmt: skip
    assert summary(done, 17, None)[0] == "7 tokens (context full)"
    assert summary(done, 100, 0.25)[2] == "0.6 times plain"
    assert "7" not in "".join(summary(completion([(0, 0)]), 100, 1.0)), (
        "no speed of one step, and never the seed"
    )


def test_nothing_is_compared_with_plain_decoding_by_an_answer_that_was_plain() -> None:
    assert not any("plain" in part for part in summary(completion([(0, 0)] * 8), 100, 0.25))


@pytest.mark.parametrize("plain_steps", [terminal.ENOUGH - 1, terminal.ENOUGH])
def test_the_speed_of_plain_decoding_is_that_of_steps_without_a_draft(
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


def test_an_answer_whose_steps_were_not_all_seen_teaches_nothing() -> None:
    clock = Clock()
    clock.start()
    clock.stop(completion([(0, 0)] * 9))
    assert clock.plain is None


def on_screen(text: str, width: int, pieces: int = 3) -> list[str]:
    """The lines that a terminal of this width shows of a text that comes in pieces of so many
    characters."""
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
        ("01234567890123 x", ["01234567890123 x"]),  # longer than a line: as the terminal breaks it
        ("ab 你好你好你好", ["ab 你好你", "好你好"]),
        ("", [""]),
    ],
)
def test_words_stand_whole_on_a_line(text: str, lines: list[str], pieces: int) -> None:
    """Terminals break lines anywhere: words were split at the right edge."""
    assert on_screen(text, 10, pieces) == lines


def test_a_word_is_held_back_until_it_ends_and_keeps_its_styles() -> None:
    lines = terminal.WrappedLines(lambda: 10)
    assert lines.add("one tw", "cyan") == [("one", "cyan"), (" ", "")]
    assert lines.add("o", "") == []
    assert lines.add("!\n", "green") == [("tw", "cyan"), ("o", ""), ("!", "green"), ("\n", "")]
    assert lines.rest() == []
