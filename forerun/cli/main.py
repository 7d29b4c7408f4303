"""The command line: all commands, error reporting and exit codes.

Exit codes: 0 success, 1 failure while running, 2 invalid input, 130 interrupted. Generated text
goes to stdout, everything else to stderr. Heavy modules are imported only when a command runs.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import typer

from forerun.bench.cli import app as bench
from forerun.check.cli import check
from forerun.cli.chat import chat
from forerun.cli.completion import words_of_bash
from forerun.cli.drafters import app as drafters
from forerun.cli.flags import Json, examples, in_flags
from forerun.cli.generate import generate
from forerun.cli.index import index
from forerun.cli.models import models
from forerun.cli.terminal import waiting
from forerun.cli.tune import tune
from forerun.cluster.cli import deploy
from forerun.errors import ForerunError, Interrupted
from forerun.measure.tables import print_json
from forerun.server.cli import batch, serve
from forerun.train.cli import train

app = typer.Typer(
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Lossless speculative decoding: the same tokens as plain decoding, sooner.",
    epilog=examples(
        "forerun generate 'What is the capital of France?'",
        "forerun chat",
        "forerun serve",
        "forerun COMMAND --help",
    ),
)

app.add_typer(bench, name="bench")
app.add_typer(drafters, name="drafters")

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]  # typer does not export it by name


def doctor(as_json: Json = False) -> None:
    """Report what forerun finds on this machine and what makes it slow."""
    with waiting(as_json):
        from forerun.cli.doctor import as_dict, examine

        findings = examine()
    if as_json:
        print_json(as_dict(findings))
        return
    for name, finding in findings.items():
        print(f"{name:<15}{finding.text}")
        if finding.advice:
            print(f"{'':<15}-> {finding.advice}")


COMMANDS: dict[Callable[..., None], tuple[str, ...]] = {  # in the order of --help, with examples
    generate: (
        "forerun generate 'Why is the sky blue?' --temperature 0.8 --seed 1 --max-tokens 64",
        "forerun generate Qwen/Qwen3-0.6B 'Why is the sky blue?'",
        "forerun generate -m model.gguf -c 4096 -n 200 --temp 0.8 -p 'Why is the sky blue?'",
        "git diff | forerun generate --system 'Describe this change in one line.'",
    ),
    doctor: ("forerun doctor", "forerun doctor --json"),
    chat: ("forerun chat", "forerun chat ollama:llama3.2:1b --system 'Answer briefly.'"),
    check: ("forerun check", "forerun check Qwen/Qwen3-0.6B --draft suffix --json"),
    train: (
        "forerun train --max-minutes 10 --out drafter",
        "forerun train --data prompts.jsonl --target Qwen/Qwen3-0.6B --on-policy 1 --out drafter",
    ),
    tune: ("forerun tune Qwen/Qwen3-0.6B --drafts suffix,model:my-draft --prompts tasks.jsonl",),
    serve: (
        "forerun serve",
        "forerun serve Qwen/Qwen3-0.6B --draft suffix --port 8000 --context 8192",
        "forerun serve --config server.toml",
    ),
    deploy: ("forerun deploy examples/cluster.toml", "forerun deploy cluster.toml --check"),
    models: ("forerun models", "forerun models /data/gguf --json"),
    index: (
        "forerun index src/ docs/ --out my-index",
        "forerun index answers.jsonl --out my-index",
    ),
    batch: ("forerun batch requests.jsonl answers.jsonl --model Qwen/Qwen3-0.6B",),
}
for command, lines in COMMANDS.items():
    app.command(epilog=examples(*lines))(command)


@functools.cache
def command_line() -> Any:
    """Return the command with all subcommands and flags.

    It is cached, because building it is slow and error messages need it again.
    """
    return typer.main.get_command(app)


def _version(wanted: bool) -> None:
    if wanted:
        from forerun import __version__

        print(f"forerun {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit. Each expected error is printed as one line on stderr."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that are not text are rejected later, when they are used as a prompt.
        sys.stdin.reconfigure(errors="surrogateescape")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # The terminal's encoding may lack a character that a model generates.
            stream.reconfigure(errors="backslashreplace")
    try:
        with words_of_bash():
            code = command_line()(standalone_mode=False)
        if code == 130:  # typer's exit code for Ctrl-C
            code = _report("interrupted", 130)
    except Interrupted as error:
        code = _report(str(error), 130)
    except ForerunError as error:
        code = _report(
            in_flags(str(error), _options(sys.argv[1:])), 1 if type(error) is ForerunError else 2
        )
    except USAGE_ERROR as error:
        command = error.ctx.command_path if error.ctx else "forerun"  # type: ignore[attr-defined]
        reason = error.format_message()  # type: ignore[attr-defined]
        code = _report(f"{reason} (see {command} --help)", 2)
    except (typer.Abort, KeyboardInterrupt):
        code = _report("interrupted", 130)
    except BrokenPipeError:  # its reader is gone, as in `forerun generate ... | head -1`
        code = 1
    except OSError as error:
        code = _report(f"the output cannot be written: {error}", 1)
    except ImportError as error:
        package = _package_of(error)
        if package == "forerun":
            raise
        code = _report(f"the package {package} cannot be imported: {error}: reinstall it", 1)
    _close()
    sys.exit(code)


def _close() -> None:
    """Flush stdout and stderr; output to a closed pipe is discarded."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (OSError, ValueError):
            pass  # the stream is closed, or a full disk was reported before


def _package_of(error: ImportError) -> str:
    """Return the package that could not be imported: the one named, or the one that raised."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    raised_in = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    return str(error.name or raised_in).partition(".")[0]


def _options(words: list[str]) -> dict[str, str]:
    """Return the flag of each option of the command in `words`: {"max_tokens": "--max-tokens"}."""
    command = command_line()
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    return {
        str(p.name): next(name for name in p.opts if name.startswith("--"))
        for p in command.params
        if p.param_type_name == "option"
    }


def _report(message: str, code: int) -> int:
    with suppress(BrokenPipeError):
        print(f"forerun: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
