"""The command `forerun generate`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.flags import (
    ENGINE_FLAGS,
    SAMPLING,
    model_as_argument,
    with_flags,
    with_model,
)
from forerun.cli.models import print_notes
from forerun.cli.terminal import Clock, as_dict, load, print_summary, sampling_params, show, summary
from forerun.errors import LoadError, RequestError
from forerun.models.hub import find_model
from forerun.models.local import is_model_name
from forerun.sampling.grammar import Grammar
from forerun.sampling.params import DEFAULT, SamplingParams
from forerun.utils import BYTE_ORDER_MARK, UnreadableError, json_line, text_of

if TYPE_CHECKING:
    from forerun.llm import LLM, Prompt


@with_flags(ENGINE_FLAGS, SAMPLING)
def generate(
    first: Annotated[str | None, model_as_argument("A model, if a prompt follows.")] = None,
    second: Annotated[
        str | None,
        typer.Argument(
            help="Text to answer or continue; read from stdin if missing or -.",
            metavar="PROMPT",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="The prompt, in place of the argument PROMPT."),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the text as it is, without the chat template."),
    ] = False,
    system: Annotated[
        str | None,
        typer.Option("--system", "--system-prompt", help="A system message for a chat model."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per completion.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats/--no-stats", help="Print a line of statistics after the text.")
    ] = True,
    json_schema: Annotated[
        str | None,
        typer.Option(
            help="Generate JSON that fits this schema, given as a file or as JSON.",
            metavar="SCHEMA",
        ),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Generate text that matches this regular expression.")
    ] = None,
    *,
    config: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Answer a question, or continue a text if the model has no chat template.

    On a terminal, accepted drafted tokens are coloured.
    """
    asked = sampling | _grammar(json_schema, regex)
    sampling_params(asked)  # reports errors before a model is loaded
    if raw and system is not None:
        raise RequestError(
            "--raw and --system contradict each other: a system message is part of a chat"
        )
    model, text = _model_and_prompt(first, second, prompt)
    if model is not None:
        config = with_model(_named(model), config)
    text = _text(text)
    llm = load(config, as_json)
    params = sampling_params(asked).resolved(llm.recommended)
    tokens = llm.tokens(_prompt(llm, text, raw, system))
    params = _that_fits(llm, tokens, params)
    clock = Clock()
    if params.n == 1 and not as_json:
        completion = show(llm.stream(tokens, params), clock)
        if stats:
            print_summary(summary(completion, llm.room, clock.plain))
        return
    for completion in llm.generate(tokens, params):
        used = {"sampling": {name: getattr(params, name) for name in DEFAULT}}
        print(
            json_line(as_dict(completion) | used, ascii_only=True) if as_json else completion.text
        )
        if stats and not as_json:
            print_summary(summary(completion, llm.room, None))


def _model_and_prompt(
    first: str | None, second: str | None, prompt: str | None
) -> tuple[str | None, str | None]:
    """Return the model and the prompt of a command line: its arguments, and the option --prompt.

    Either is None if it is not given. A single argument is the model beside --prompt, else the
    prompt.

    Raises:
        RequestError: the prompt is missing, or given twice.
    """
    if prompt is not None:
        if second is not None:
            raise RequestError(
                "the prompt is given twice, as an argument and as --prompt: give it once"
            )
        return first, prompt
    if second is None and first is not None and is_model_name(first):
        raise RequestError(
            f"{first!r} is a model, and there is no prompt: write the prompt behind it,"
            f" or pipe it into -m {first}"
        )
    return (None, first) if second is None else (first, second)


def _named(model: str) -> str:
    """Check that an argument is a model, and return it.

    Raises:
        LoadError: it is none; the message suggests quotes around the prompt.
    """
    try:
        find_model(model)
    except LoadError as error:
        raise LoadError(
            f"{error}; if {model!r} begins the prompt, put the prompt in quotes"
        ) from None
    return model


def _text(given: str | None) -> str:
    """Return the prompt of the command line or stdin, without the final newline."""
    if given not in (None, "-"):
        return str(given)
    if given is None and sys.stdin.isatty():
        raise RequestError("there is no prompt: write it behind generate, or pipe it in")
    return sys.stdin.read().removeprefix(BYTE_ORDER_MARK).removesuffix("\n")


def _prompt(llm: LLM, text: str, raw: bool, system: str | None) -> Prompt:
    """Return the prompt: a chat of one turn if the model has a chat template, else the text."""
    if llm.tokenizer is not None and llm.tokenizer.has_chat_template and not raw:
        messages = [{"role": "system", "content": system}] if system else []
        return [*messages, {"role": "user", "content": text}]
    if system is not None:
        raise RequestError(
            "--system needs a chat model, and this one has no chat template: put it into the prompt"
        )
    return text


def _that_fits(llm: LLM, prompt: list[int], params: SamplingParams) -> SamplingParams:
    """Return the parameters with max_tokens, if it is given, limited to the free context.

    A note is printed if it is lowered.
    """
    most = llm.room - len(prompt)
    if params.max_tokens is None or not 0 < most < params.max_tokens:
        return params
    room = f"{len(prompt)} of the {llm.room} tokens there is room for (--context, --kv-tokens)"
    print_notes([f"--max-tokens {params.max_tokens} is cut to {most}: the prompt takes {room}"])
    return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))


def _grammar(schema: str | None, regex: str | None) -> dict[str, Any]:
    """Return the sampling parameters for --json-schema and --regex."""
    if schema is not None and regex is not None:
        raise RequestError("--json-schema and --regex contradict each other: give one")
    if regex is not None:
        return {"grammar": Grammar.of("regex", regex)}
    if schema is None:
        return {}
    if not schema.lstrip().startswith("{"):
        try:
            schema = text_of(Path(schema))
        except UnreadableError as error:
            why = f"is neither a JSON object nor a text file with one: {error}"
            raise RequestError(f"--json-schema {schema!r} {why}") from None
    return {"grammar": Grammar.of("json_schema", schema)}
