"""The command line. Flags are the fields of `Config` and `SamplingParams`; heavy imports wait until a verb runs.

Exit codes: 0 done, 1 a failure while running, 2 bad input, 130 interrupted. Text goes to stdout, all else to stderr.
"""

from __future__ import annotations

import gc
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.cli import app as bench
from forerun.bench.cli_tune import tune
from forerun.chat.cli import chat
from forerun.check.cli import check
from forerun.completion import words_of_bash
from forerun.config import Config
from forerun.errors import ForerunError, Interrupted, RequestError
from forerun.flags import ENGINE, SAMPLING, with_flags
from forerun.models_cli import models
from forerun.sampling.grammar import Grammar
from forerun.sampling.params import SamplingParams
from forerun.server.cli import batch, serve
from forerun.train.cli import train

if TYPE_CHECKING:
    from forerun.llm import LLM, Completion, Prompt, Stream

app = typer.Typer(
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Lossless speculative decoding: the same tokens as plain decoding, sooner.",
)

app.add_typer(bench, name="bench")

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]  # typer does not export it by name
ADVISED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # what models' authors set
COLOURS = {"model": "cyan", "ngram": "green", "suffix": "yellow", "grammar": "magenta"}


@contextmanager
def _loading(quiet: bool) -> Iterator[None]:
    """A spinner on stderr while a model loads; nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status("loading"):
        yield


@contextmanager
def _without_collecting() -> Iterator[None]:
    """No looking for cycles among all that imports and loading leave, which is to stay: a fifth of a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _load(config: dict[str, Any], quiet: bool) -> LLM:
    with _loading(quiet), _without_collecting():
        Config.of(**config)  # bad options are cheaper to find before torch is imported
        from forerun.llm import LLM

        llm = LLM(**config)
    if llm.engine.rule.lossy:
        print(f"note: rule {llm.config.rule} is lossy: the output is not the target's", file=sys.stderr)
    return llm


def _params(sampling: dict[str, Any], **defaults: Any) -> SamplingParams:
    """SamplingParams from flags; `--logit-bias ID=AMOUNT` may be repeated."""
    options = defaults | sampling
    if "logit_bias" in options:
        options["logit_bias"] = dict(map(_bias, options["logit_bias"]))
    return SamplingParams.of(**options)


def _bias(entry: str) -> tuple[int, float]:
    token, _, amount = entry.partition("=")
    try:
        return int(token), float(amount)
    except ValueError:
        raise RequestError(f"--logit-bias {entry!r} is not ID=AMOUNT, such as 42=-5") from None


def _grammar(schema: str | None, regex: str | None) -> dict[str, Any]:
    """The sampling parameters of --json-schema and --regex."""
    if schema is not None and regex is not None:
        raise RequestError("--json-schema and --regex contradict each other: give one")
    if regex is not None:
        return {"grammar": Grammar.of("regex", regex)}
    if schema is None:
        return {}
    if not schema.lstrip().startswith("{"):
        try:
            schema = Path(schema).read_text(encoding="utf-8")
        except (OSError, ValueError):
            raise RequestError(f"--json-schema {schema!r} is neither a JSON object nor a text file with one") from None
    return {"grammar": Grammar.of("json_schema", schema)}


@app.command(
    epilog="[dim]forerun generate 'Why is the sky blue?' --temperature 0.8 --seed 1 --max-tokens 64\n\n"
    "git diff | forerun generate --system 'Describe this change in one line.'[/dim]"
)
@with_flags(ENGINE, SAMPLING)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer or continue; without it, or as -, it is read from stdin.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat template of a chat model.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="A system message for a chat model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a completion.")] = False,
    json_schema: Annotated[
        str | None, typer.Option(help="JSON that fits this schema, a file or the schema itself.", metavar="SCHEMA")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="A text that this regular expression matches.")] = None,
    *,
    config: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Answer a question, or continue a text where the model is none for chats. Accepted drafted tokens are coloured on
    a terminal."""
    params = _params(sampling | _grammar(json_schema, regex))
    if raw and system is not None:
        raise RequestError("--raw and --system contradict each other: a system message is part of a chat")
    text = _given(prompt)
    llm = _load(config, as_json)
    params = _params(llm.recommended | sampling | _grammar(json_schema, regex))
    asked = _asked(llm, text, raw, system)
    if params.n > 1 or as_json:
        for completion in llm.generate(asked, params):
            used = {"sampling": {name: getattr(params, name) for name in ADVISED}}
            print(json.dumps(_as_dict(completion) | used) if as_json else completion.text)
            _summarise(completion, as_json)
        return
    _summarise(_show(llm, asked, params), as_json)


def _given(prompt: str | None) -> str:
    """The prompt of the command line, or what comes in, without the newline that ends it."""
    if prompt not in (None, "-"):
        return str(prompt)
    if prompt is None and sys.stdin.isatty():
        raise RequestError("there is no prompt: write it behind generate, or pipe it in")
    return sys.stdin.read().removesuffix("\n")


def _asked(llm: LLM, text: str, raw: bool, system: str | None) -> Prompt:
    """A prompt for this model: a chat of one turn where it has a template for chats."""
    if llm.tokenizer is not None and llm.tokenizer.has_chat_template and not raw:
        said = [{"role": "system", "content": system}] if system else []
        return [*said, {"role": "user", "content": text}]
    if system is not None:
        raise RequestError("--system needs a chat model, and this one has no chat template: put it into the prompt")
    return text


@app.command(epilog="[dim]forerun doctor --json[/dim]")
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Say what forerun finds on this machine, and what of it costs speed."""
    with _loading(as_json):
        from forerun.doctor import as_dict, examine

        findings = examine()
    if as_json:
        print(json.dumps(as_dict(findings)))
        return
    for finding in findings:
        print(f"{finding.name:<15}{finding.text}")
        if finding.advice:
            print(f"{'':<15}-> {finding.advice}")


def _show(llm: LLM, prompt: Any, params: SamplingParams) -> Completion:
    """Print a completion as it comes."""
    stream = llm.stream(prompt, params)
    _print(stream)
    return stream.completion


def _print(stream: Stream) -> None:
    """Print events as they come, tokens that were drafted in the colour of their source."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for event in stream:
        for piece, source in zip(event.pieces, [*event.sources, ""], strict=False):
            if console.is_terminal:
                console.print(Text(piece, style=COLOURS.get(source, "cyan") if source else ""), end="")
            else:
                sys.stdout.write(piece)
        sys.stdout.flush()
    print()


def _summarise(completion: Completion, quiet: bool) -> None:
    """One line on stderr: how much, how fast, how far speculation got."""
    if quiet:
        return
    stats = completion.stats
    decoding = stats.seconds - stats.first_token_seconds
    rest = stats.completion_tokens - stats.completion_tokens / max(stats.steps, 1)
    speed = f"{rest / decoding:.0f} tokens/s" if decoding > 0 and stats.steps > 1 else "one pass"
    sources = ", ".join(
        f"{name} {s.accepted} of {s.drafted} drafted accepted" for name, s in stats.by_source.items() if name
    )
    print(
        f"{stats.completion_tokens} tokens, {speed}, {stats.accepted_length:.2f} tokens per target pass"
        f" ({sources or 'no drafts'}), seed {completion.seed}, {completion.finish_reason}",
        file=sys.stderr,
    )


def _as_dict(completion: Completion) -> dict[str, Any]:
    """A completion as plain values."""
    values = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "stats": completion.stats.as_dict(),
    }
    if completion.logprobs is not None:
        values["logprobs"] = [{"token_id": e.token_id, "logprob": e.logprob, "top": e.top} for e in completion.logprobs]
    return values


app.command(epilog="[dim]forerun chat --model path/of/a/chat/model[/dim]")(chat)
app.command(epilog="[dim]forerun check        forerun check Qwen/Qwen3-0.6B --draft suffix --json[/dim]")(check)
app.command(
    epilog="[dim]forerun train --data library --steps 200 --out drafter        forerun train --data prompts.jsonl"
    " --target Qwen/Qwen3-0.6B --on-policy 1 --out drafter[/dim]"
)(train)
app.command(epilog="[dim]forerun tune Qwen/Qwen3-0.6B --drafts suffix,model:my-draft --prompts tasks.jsonl[/dim]")(tune)
app.command(epilog="[dim]forerun serve Qwen/Qwen3-0.6B --draft suffix --port 8000[/dim]")(serve)
app.command(epilog="[dim]forerun models        forerun models /data/gguf --json[/dim]")(models)
app.command(epilog="[dim]forerun batch requests.jsonl answers.jsonl --model Qwen/Qwen3-0.6B[/dim]")(batch)


def _version(wanted: bool) -> None:
    if wanted:
        from forerun import __version__

        print(f"forerun {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit. Every error on purpose is one line on stderr."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text are then refused as a prompt
    try:
        with words_of_bash():
            code = app(standalone_mode=False)
        if code == 130:  # what typer makes of Ctrl-C
            code = _say("interrupted", 130)
    except Interrupted as error:
        code = _say(str(error), 130)
    except ForerunError as error:
        code = _say(str(error), 1 if type(error) is ForerunError else 2)
    except USAGE_ERROR as error:
        command = error.ctx.command_path if error.ctx else "forerun"  # type: ignore[attr-defined]
        code = _say(f"{error.format_message()} (see {command} --help)", 2)  # type: ignore[attr-defined]
    except (typer.Abort, KeyboardInterrupt):
        code = _say("interrupted", 130)
    except BrokenPipeError:  # the reader has gone, as in `forerun generate ... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        code = _say(f"the output cannot be written: {error}", 1)
    sys.exit(code)


def _say(message: str, code: int) -> int:
    print(f"forerun: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
