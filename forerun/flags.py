"""Command-line flags made from dataclasses: one option a field, its help taken from the docstring. No torch here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import typer

from forerun.completion import draft_names, model_names
from forerun.config import Config
from forerun.sampling.params import SamplingParams

MODEL = Annotated[
    str | None,
    typer.Argument(
        help="A GGUF file, a directory, ollama:NAME, lmstudio:NAME or a Hub id (:QUANT); else the default model.",
        autocompletion=model_names,
    ),
]  # where a verb takes it first
SHORT = {"model": "-m", "max_tokens": "-n", "temperature": "-t"}
COMPLETION = {"model": model_names, "draft": draft_names}  # what the shell offers


@dataclass(frozen=True, slots=True)
class Group:
    """The flags of one dataclass, collected into the keyword argument `name` of a verb.

    `types` are the kinds of fields whose default does not show them; `leave_out` the fields without a flag.
    """

    name: str
    cls: type
    panel: str
    types: dict[str, Any] = field(default_factory=dict)
    leave_out: tuple[str, ...] = ()

    def without(self, *names: str) -> Group:
        """The same flags but for these."""
        return replace(self, leave_out=(*self.leave_out, *names))

    def parameters(self) -> list[inspect.Parameter]:
        """One command-line option a field; None means that the flag was not given."""
        texts, parameters = _help_of(self.cls), []
        for f in fields(self.cls):
            if f.name in self.leave_out:
                continue
            kind = self.types.get(f.name, type(f.default))
            names = [f"--{f.name.replace('_', '-')}", *([SHORT[f.name]] if f.name in SHORT else [])]
            default = "" if f.name in self.types else f" [dim](default: {f.default})[/dim]"
            text = texts[f.name].replace("[", "\\[") + (default if kind is not bool else "")
            offers = COMPLETION.get(f.name)
            option = typer.Option(
                *names, help=text, rich_help_panel=self.panel, show_default=False, autocompletion=offers
            )
            annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
            parameters.append(
                inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
        return parameters


CONFIG_TYPES = {"model": str, "quantization": str, "depth": str, "context": int, "kv_tokens": int}
SAMPLING_TYPES = {"logit_bias": list[str], "stop": list[str], "stop_token_ids": list[int], "seed": int, "logprobs": int}
ENGINE = Group("config", Config, "Engine", CONFIG_TYPES)
SAMPLING = Group("sampling", SamplingParams, "Sampling", SAMPLING_TYPES, leave_out=("grammar",))


def _help_of(cls: type) -> dict[str, str]:
    """The help of each field: its entry under Args in the docstring of the class that has it."""
    helps: dict[str, str] = {}
    for part in reversed(cls.__mro__[:-1]):
        section = inspect.cleandoc(part.__doc__ or "").split("Args:\n")[1]
        entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, flags=re.M)
        helps |= {name: " ".join(text.split()) for name, text in entries}
    return helps


def with_flags(*groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the flags of each group; it receives one dict a group, with what was given on the command line."""
    flags = {group.name: group.parameters() for group in groups}

    def wrap(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name not in flags and p.kind is not p.VAR_KEYWORD]

        def run(**given: Any) -> None:
            def take(parameters: list[inspect.Parameter]) -> dict[str, Any]:
                values = {p.name: given.pop(p.name) for p in parameters}
                return {name: value for name, value in values.items() if value not in (None, [])}

            taken = {name: take(parameters) for name, parameters in flags.items()}
            verb(**taken, **given)

        run.__name__, run.__doc__ = verb.__name__, verb.__doc__
        made = [p for parameters in flags.values() for p in parameters]
        run.__signature__ = inspect.Signature([*own, *made])  # type: ignore[attr-defined]
        return run

    return wrap
