"""What is shown: a bar on a terminal, a line for every twentieth of the run in a pipe, nothing beside JSON."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from forerun.train import watch


def test_lines_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with watch.watching(quiet=False) as shown:
        shown.tell("loading")
        for step in range(1, 101):
            shown.step(step, 100, 2.5, 64)
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 21
    assert err.splitlines()[0] == "loading" and err.splitlines()[20].startswith("step 100 of 100, loss 2.5000, ")


def test_nothing_beside_json(capsys: pytest.CaptureFixture[str]) -> None:
    with watch.watching(quiet=True) as shown:
        shown.tell("loading")
        shown.step(1, 2, 1.0, 3)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal() -> None:
    """It begins where the run was taken up; other lines stay above it."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with Progress(TextColumn("{task.completed} {task.description}"), console=console, auto_refresh=False) as progress:
        bar = watch.Bar(progress)
        bar.step(51, 100, 0.25, 10)
        bar.tell("after 51 steps")
        assert progress.tasks[0].completed == 51 and progress.tasks[0].total == 100
    assert "loss 0.2500" in screen.getvalue() and "after 51 steps\n" in screen.getvalue().replace("\x1b[0m", "")
