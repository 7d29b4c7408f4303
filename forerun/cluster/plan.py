"""Configuration of `forerun deploy`: a TOML file with models, replicas and server settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from forerun.config import Config
from forerun.errors import ConfigError, ForerunError, shown, suggest
from forerun.hardware import free_ram
from forerun.load import cache_needs, check_cache, fit_kv_tokens
from forerun.models.hub import find_model
from forerun.server.settings import Settings, read_toml
from forerun.utils import check_integer, check_numbers

UNSUPPORTED = {
    "served_name": "give each of [[models]] a name",
    "indices": "use forerun serve --indices",
    "routing": "requests of one conversation go to one replica without options",
    "retries": "a request is sent to up to two other replicas if its own dies",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Number of replicas of a model; Ray Serve scales between `min` and `max`."""

    min: int = 1  # with 0 the last replica ends when the model is idle
    max: int = 1
    requests: int = 4  # average per replica above which Ray adds a replica
    idle: int = 600  # seconds without requests until the last replica ends

    def __post_init__(self) -> None:
        check_numbers(self, {"max": 1, "requests": 1, "idle": 1})
        check_integer("max", self.max, self.min)


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the cluster: the name clients use, its replicas and the engine of each."""

    name: str
    replicas: Replicas
    engine: Config


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole cluster. The first model answers requests that name none."""

    models: tuple[Model, ...]
    settings: Settings
    address: str  # of a running Ray cluster; empty starts Ray on this machine


def read_plan(path: Path) -> Plan:
    """Read a plan from a TOML file. Raises ConfigError, in one line that names the file."""
    given = read_toml(path, "cluster")
    with _prefixed(str(path)):
        return make_plan(given)


def make_plan(given: Mapping[str, Any]) -> Plan:
    """Build a plan from the content of a file. Raises ConfigError."""
    given = _options(given, Settings, "option", "models", "ray")
    tables = given.pop("models", None)
    if not isinstance(tables, list) or not tables:
        raise ConfigError("there is no model: write a [[models]] table with a name for each")
    models = tuple(_model(table) for table in tables)
    names = sorted(model.name.removesuffix(":latest") for model in models)
    if len(set(names)) < len(names):
        raise ConfigError(f"two models have the same name: {', '.join(names)}")
    ray = given.pop("ray", {"address": ""})
    if not isinstance(ray, dict) or list(map(type, ray.values())) != [str] or "address" not in ray:
        raise ConfigError(f"ray={shown(ray)} must be a table with an address: auto, or HOST:PORT")
    return Plan(models, Settings(**given), ray["address"])


def _model(table: Any) -> Model:
    name = table.get("name") if isinstance(table, dict) else None
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigError(f"a model's name is {shown(name)}: give each of [[models]] a name")
    options = _options(table, Config, "option of a model", "name", "replicas")
    with _prefixed(f"model {name!r}"):
        replicas = options.pop("replicas", 1)
        if not isinstance(replicas, dict):
            check_integer("replicas", replicas, 1)
            replicas = {"min": replicas}
        replicas = _options(replicas, Replicas, "option of replicas")
        replicas.setdefault("max", replicas.get("min") or 1)
        return Model(options.pop("name"), Replicas(**replicas), Config(**options))


def _options(table: Mapping[str, Any], kind: Any, what: str, *more: str) -> dict[str, Any]:
    """Return the options of a table: fields of a dataclass, and `more`. Raises ConfigError."""
    options = {name.replace("-", "_"): value for name, value in table.items()}
    known = {f.name for f in fields(kind)}.union(more)
    for name in options:
        if kind is Settings and name in UNSUPPORTED:
            raise ConfigError(f"a cluster has no {name}: {UNSUPPORTED[name]}")
        if name not in known:
            raise ConfigError(f"there is no {what} {shown(name)}: {suggest(name, known)}")
    return options


def divide_machine(plan: Plan) -> Plan:
    """Set `threads` and `kv_tokens` of every model. Raises ForerunError.

    Replicas that start together would each size their cache by the same free memory. Caches without
    a configured size share a quarter of it instead, as much as the cache of a single server gets.
    The memory of a running Ray cluster is unknown: there each replica sizes its own cache.
    """
    free = free_ram()
    num_cpus = len(os.sched_getaffinity(0)) // sum(model.replicas.max for model in plan.models)
    num_unsized = sum(model.replicas.max for model in plan.models if not model.engine.kv_tokens)
    engines = {}
    for model in sorted(plan.models, key=lambda model: not model.engine.kv_tokens):
        engine, tokens, count = model.engine, model.engine.kv_tokens, model.replicas.max
        with _prefixed(f"model {model.name!r}"):
            token_bytes, context = cache_needs(engine, find_model(engine.model))
            if tokens and not plan.address:
                check_cache(tokens, token_bytes, free, count)
                free -= tokens * token_bytes * count
            elif not plan.address:
                tokens = fit_kv_tokens(engine, context, token_bytes, free // 4 // num_unsized)
        threads = engine.threads or max(1, num_cpus)
        engines[model.name] = replace(engine, threads=threads, kv_tokens=tokens)
    models = (replace(model, engine=engines[model.name]) for model in plan.models)
    return replace(plan, models=tuple(models))


@contextmanager
def _prefixed(prefix: str) -> Iterator[None]:
    """Put a prefix in front of the message of an error."""
    try:
        yield
    except ForerunError as error:
        raise type(error)(f"{prefix}: {error}") from None


def summary(plan: Plan) -> str:
    """Describe what would be started, one line for each model and one for the address."""
    lines = []
    for model in plan.models:
        engine, replicas = model.engine, model.replicas
        cache = f"{engine.kv_tokens or 'as many as fit'} tokens of KV cache"
        count = (
            f"{replicas.min} to {replicas.max} replicas of {engine.model or 'the default model'}"
        )
        engine_line = f"each with {engine.threads} threads, {cache}, draft {engine.draft}"
        lines.append(f"{model.name}: {count}, {engine_line}")
    ray = f"the Ray cluster at {plan.address}" if plan.address else "a Ray cluster of its own"
    return "\n".join([*lines, f"on {plan.settings.host}:{plan.settings.port}, on {ray}"])
