"""Predictions are what they were when the golden records were written, but for what is named here.

Where a prediction is to change, name the difference in `named_differences.py` with its cause. Once it is right for
good, write new records (`python tests/predictions/make_records.py`) and take the name out.
"""

import copy
import json
import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES
from compute import compute, models, remats, strategy_fields
from differences import Difference, differences
from named_differences import NAMED_DIFFERENCES
from records import PLANS, read, write

LATER = {"phi3-mini", "tiny-qwen3", "tiny-gemma2", "tiny-gemma3", "tiny-gpt2", "gemma3-1b"} | {
    "tiny-deepseek",
    "tiny-qwen2-moe",
    "tiny-gpt-oss",
    "gpt-oss-20b",
    "tiny-olmo2",
    "olmo2-7b",
    "tiny-qwen3-next",
    "qwen3-next-80b-a3b",
    "tiny-llama4",
    "llama4-scout-17b-16e",
    "llama4-maverick-17b-128e",
    "tiny-qwen3.5",
    "qwen3.5-27b",
    "qwen3.5-35b-a3b",
    "tiny-mistral4",
    "mistral-small-4-119b",
    "tiny-gemma4",
    "tiny-gemma4-moe",
    "tiny-gemma4-e2b",
    "gemma4-e2b",
    "gemma4-e4b",
    "gemma4-26b-a4b",
    "gemma4-31b",
    "tiny-gemma3n",
    "gemma3n-e2b",
    "gemma3n-e4b",
}
"""Presets that came after the records were written."""

RECORDS = read(PLANS)


@cache
def found(name: str) -> tuple[Difference, ...]:
    """How the prediction of a case differs from its record."""
    now = json.loads(json.dumps(compute(RECORDS[name]["case"])))
    return tuple(differences(name, RECORDS[name]["record"], now))


def is_named(difference: Difference, pattern: tuple[str, str]) -> bool:
    """Whether a pattern of the table matches a difference."""
    return fnmatchcase(difference.case, pattern[0]) and fnmatchcase(difference.quantity, pattern[1])


SEARCHES = ("deepseek-v3 search of h100", "gpt3 megatron on a100", "decode deepseek-v3 fp8 on h100")
"""Their searches take over a second; `make test` has others of dense models, of experts and of servers."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if name in SEARCHES else ()) for name in RECORDS]
)
def test_a_prediction_is_as_recorded(name):
    unnamed = [each for each in found(name) if not any(is_named(each, pattern) for pattern in NAMED_DIFFERENCES)]
    assert not unnamed, "\n" + "\n".join(map(str, unnamed))


def test_each_named_difference_is_there():
    for pattern in NAMED_DIFFERENCES:
        cases = [name for name in RECORDS if fnmatchcase(name, pattern[0])]
        assert any(is_named(each, pattern) for name in cases for each in found(name)), pattern


def test_the_records_are_of_the_cases_as_they_stand():
    stale = [name for name, case in CASES.items() if RECORDS.get(name, {}).get("case") != json.loads(json.dumps(case))]
    assert stale == []


def test_the_cases_have_every_preset_and_every_way_to_run_one():
    """Each word that a strategy or a policy can take is that of some case, and each field is changed by one."""
    cases = [case for case in CASES.values() if case["kind"] != "published"]
    assert set(models()) - {case["model"] for case in cases} == LATER
    training = [case for case in cases if case["kind"] == "train"]
    assert {case["workload"].get("remat", "block") for case in training} == {*remats()} - {"named"}
    for field, (default, words) in strategy_fields().items():
        used = {case["strategy"].get(field, default) for case in training}
        assert words <= used, field
        assert len(used) > 1, field
    chips = {case["hardware"].split("*")[-1].split(":")[0] for case in cases}
    assert chips >= {"v4", "v5e", "v5p", "v6e", "tpu7x", "a100-40gb", "a100-80gb", "h100", "b200", "gb200-nvl72", "cpu"}
    assert {case["serving"]["phase"] for case in cases if case["kind"] == "serve"} == {"decode", "prefill"}
    assert {case["cache"] for case in cases if case["kind"] == "serve"} == {"heads", "batch", "sequence"}


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        (("step seconds",), lambda value: value * 1.002),
        (("argument bytes",), lambda value: value + 1),
        (("memory", "peak"), lambda value: value - 1),
        (("useful collectives", 3, 4), lambda value: value + 1),
        (("executed collectives", 0, 3), lambda value: value + 1),
        (("predicted collectives", 0, 7), lambda value: value * 1.002 + 1e-9),
        (("bound",), lambda value: value + "s"),
        (("search", "best", 1, "mesh"), lambda value: value + " "),
    ],
    ids=lambda value: "/".join(map(str, value)) if isinstance(value, tuple) else "changed",
)
def test_a_small_change_of_any_quantity_is_seen(path, changed):
    was = RECORDS["8b fsdp+tp on v5p"]["record"]
    now = copy.deepcopy(was)
    *ahead, last = path
    part = now
    for key in ahead:
        part = part[key]
    part[last] = changed(part[last])
    assert list(differences("", was, copy.deepcopy(was))) == []
    seen = list(differences("", was, now))
    assert seen
    assert all(each.quantity.startswith(path[0]) for each in seen)


def test_records_are_the_same_bytes_each_time(tmp_path):
    write(tmp_path / "one", RECORDS)
    assert (tmp_path / "one").read_bytes() == PLANS.read_bytes()
