"""Sampling parameters that change while one talks, and where each of them comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from forerun.errors import RequestError, nearest
from forerun.flags import ANSWER, NO_FLAGS, SAMPLING_TYPES, in_flags
from forerun.sampling.params import DEFAULT, SamplingParams
from forerun.terminal import sampling_params

FIELDS = {f.name.replace("_", "-"): f for f in fields(SamplingParams) if f.name not in ("n", *NO_FLAGS)}
AS_BEFORE = "default"  # the value that takes a /set back
OURS = "forerun's default"


class Parameters:
    """The parameters in force: defaults, over them the model's authors', the command line's, and those that were set.

    `given` and `advised` are options as the command line gives them; `stop` are stops that always count.
    """

    def __init__(
        self,
        given: dict[str, Any],
        advised: Mapping[str, Any] = MappingProxyType({}),
        stop: tuple[str, ...] = (),
    ) -> None:
        self._stop = stop
        self._layers: dict[str, Mapping[str, Any]] = {
            OURS: {**DEFAULT, **ANSWER}, "model's authors": advised, "command line": given, "/set": {}
        }  # fmt: skip
        self.params = self._made(self._layers)

    def set(self, name: str, value: str) -> None:
        """Change one parameter, by its name on the command line. Raises RequestError, and nothing is changed."""
        field = FIELDS.get(name.replace("_", "-").lstrip("-"))
        if field is None:
            raise RequestError(f"there is no parameter {name!r}: {nearest(name, FIELDS)}")
        chosen = {key: kept for key, kept in self._layers["/set"].items() if key != field.name}
        if value != AS_BEFORE:
            chosen[field.name] = _value(field.name, SAMPLING_TYPES.get(field.name, type(field.default)), value)
        layers = self._layers | {"/set": chosen}
        try:
            self.params = self._made(layers)
        except RequestError as error:
            raise RequestError(in_flags(str(error), {f.name: name for name, f in FIELDS.items()})) from None
        self._layers = layers

    def asked(self, name: str) -> bool:
        """Whether somebody gave this parameter."""
        return self.origin(name) in ("/set", "command line")

    def origin(self, name: str) -> str:
        """Where the value of a field comes from."""
        return next((origin for origin in reversed(self._layers) if name in self._layers[origin]), OURS)

    def lines(self) -> list[tuple[str, str, str]]:
        """(name on the command line, value, where from) of every parameter."""
        return [(name, _text(getattr(self.params, f.name)), self.origin(f.name)) for name, f in FIELDS.items()]

    def _made(self, layers: Mapping[str, Mapping[str, Any]]) -> SamplingParams:
        options = {name: value for layer in layers.values() for name, value in layer.items()}
        if self._stop:
            options["stop"] = [*options.get("stop", []), *self._stop]
        return sampling_params(options)


def _value(name: str, kind: Any, text: str) -> Any:
    """The value that a flag of that kind would have."""
    flag = name.replace("_", "-")
    if kind is bool:
        if text not in ("true", "false"):
            raise RequestError(f"{flag} is true or false, not {text!r}")
        return text == "true"
    if kind in (int, float):
        return _number(flag, kind, text)
    if name == "stop":
        return [text]  # one string, spaces and all
    return [_number(flag, int, part) for part in text.split()] if kind == list[int] else text.split()


def _number(flag: str, kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise RequestError(f"{flag} {text!r} is not a {'whole ' if kind is int else ''}number") from None


def _text(value: Any) -> str:
    """A value as one would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        value = [f"{token}={amount:g}" for token, amount in value.items()]
    if isinstance(value, list | tuple):
        return " ".join(repr(v) if isinstance(v, str) and not v.isprintable() else str(v) for v in value) or "not set"
    return "not set" if value is None else str(value)
