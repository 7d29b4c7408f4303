"""What `forerun deploy` is told: a TOML file with the models, their replicas, and what `forerun
serve` can be told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from forerun.cluster.affinity import Routing
from forerun.config import Config
from forerun.errors import ConfigError, ForerunError, shown, suggest
from forerun.server.settings import Settings, read_toml
from forerun.utils import check_integer

LONGEST_NAME = 100  # characters
MOST_REPLICAS = 10_000
NOT_HERE = {
    "served_name": "give each of [[models]] a name",
    "indices": "a replica could not load them for the others: use forerun serve --indices",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How many replicas a model has.

    Args:
        min: there are always so many; with 0 the last one ends when nothing is asked for long
            enough.
        max: never more; between the two Ray decides.
        requests: that each replica works on before there is one more, on average.
        idle: seconds without requests until the last one ends, where `min` is 0.
    """

    min: int = 1
    max: int = 1
    requests: int = 4
    idle: int = 600

    def __post_init__(self) -> None:
        for name, low, high in (
            ("min", 0, MOST_REPLICAS),
            ("max", max(1, self.min), MOST_REPLICAS),
            ("requests", 1, 1 << 20),
            ("idle", 1, 1 << 20),
        ):
            check_integer(f"replicas.{name}", getattr(self, name), low, high)


@dataclass(frozen=True, slots=True)
class Model:
    """One model of a cluster: what clients call it, how many replicas it has, and the engine of
    each."""

    name: str
    replicas: Replicas
    engine: Config

    @property
    def options(self) -> dict[str, Any]:
        """Those of the engine."""
        return asdict(self.engine)


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole cluster. The first model answers requests that name none.

    `address` is that of a Ray cluster that runs already; without one, Ray is started here and ends
    with the verb."""

    models: tuple[Model, ...]
    settings: Settings = field(default_factory=Settings)
    routing: Routing = field(default_factory=Routing)
    address: str = ""
    retries: int = (
        2  # other replicas that a request is given to when the one that worked on it dies
    )

    @property
    def processors(self) -> int:
        """CPU threads of as many replicas as there may be."""
        return sum(self.threads(model) * model.replicas.max for model in self.models)

    def threads(self, model: Model) -> int:
        """CPU threads of each replica of a model: what was asked for, or an even share of this
        machine's."""
        most = sum(model.replicas.max for model in self.models)
        return model.engine.threads or max(1, len(os.sched_getaffinity(0)) // most)


def read_plan(path: Path) -> Plan:
    """The plan in a TOML file. Raises ConfigError, in one line that names the file."""
    given = read_toml(path, "cluster")
    try:
        return make_plan(given)
    except ForerunError as error:
        raise ConfigError(f"{path}: {error}") from None


def make_plan(given: Mapping[str, Any]) -> Plan:
    """A plan from what a file holds. Raises ConfigError."""
    given = _named(given)
    server = {f.name for f in fields(Settings)} - set(NOT_HERE)
    _check_names(given, server | {"models", "routing", "ray", "retries"}, "option")
    tables = given.get("models")
    if not isinstance(tables, list) or not tables:
        raise ConfigError("there is no model: write a [[models]] table with a name for each")
    models = tuple(_model(table) for table in tables)
    names = [model.name.removesuffix(":latest") for model in models]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two models have the name {twice!r}: clients could not tell them apart")
    ray = _table(given, "ray", {"address"})
    if not isinstance(ray.get("address", ""), str):
        raise ConfigError(f"ray.address={shown(ray['address'])} must be text: auto, or HOST:PORT")
    retries = given.get("retries", 2)
    check_integer("retries", retries, 0, 100)
    return Plan(
        models,
        Settings(**{name: value for name, value in given.items() if name in server}),
        Routing(**_table(given, "routing", {f.name for f in fields(Routing)})),
        ray.get("address", ""),
        retries,
    )


def replica_settings(plan: Plan, model: Model) -> Settings:
    """The settings of a replica: the door has already asked who it is, and whether its page may."""
    return replace(
        plan.settings,
        served_name=model.name,
        api_key=(),
        api_keys="",
        allowed_hosts=("*",),
        allowed_origins=("*",),
    )


def _model(table: object) -> Model:
    if not isinstance(table, dict):
        raise ConfigError("models must be tables: write [[models]] before the options of each")
    table = _named(table)
    _check_names(
        table, {f.name for f in fields(Config)} | {"name", "replicas"}, "option of a model"
    )
    name = table.pop("name", None)
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
        raise ConfigError(
            f"a model's name is {shown(name)}: give what clients call it, in 1 to {LONGEST_NAME} letters"
        )
    try:
        return Model(name, _replicas(table.pop("replicas", 1)), Config.of(**table))
    except ConfigError as error:
        raise ConfigError(f"model {name!r}: {error}") from None


def _replicas(value: object) -> Replicas:
    if isinstance(value, dict):
        _check_names(value, {f.name for f in fields(Replicas)}, "option of replicas")
        least = value.get("min", 1)
        return Replicas(**{"max": least or 1} | value)
    check_integer("replicas", value, 1, MOST_REPLICAS)
    assert isinstance(value, int)
    return Replicas(min=value, max=value)


def _table(given: Mapping[str, Any], name: str, known: set[str]) -> dict[str, Any]:
    table = given.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} must be a table: write [{name}] before its options")
    table = _named(table)
    _check_names(table, known, f"option of {name}")
    return table


def _named(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in table.items()}


def _check_names(table: Mapping[str, Any], known: set[str], what: str) -> None:
    for name in table:
        if name in NOT_HERE and name not in known:
            raise ConfigError(f"a cluster has no {name}: {NOT_HERE[name]}")
        if name not in known:
            raise ConfigError(f"there is no {what} {shown(name)}: {suggest(name, known)}")


def summary(plan: Plan) -> list[str]:
    """What would be started, a line each."""
    lines = []
    for model in plan.models:
        least, most = model.replicas.min, model.replicas.max
        count = (
            f"{least} to {most} replicas"
            if most > least
            else f"{least} replica{'s' * (least != 1)}"
        )
        cache = (
            f" and {model.engine.kv_tokens} tokens of KV cache" if model.engine.kv_tokens else ""
        )
        engine = f"{plan.threads(model)} threads{cache} each, draft {model.engine.draft}"
        lines.append(
            f"{model.name}: {count} of {model.engine.model or 'the default model'}, {engine}"
        )
    ray = f"the Ray cluster at {plan.address}" if plan.address else "a Ray cluster of its own"
    return [*lines, f"on {plan.settings.host}:{plan.settings.port}, on {ray}"]
