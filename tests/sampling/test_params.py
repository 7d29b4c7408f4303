"""An invalid sampling parameter is an error at once, which names it, the reason and a remedy."""

import math

import pytest

from forerun.errors import RequestError
from forerun.sampling.grammar import Grammar
from forerun.sampling.params import DEFAULT, DEFAULT_MAX_TOKENS, GREEDY, Sampling, SamplingParams

INVALID = {
    "temperature": [-0.1, 100.5, math.nan, math.inf, "hot", True],
    "top_k": [-1, 2.5, (1 << 31) + 1, "3", True],
    "top_p": [0, 0.0, -0.2, 1.0001, math.nan],
    "min_p": [-0.01, 1.01, math.nan],
    "presence_penalty": [-2.01, 2.01, math.nan],
    "frequency_penalty": [-2.01, 2.01, math.inf],
    "repetition_penalty": [0, -1.0, 100.1, math.nan],
    "max_tokens": [0, -5, 1.5, True],
    "min_tokens": [-1, 0.5, DEFAULT_MAX_TOKENS + 1],
    "n": [0, 1025, 1.5],
    "seed": [-1, 1 << 63, 0.5, "x"],
    "logprobs": [-1, 21, 2.5],
    "stop": ["", ("a", ""), [3]],
    "logit_bias": [{5: 100.5}, {5: -101}, {5: math.nan}],
}

VALID = {
    "temperature": [None, 0, 0.0, 1, 1e-5, 100],
    "top_k": [0, 1, 1 << 31],
    "top_p": [None, 1e-9, 1, 1.0],
    "min_p": [0, 1],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2.0, 2.0],
    "repetition_penalty": [1e-3, 100],
    "max_tokens": [None, 1, 1 << 31],
    "min_tokens": [0, DEFAULT_MAX_TOKENS],
    "n": [1, 1024],
    "seed": [None, 0, (1 << 63) - 1],
    "logprobs": [None, 0, 20],
    "stop": ["end", ("a", "b"), ["a"], ()],
    "stop_token_ids": [(), [1, 2], (3,)],
    "logit_bias": [{}, {5: -100, 6: 100}],
    "grammar": [None, Grammar("regex", "a+")],
}


def cases(table):
    return [
        pytest.param(name, value, id=f"{name}={value!r}")
        for name, values in table.items()
        for value in values
    ]


@pytest.mark.parametrize("name, value", cases(INVALID))
def test_a_value_out_of_range_is_an_error_that_names_it(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert any(advice in message for advice in ("give", "must be", "leave it out", "lower it")), (
        "the message has no remedy"
    )


@pytest.mark.parametrize("name, value", cases(VALID))
def test_the_ends_of_a_range_are_allowed(name, value):
    assert getattr(SamplingParams.of(**{name: value}), name) == value


WRONG_TYPES = {
    "stop": [5, None],
    "stop_token_ids": [5, None, (1.5,), ("x",)],
    "logit_bias": [{5: "x"}, {"x": 1.0}, None],
    "seed": [True],
    "logprobs": [True],
    "grammar": ["{}", {"type": "object"}, True],
}


@pytest.mark.parametrize("name, value", cases(WRONG_TYPES))
def test_a_value_of_a_wrong_type_is_an_error_that_names_it(name, value):
    """A client's mistake must come back as one, not as a TypeError or, later, as a wrong result."""
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "given, meant",
    [
        ("temperatur", "temperature"),
        ("topk", "top_k"),
        ("max_token", "max_tokens"),
        ("stops", "stop"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(given, meant):
    with pytest.raises(RequestError, match=f"'{given}'.*did you mean '{meant}'"):
        SamplingParams.of(**{given: 1})


def test_unset_parameters_are_none_and_mean_greedy_and_unfiltered():
    params = SamplingParams()
    assert params.temperature is None and params.greedy and not params.has_penalties
    assert params.sampling == GREEDY
    assert params.stop_strings == ()
    assert SamplingParams.pure().sampling == GREEDY
    assert SamplingParams.pure(temperature=0.8, top_k=3).sampling == Sampling(0.8, 3)


def test_the_length_has_one_default():
    assert SamplingParams().length_limit == SamplingParams.pure().length_limit == DEFAULT_MAX_TOKENS
    assert SamplingParams(max_tokens=7).length_limit == 7
    assert f"By default\n            {DEFAULT_MAX_TOKENS}." in str(SamplingParams.__doc__), (
        "the documentation gives another default"
    )


def values(params):
    return {name: getattr(params, name) for name in DEFAULT}


@pytest.mark.parametrize(
    "given, defaults, differs",  # differs: from forerun's default
    [
        ({}, {}, {}),
        ({}, {"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"top_p": 1.0}, {"top_p": 0.9, "min_p": 0.1}, {"top_p": 1.0, "min_p": 0.1}),
        ({"temperature": 0}, {"temperature": 0.6}, {"temperature": 0}),
        ({"top_k": 0, "min_p": 0.0}, {"top_k": 20}, {"top_k": 0, "min_p": 0.0}),
        ({"repetition_penalty": 1.0}, {"repetition_penalty": 1.2}, {}),
    ],
)
def test_user_values_override_model_defaults_which_override_forerun_s(given, defaults, differs):
    """Fields are independent: a user who gives one parameter changes no other."""
    found = SamplingParams(seed=3, max_tokens=9, **given).resolved(defaults)
    assert values(found) == {**DEFAULT, **differs} and (found.seed, found.max_tokens) == (3, 9)
    assert found.resolved({"temperature": 0.1, "top_p": 0.1}) is found, "all fields are resolved"


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_each_penalty_sets_has_penalties(name):
    assert SamplingParams(**{name: 0.5}).has_penalties


def test_an_unknown_name_without_a_near_one_lists_all():
    with pytest.raises(RequestError, match=r"known: .*frequency_penalty.*top_p"):
        SamplingParams.of(zzz=1)


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(RequestError, match="min_tokens=9 is over max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)
    assert SamplingParams(min_tokens=8, max_tokens=8).min_tokens == 8


def test_stop_strings_are_a_tuple_however_stop_is_given():
    for stop in ("xy", ["xy"], ("xy",)):
        assert SamplingParams(stop=stop).stop_strings == ("xy",)
