"""Chat templates, rendered as transformers does, and the sampling parameters a model recommends.

Templates are untrusted. They run in Jinja's sandbox, see plain JSON values only, and on
servers run in a worker process with limits on time and memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as loop_controls
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forerun.errors import LoadError, RequestError, one_line
from forerun.models.files import read_object, read_text
from forerun.models.gguf.container import open_gguf
from forerun.sampling.params import DEFAULT, SamplingParams
from forerun.worker_process import WorkerProcess

SANDBOX = WorkerProcess(
    "forerun.models.chat_template:render_in_worker", seconds=2.0, memory=256 << 20
)
# names of the same field in different templates and clients
REASONING = ("reasoning_content", "thinking", "reasoning")
MAX_TEMPLATE_BYTES = 4 << 20
# variables that requests may not set
RESERVED = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)


class ChatTemplate:
    """The chat templates of one model.

    Attributes:
        templates: Jinja texts by name: "default", and optionally "tool_use" for conversations with
            tools.
        tokens: texts of special tokens by their names in templates (`bos_token`, ...).
    """

    def __init__(self, templates: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        self.templates, self.tokens = templates, tokens

    def with_tokens(self, tokens: Mapping[str, Any]) -> ChatTemplate:
        """Return the same templates with the special tokens that transformers found."""
        return ChatTemplate(self.templates, _plain(tokens))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        """Render a conversation up to where the assistant answers.

        `options` are further variables of the template. Raises whatever the template raises, and
        ValueError if there is nothing to render."""
        if not messages:
            raise ValueError("there is no message")
        taken = [name for name in RESERVED if name in options]
        if taken:
            raise ValueError(f"{taken[0]} cannot be set")
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            names = ", ".join(sorted(self.templates))
            raise ValueError(f"none of the templates {names} is the default")
        variables = {"documents": None, **self.tokens, **_plain(options)}
        return _compiled(self.templates[name]).render(
            **variables,
            messages=[_message(message) for message in messages],
            tools=_plain(list(tools)) or None,
            add_generation_prompt=True,
        )

    def fault(self) -> str:
        """Return why the default template cannot be parsed, or ""; it is not executed."""
        try:
            _environment().parse(self.templates.get("default", ""))
        except Exception as error:  # it may be nested too deeply, or not be text
            return one_line(str(error)) or type(error).__name__
        return ""

    def render_confined(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        """Run `render` in a worker process. Also raises the errors of `WorkerProcess.call`."""
        arguments = [_plain(list(messages)), _plain(list(tools)), _plain(options)]
        text: str = SANDBOX.call(dict(self.templates), dict(self.tokens), *arguments)
        return text


def render_in_worker(
    templates: dict[str, str], tokens: dict[str, str], messages: Any, tools: Any, options: Any
) -> str:
    """Entry point of the worker process."""
    return ChatTemplate(templates, tokens).render(messages, tools, options)


def directory_template(directory: Path) -> ChatTemplate | None:
    """Read the templates of a Hugging Face directory; None if it has none.

    Raises LoadError, ValueError, LookupError, TypeError, OSError."""
    settings = _read(directory / "tokenizer_config.json")
    found = settings.get("chat_template") or {}
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    files = {"default": directory / "chat_template.jinja"}
    files |= {
        file.stem: file
        for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    stored = {
        name: read_text(file, MAX_TEMPLATE_BYTES) for name, file in files.items() if file.is_file()
    }
    templates = stored or found
    return ChatTemplate(templates, _tokens(directory, settings)) if templates else None


def _tokens(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Read the texts of special tokens; in older directories special_tokens_map.json takes
    precedence."""
    older = (
        {} if "added_tokens_decoder" in settings else _read(directory / "special_tokens_map.json")
    )
    found: dict[str, str] = {}
    for name, token in {**settings, **older}.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _read(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Drop fields that are null, which templates would print, and set both names of reasoning."""
    plain = {key: value for key, value in _plain(message).items() if value is not None}
    reasoning = next((plain[name] for name in REASONING if name in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Convert to JSON's types: other objects have methods that a template must not reach."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loop_controls]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Serialize to the JSON that models were trained on; Jinja's filter escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """{% generation %} blocks, which mark training targets: only their body is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` for templates, without access to the type."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` for templates, without private names."""

    def __init__(*args: Any, **named: Any) -> None:  # `self` may be a name too
        self, *rest = args
        values = dict(*rest, **named)
        for name in values:
            _check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r} cannot be stored in a namespace")


HOW_TO_CALL = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'


def plain_layout(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Lay out a conversation for a model without a chat template."""
    lines = []
    if tools:
        lines.append(f"system: To call a tool, write {HOW_TO_CALL}. Tools:")
        lines += [json.dumps(tool.get("function", tool)) for tool in tools]
    for message in messages:
        calls = [
            f"<tool_call>{json.dumps(c['function'])}</tool_call>"
            for c in message.get("tool_calls", ())
        ]
        lines.append(f"{message['role']}: {message['content'] or ''}{''.join(calls)}")
    return "\n".join([*lines, "assistant:"])


RECOMMENDED = tuple(DEFAULT)  # parameters that models recommend
GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}  # where they differ


def recommended(path: Path) -> dict[str, Any]:
    """Return the sampling parameters a model directory or GGUF file recommends, by our names.

    They come from generation_config.json or `general.sampling`; invalid values are left out. A
    configuration that does not sample recommends nothing; one that samples without naming a
    temperature means 1, since transformers omits its own default."""
    if path.is_file():
        metadata = open_gguf(path).metadata
        keys = {name: f"general.sampling.{GGUF_NAMES.get(name, name)}" for name in RECOMMENDED}
        return _valid({name: metadata.get(key) for name, key in keys.items()})
    with suppress(LoadError):
        settings = read_object(path / "generation_config.json")
        if settings.get("do_sample") is True:
            named = {name: settings[name] for name in RECOMMENDED if name in settings}
            return _valid({"temperature": 1.0} | named)
    return {}


def _valid(found: Mapping[str, Any]) -> dict[str, Any]:
    """Drop parameters that `SamplingParams` rejects."""
    valid = {}
    for name, value in found.items():
        with suppress(RequestError, TypeError, ValueError, ArithmeticError):
            if value is not None:
                SamplingParams.of(**{name: value})
                valid[name] = value
    return valid
