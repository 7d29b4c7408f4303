"""What other servers and their clients call things: mapped to ours, ignored, or refused. Nothing
goes by in silence.

A field may be ignored where the text is the same with it and without it; the answer then says so in
a header. A field that would change the text is refused, unless it has the one value that means what
happens here anyway."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from forerun.errors import shown
from forerun.server.errors import ApiError

HEADER = "X-Forerun-Ignored"
Json = dict[str, Any]
_LEFT_OUT: ContextVar[list[str]] = ContextVar(
    "names that are ignored in the request that is being checked"
)


@dataclass(frozen=True, slots=True)
class Mapped:
    """Another name of one of our fields: of `targets` the one that the endpoint has. `form` makes
    our value of it."""

    targets: tuple[str, ...]
    form: Callable[[str, Any], Any] = lambda _name, value: value
    schema: Any = None


@dataclass(frozen=True, slots=True)
class Idle:
    """Ignored, because the text does not depend on it."""

    why: str


@dataclass(frozen=True, slots=True)
class Only:
    """Accepted with these values, which mean what happens here anyway; with others refused where
    `when` holds."""

    values: tuple[Any, ...]
    advice: str
    when: Callable[[Json], bool] = lambda _body: True


Table = dict[str, Mapped | Idle | Only]


def _penalised(body: Json) -> bool:
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    return any(body.get(name) not in (None, value) for name, value in neutral.items())


def _schema(name: str, value: Any) -> Json:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ApiError(400, f"{name} is not JSON: give a JSON schema", name) from None
    if not isinstance(value, dict):
        raise ApiError(400, f"{name} must be a JSON schema, as an object or as text", name)
    return {"type": "json_schema", "json_schema": {"schema": value}}


def _form(kind: str, type_: type, said: str) -> Callable[[str, Any], Json]:
    """A response_format that says nothing but its value."""

    def form(name: str, value: Any) -> Json:
        if not isinstance(value, type_):
            raise ApiError(400, f"{name} must be {said}", name)
        return {"type": kind, kind: value}

    return form


_regex, _grammar = _form("regex", str, "a text"), _form("grammar", str, "a text")
_choice = _form("choice", list, "a list of texts")
STRUCTURED = {"json": _schema, "regex": _regex, "choice": _choice, "grammar": _grammar}


def _structured(name: str, value: Any) -> Json:
    given = (
        {k: v for k, v in value.items() if v not in (None, False)}
        if isinstance(value, dict)
        else {}
    )
    if given == {"json_object": True}:
        return {"type": "json_object"}
    if len(given) != 1 or not given.keys() <= STRUCTURED.keys():
        raise ApiError(
            400,
            f"{name} must have one of {', '.join(STRUCTURED)} and json_object, and nothing else",
            name,
        )
    ((kind, form),) = given.items()
    return STRUCTURED[kind](f"{name}.{kind}", form)


def _thinking(name: str, value: Any) -> Json:
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false", name)
    return {"enable_thinking": value}


LENGTH = ("max_tokens", "max_output_tokens")
FORM = ("response_format",)
OBJECT, TEXT = {"type": "object"}, {"type": "string"}
NO_BEAMS = "it belongs to beam search, which is refused"
RESOURCES = "memory and threads are the server's own options"
SAMPLERS = "leave it out; there are temperature, top_k, top_p and min_p"
WHOLE_TEXT = "penalties look at the whole text here"

TABLE: Table = {
    # ours by another name
    "repeat_penalty": Mapped(("repetition_penalty",)),
    "n_predict": Mapped(LENGTH),
    "num_predict": Mapped(LENGTH),
    "max_new_tokens": Mapped(LENGTH),
    "min_new_tokens": Mapped(("min_tokens",)),
    "guided_json": Mapped(FORM, _schema, {"anyOf": [OBJECT, TEXT]}),
    "guided_regex": Mapped(FORM, _regex, TEXT),
    "guided_choice": Mapped(FORM, _choice, {"type": "array", "items": TEXT}),
    "guided_grammar": Mapped(FORM, _grammar, TEXT),
    "structured_outputs": Mapped(FORM, _structured, OBJECT),
    "json_schema": Mapped(FORM, _schema, {"anyOf": [OBJECT, TEXT]}),
    "enable_thinking": Mapped(("chat_template_kwargs",), _thinking, {"type": "boolean"}),
    # without effect on the text
    **dict.fromkeys(
        ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa"), Idle(RESOURCES)
    ),
    **dict.fromkeys(("use_mmap", "use_mlock", "low_vram", "f16_kv", "vocab_only"), Idle(RESOURCES)),
    **dict.fromkeys(("keep_alive", "ttl"), Idle("the model stays loaded")),
    **dict.fromkeys(
        ("cache_prompt", "id_slot", "slot_id"), Idle("a cache cannot change the text here")
    ),
    **dict.fromkeys(("priority", "request_id"), Idle("requests are served in order of arrival")),
    **dict.fromkeys(
        ("num_keep", "n_keep", "n_discard"), Idle("no text is shifted out of the context here")
    ),
    **dict.fromkeys(
        ("draft_model", "speculative.n_max", "speculative.n_min"),
        Idle("drafts cannot change the text"),
    ),
    "speculative.p_min": Idle("drafts cannot change the text"),
    **dict.fromkeys(("length_penalty", "early_stopping"), Idle(NO_BEAMS)),
    "guided_decoding_backend": Idle("there is one"),
    "spaces_between_special_tokens": Idle("special tokens are not part of the text"),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), Idle("mirostat is refused")),
    **dict.fromkeys(("dynatemp_exponent", "xtc_threshold"), Idle("what it belongs to is refused")),
    **dict.fromkeys(
        ("dry_base", "dry_allowed_length", "dry_penalty_last_n"), Idle("DRY is refused")
    ),
    "dry_sequence_breakers": Idle("DRY is refused"),
    "timings_per_token": Idle("answers have usage and metrics"),
    "return_progress": Idle("it adds nothing to the text"),
    # the value that means what happens here, and no other
    "use_beam_search": Only((False,), "use n for several answers"),
    "best_of": Only((1,), "use n for several answers"),
    "mirostat": Only((0,), SAMPLERS),
    "mirostat_mode": Only((0,), SAMPLERS),
    **dict.fromkeys(("tfs_z", "tfs", "typical_p", "typical"), Only((1,), SAMPLERS)),
    **dict.fromkeys(
        ("top_a", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"), Only((0,), SAMPLERS)
    ),
    **dict.fromkeys(("dynatemp_range", "xtc_probability", "dry_multiplier"), Only((0,), SAMPLERS)),
    **dict.fromkeys(("smoothing_factor", "no_repeat_ngram_size", "min_keep"), Only((0,), SAMPLERS)),
    "dynamic_temperature": Only((False,), SAMPLERS),
    "top_n_sigma": Only((-1, 0), SAMPLERS),
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty"), Only((1,), "leave it out")),
    "samplers": Only(([],), SAMPLERS),
    "repeat_last_n": Only((-1,), f"{WHOLE_TEXT}; leave it out, or give -1", _penalised),
    "penalize_nl": Only((True,), f"{WHOLE_TEXT}, line ends too; leave it out", _penalised),
    "logits_processors": Only(([],), "use logit_bias"),
    "bad_words": Only(([],), "use logit_bias"),
    "allowed_token_ids": Only((), "use logit_bias, or response_format of type choice"),
    "add_special_tokens": Only(
        (), "leave it out; for a text without them give /v1/completions token ids"
    ),
    "skip_special_tokens": Only((True,), "return_token_ids gives every token"),
    "include_stop_str_in_output": Only((False,), "the text ends before the stop string"),
    "detokenize": Only((True,), "return_token_ids gives token ids beside the text"),
    "return_tokens_as_token_ids": Only((False,), "use return_token_ids"),
    "echo": Only((False,), "/v1/completions has echo"),
    "add_generation_prompt": Only(
        (True,), "lay the conversation out yourself and send it to /v1/completions"
    ),
    "continue_final_message": Only(
        (False,), "lay the conversation out yourself and send it to /v1/completions"
    ),
    "chat_template": Only(
        (), "the model's own template is used; send your own layout to /v1/completions"
    ),
    "truncate_prompt_tokens": Only((-1,), "shorten the prompt yourself; /tokenize counts"),
    "prompt_logprobs": Only((0,), "/v1/completions and /v1/chat/completions have it"),
    "n_probs": Only((0,), "use logprobs"),
    "post_sampling_probs": Only((False,), "use logprobs"),
    "t_max_predict_ms": Only((0, -1), "use max_tokens"),
    "n_indent": Only((0,), "leave it out"),
    "grammar": Only(("",), "give response_format of type grammar, in Lark's notation"),
    "guided_whitespace_pattern": Only((), "leave it out, or say it with guided_regex"),
    "lora": Only(([],), "adapters are not read"),
    "reasoning_format": Only(("none", "auto"), "thoughts stay in the text"),
    "functions": Only(([],), "use tools"),
    "function_call": Only(("none", "auto"), "use tool_choice"),
    **dict.fromkeys(
        ("audio", "web_search_options"), Only((), "this server takes and gives text only")
    ),
}


@contextmanager
def left_out() -> Iterator[list[str]]:
    """Collect the names that are ignored in one request, in the objects within it too."""
    names: list[str] = []
    token = _LEFT_OUT.set(names)
    try:
        yield names
    finally:
        _LEFT_OUT.reset(token)


def leave_out(names: Iterable[str]) -> None:
    """Say that these are ignored in the request that is being checked."""
    _LEFT_OUT.get([]).extend(names)


def settle(body: Json, known: Collection[str], table: Table) -> tuple[Json, tuple[str, ...]]:
    """(an object in our fields alone, which are `known`; the names that were ignored). Raises
    ApiError."""
    ours: Json = {name: value for name, value in body.items() if name in known}
    ignored, narrow = [], []
    for name, value in body.items():
        if name in known:
            continue
        row = table.get(name)
        if row is None:
            raise unknown(name, [*known, *table])
        if value is None or (isinstance(row, Idle) and value in ([], {})):
            continue  # it says nothing
        if isinstance(row, Mapped):
            _map(ours, name, value, row, known)
        elif isinstance(row, Idle):
            ignored.append(name)
        else:
            narrow.append((name, value, row))
    for name, value, row in narrow:
        if value not in row.values and row.when(ours):
            said = f"={shown(value)}" if isinstance(value, (bool, int, float, str)) else ""
            raise ApiError(400, f"{name}{said} is not supported: {row.advice}", name)
    return ours, tuple(ignored)


def _map(ours: Json, name: str, value: Any, row: Mapped, known: Collection[str]) -> None:
    target = next((target for target in row.targets if target in known), None)
    if target is None:
        raise ApiError(400, f"{name} is not supported by this endpoint: leave it out", name)
    formed = row.form(name, value)
    if ours.get(target) not in (None, formed):
        raise ApiError(
            400, f"{name} says again what {target} says, by this or another name: give one", name
        )
    ours[target] = formed


def unknown(name: str, known: Collection[str]) -> ApiError:
    """The error of a name that is not `known`; it says the nearest one that is."""
    close = difflib.get_close_matches(name[:64], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "/docs lists what this endpoint takes"
    return ApiError(
        400, f"there is no field {shown(name[:64])}: {hint}", name if name.isidentifier() else None
    )


def describe(schema: Json, kind: Any) -> None:
    """Add the rows of its table to the published schema of an object."""
    properties, known = schema.get("properties", {}), kind.model_fields
    for name, row in kind.others.items():
        if name in properties:
            continue
        if isinstance(row, Idle):
            properties[name] = {"description": f"Ignored: {row.why}."}
        elif isinstance(row, Only):
            properties[name] = {
                "enum": [*row.values, None],
                "description": f"Other values are refused: {row.advice}.",
            }
        elif target := next((target for target in row.targets if target in known), None):
            properties[name] = (row.schema or properties[target]) | {
                "description": f"Becomes {target}."
            }
