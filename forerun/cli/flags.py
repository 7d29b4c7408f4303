"""Command-line flags generated from dataclasses: one option per field.

The help of an option is taken from the docstring of the dataclass. Must not import torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Annotated, Any

import typer

from forerun.cli.completion import draft_names, model_names
from forerun.config import Config
from forerun.draft_spec import joined
from forerun.errors import ConfigError
from forerun.sampling.params import DEFAULT, SamplingParams

SHORT = {
    "model": "-m",
    "max_tokens": "-n",
    "tokens": "-n",
    "temperature": "-t",
    "context": "-c",
    "seed": "-s",
    "port": "-p",
}
# Names that llama.cpp, vLLM and Ollama have for an option. They are mentioned in its help text.
ALIASES = {
    "max_tokens": ("--n-predict",),
    "tokens": ("--max-tokens",),
    "temperature": ("--temp",),
    "repetition_penalty": ("--repeat-penalty",),
    "context": ("--ctx-size", "--max-model-len"),
    "max_rows": ("--parallel", "--max-num-seqs"),
    "tensor_parallel": ("--tensor-parallel-size",),
    "backend": ("--model-impl",),
    "served_name": ("--served-model-name", "--alias"),
}
COMPLETION = {"model": model_names, "draft": draft_names}  # shell completion
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True, slots=True)
class Group:
    """The flags of one dataclass, collected into the keyword argument `name` of a command.

    Attributes:
        name: the keyword argument of the command.
        cls: the dataclass.
        panel: the heading in --help; None puts the flags among the command's own.
        rare: fields that are seldom needed; their flags come behind those of all groups.
        rare_panel: the heading of these.
        types: types of fields whose default does not show them.
        leave_out: fields without a flag.
        model: True if the model can also be given as the command's first argument.
        defaults: defaults shown in --help that differ from those of the dataclass.
    """

    name: str
    cls: type
    panel: str | None
    types: dict[str, Any] = field(default_factory=dict)
    leave_out: tuple[str, ...] = ()
    model: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    rare: tuple[str, ...] = ()
    rare_panel: str | None = None

    def without(self, *names: str) -> Group:
        """Return the group without some flags."""
        return replace(self, leave_out=(*self.leave_out, *names))

    def parameters(self) -> list[inspect.Parameter]:
        """Return one command-line option per field, and a hidden one for its aliases; None means
        that the flag was not given."""
        texts, parameters = _help_of(self.cls), [MODEL] if self.model else []
        for f in fields(self.cls):
            if f.name not in self.leave_out:
                parameters += self._options(f, texts[f.name])
        return parameters

    def _options(self, f: Field[Any], text: str) -> list[inspect.Parameter]:
        """Return the option of a field and, if it has aliases, the hidden option that has them."""
        kind = self.types.get(f.name, type(f.default))
        names = [f"--{f.name.replace('_', '-')}"]
        if f.name in SHORT:
            names.append(SHORT[f.name])
        aliases = ALIASES.get(f.name, ())
        default = self.defaults.get(f.name, f.default)
        notes = []
        if kind is not bool and default not in (None, "", (), MISSING):
            notes.append(f"default: {default}")
        if aliases:
            notes.append(f"also {', '.join(aliases)}")
        text = text.replace("[", "\\[")
        if notes:
            text += f" [dim]({'; '.join(notes)})[/dim]"
        option = typer.Option(
            *names,
            help=text,
            rich_help_panel=self.rare_panel if f.name in self.rare else self.panel,
            show_default=False,
            autocompletion=COMPLETION.get(f.name),
        )
        found = [_keyword(f.name, kind, option)]
        if aliases:
            found.append(_keyword(alias_of(f.name), kind, typer.Option(*aliases, hidden=True)))
        return found


def _keyword(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """Return a keyword argument of a command that is None if its flag was not given."""
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def alias_of(name: str) -> str:
    """Return the name of the hidden parameter that has the aliases of a field's flag."""
    return f"{name}_alias"


def examples(*commands: str) -> str:
    """Return the end of a command's --help: commands to try, one a line."""
    lines = (command.replace("[", "\\[") for command in commands)
    return "[dim]" + "\n\n".join(("Examples:", *lines)) + "[/dim]"


def model_as_argument(text: str) -> Any:
    """Return a positional argument that names a model."""
    return typer.Argument(
        help=text, metavar="MODEL", show_default=False, autocompletion=model_names
    )


MODEL_HELP = (
    "The same as --model: a GGUF file, a directory, ollama:NAME, lmstudio:NAME or a Hub id."
)
MODEL = inspect.Parameter(
    "model_argument",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[str | None, model_as_argument(MODEL_HELP)],
)
CONFIG_TYPES = {
    "model": str,
    "draft": list[str],
    "quantization": str,
    "draft_shortlist": str,
    "depth": str,
    "context": int,
    "kv_tokens": int,
}
SAMPLING_TYPES = {
    "logit_bias": list[str],
    "stop": list[str],
    "stop_token_ids": list[int],
    "seed": int,
    "logprobs": int,
    "max_tokens": int,
    **{name: type(value) for name, value in DEFAULT.items()},
}
RARE_ENGINE = (
    "width",
    "draft_threshold",
    "dtype",
    "draft_quantization",
    "draft_shortlist",
    "backend",
    "kernels",
    "draft_device",
    "tensor_parallel",
    "draft_threads",
    "max_rows",
    "chunk",
    "objective",
    "slo_ms",
    "page",
    "kv_tokens",
)
RARE_SAMPLING = (
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
)
ENGINE = Group(
    "config",
    Config,
    "Engine",
    CONFIG_TYPES,
    model=True,
    rare=RARE_ENGINE,
    rare_panel="More engine options",
)
ENGINE_FLAGS = replace(ENGINE, model=False)  # for commands with other arguments
NO_FLAGS = ("grammar", "prompt_logprobs")
SAMPLING = Group(
    "sampling",
    SamplingParams,
    "Sampling",
    SAMPLING_TYPES,
    leave_out=NO_FLAGS,
    defaults={
        name: f"as the model's authors set it, else {value}" for name, value in DEFAULT.items()
    },
    rare=RARE_SAMPLING,
    rare_panel="More sampling options",
)


def with_model(argument: str | None, config: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's options with the model from the argument or from --model.

    Raises:
        ConfigError: the model was given both ways.
    """
    if argument is None:
        return config
    if "model" in config:
        raise ConfigError(
            f"the model is given twice, {argument} and --model {config['model']}: give it once"
        )
    return config | {"model": argument}


def _merge_aliases(values: dict[str, Any]) -> None:
    """Replace values given by an alias of a flag by values of the flag itself.

    Raises:
        ConfigError: both are given.
    """
    for name, aliases in ALIASES.items():
        alias = alias_of(name)
        if alias not in values:
            continue
        if name in values:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} and {' or '.join(aliases)} are the same: give one of them")
        values[name] = values.pop(alias)


def _panel(parameter: inspect.Parameter) -> str | None:
    """Return the heading of a flag in --help."""
    (option,) = parameter.annotation.__metadata__
    heading: str | None = option.rich_help_panel
    return heading


def in_flags(message: str, options: Mapping[str, str]) -> str:
    """Rewrite the option names of an error message as command-line flags.

    Args:
        message: text with the library's names, such as "max_tokens=0 is out of range" or "lower
            max_tokens".
        options: the flag of each option, such as {"max_tokens": "--max-tokens"}.
    """

    def as_option(match: re.Match[str]) -> str:
        name, value = match["name"], match["quoted"] or match["bare"]
        # Without a value, a name without underscore may be an ordinary word.
        if name not in options or (value is None and "_" not in name):
            return match[0]
        return options[name] if value is None else f"{options[name]} {value}"

    named = r"(?<![\w-])(?P<name>[a-z][a-z_]*)\b(?:=(?:'(?P<quoted>[^']*)'|(?P<bare>[^\s,:;]+)))?"
    return re.sub(named, as_option, message)


def _help_of(cls: type) -> dict[str, str]:
    """Return the help of each field, from the Args section of the docstring of its class."""
    helps: dict[str, str] = {}
    for part in reversed(cls.__mro__[:-1]):
        section = inspect.cleandoc(part.__doc__ or "").split("Args:\n")[1]
        entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, flags=re.M)
        helps |= {name: " ".join(text.split()) for name, text in entries}
    return helps


def with_flags(*groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the flags of each group to a command.

    The command receives one dict per group, with the options given on the command line.
    """
    flags = {group.name: group.parameters() for group in groups}

    def wrap(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb, eval_str=True)
        own = [
            p
            for p in signature.parameters.values()
            if p.name not in flags and p.kind is not p.VAR_KEYWORD
        ]

        def run(**given: Any) -> None:
            taken = {}
            for name, parameters in flags.items():
                values = {p.name: given.pop(p.name) for p in parameters}
                values = {key: value for key, value in values.items() if value not in (None, [])}
                _merge_aliases(values)
                if isinstance(values.get("draft"), list):
                    values["draft"] = joined(values["draft"])
                taken[name] = with_model(values.pop(MODEL.name, None), values)
            verb(**taken, **given)

        run.__name__, run.__doc__ = verb.__name__, verb.__doc__
        options = [p for parameters in flags.values() for p in parameters]
        rare = {group.rare_panel for group in groups} - {None}
        # Arguments come before options, and options that are seldom needed come last.
        options.sort(key=lambda p: (p is not MODEL, _panel(p) in rare))
        ordered = inspect.Signature(sorted([*options, *own], key=lambda p: p.kind))
        run.__signature__ = ordered  # type: ignore[attr-defined]
        return run

    return wrap
