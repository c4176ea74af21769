"""Keywords of the library with values of another type: one error that names the keyword, as the command line has."""

import contextlib

import pytest

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.options.keywords import SearchOptions, ServingOptions

OF_ANOTHER_TYPE = (object(), [1], ["a"], {"a": 1}, -1, 1.5, float("nan"), b"b", True, lambda: 0)
ALONE = ("mesh", "strategy", "tokens", "compare", "compare_systems", "sweep")


@pytest.mark.parametrize("name", [*sorted(SearchOptions.__annotations__), *ALONE])
def test_a_keyword_of_another_type_is_one_error_or_is_taken(name):
    options = {"batch": 4, "seq_len": 32}
    for value in OF_ANOTHER_TYPE:
        with contextlib.suppress(MeshwrightError):
            mw.plan("tiny", "cpu:2", **(options | {name: value}))


@pytest.mark.parametrize("name", sorted(ServingOptions.__annotations__))
def test_a_keyword_of_a_server_of_another_type_is_one_error_or_is_taken(name):
    for value in OF_ANOTHER_TYPE:
        with contextlib.suppress(MeshwrightError):
            mw.plan("tiny", "cpu:2", serve="decode", **{name: value})


FUNCTIONS = (mw.plan, mw.show, mw.matmul, mw.collective, mw.report, mw.load, mw.verify)
PLAN_FUNCTIONS = (mw.plan, mw.verify)
"""They take a function too: a step of somebody's own."""


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (each, value)
        for each in FUNCTIONS
        for value in OF_ANOTHER_TYPE
        if each not in PLAN_FUNCTIONS or not callable(value)
    ],
)
def test_a_first_argument_of_another_type_is_one_error(function, value):
    with pytest.raises(MeshwrightError):
        function(value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero_stage": [1]}, r"zero_stage is \[1\]; it is one of 0, 1, 2, 3"),
        ({"framework": 1}, "framework is 1; it is text"),
        ({"freeze": 0}, "freeze is 0; it is text or a list, of which each is text"),
        ({"adapter": 1.5}, "adapter is 1.5; it is text or a path"),
        ({"sweep": ["batch=4,8"]}, r"sweep is \['batch=4,8'\]; it is text, as 'chips=64..1024'"),
    ],
)
def test_the_error_names_the_keyword_its_value_and_its_type(options, said):
    with pytest.raises(MeshwrightError, match=said):
        mw.plan("tiny", "cpu:2", batch=4, seq_len=32, **options)
