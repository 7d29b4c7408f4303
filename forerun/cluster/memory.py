"""The memory of this machine, divided among all replicas before any of them starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from forerun.cluster.plan import Model, Plan
from forerun.errors import ConfigError, ForerunError
from forerun.hardware import free_ram
from forerun.load import cache_needs, check_cache, fit_kv_tokens
from forerun.models.hub import find_model


def divided(plan: Plan) -> Plan:
    """The plan with `kv_tokens` for every model: replicas that start at once would each fit their
    cache to the same free memory. As in one server, caches that are fitted take a quarter of it,
    here all of them together.

    On a cluster that runs already nothing is known of its machines: there each replica fits its
    own. Raises ForerunError, in one line that names the model.
    """
    found = [find_model(model.engine.model) for model in plan.models]
    if plan.address:
        return plan
    needs = []
    for model, directory in zip(plan.models, found, strict=True):
        with _named(model):
            needs.append(cache_needs(model.engine, directory))
    free = free_ram()
    for model, (each, _) in zip(plan.models, needs, strict=True):
        tokens, count = model.engine.kv_tokens, model.replicas.max
        if tokens:
            with _named(model):
                check_cache(tokens, each, free, count)
            free -= tokens * each * count
    unsaid = sum(model.replicas.max for model in plan.models if not model.engine.kv_tokens)
    models = []
    for model, (each, context) in zip(plan.models, needs, strict=True):
        with _named(model):
            tokens = model.engine.kv_tokens or fit_kv_tokens(
                model.engine, context, each, free // 4 // unsaid
            )
        models.append(_with_tokens(model, tokens))
    return replace(plan, models=tuple(models))


def renewed(old: Plan, new: Plan) -> Plan:
    """What runs, with the engines and replicas of a new plan. Raises ConfigError where it has other
    models.

    Caches that the new plan does not size stay as large as they are: the free memory is that beside
    the old ones."""
    if [model.name for model in new.models] != [model.name for model in old.models]:
        raise ConfigError(
            "there are other models than before: end the cluster, and start it with the new file"
        )
    models = [
        _with_tokens(model, was.engine.kv_tokens)
        if was.engine.kv_tokens and not model.engine.kv_tokens
        else model
        for model, was in zip(new.models, old.models, strict=True)
    ]
    found = replace(old, models=tuple(models))
    if not old.address and found.processors > old.processors:
        raise ConfigError(
            f"that takes {found.processors} processors, and Ray has been started with {old.processors}: give fewer"
            " threads or replicas, or end the cluster and start it with the new file"
        )
    return found


def _with_tokens(model: Model, tokens: int) -> Model:
    return replace(model, engine=replace(model.engine, kv_tokens=tokens))


@contextmanager
def _named(model: Model) -> Iterator[None]:
    try:
        yield
    except ForerunError as error:
        raise type(error)(f"model {model.name!r}: {error}") from None
