"""Exercises take right answers, and have a reply of their own to every known mistake; none prints the answer."""

import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax_versions import SPLITS_FOURIER_TRANSFORMS
from lessons.solutions import REPLICATED, RIGHT, WRONG_PROGRAMS

from meshwright.errors import MeshwrightError
from meshwright.learn import check, hint
from meshwright.lessons.exercise import TOLERANCE, VERDICTS, Choice, Number, Several
from meshwright.lessons.exercises.catalog import EXERCISES, find_exercise
from meshwright.lessons.lesson import lessons
from meshwright.lessons.program import Program
from meshwright.proof.inspection.functions import inspect

NUMBERS = {name: one for name, one in EXERCISES.items() if isinstance(one, Number)}
CHOICES = {name: one for name, one in EXERCISES.items() if isinstance(one, Choice)}
SEVERAL = {name: one for name, one in EXERCISES.items() if isinstance(one, Several)}
PROGRAMS = {name: one for name, one in EXERCISES.items() if isinstance(one, Program)}


def test_every_exercise_is_in_a_lesson_and_has_a_solution():
    assert sorted(name for lesson in lessons() for name in lesson.exercises) == sorted(EXERCISES)
    assert {*RIGHT} == {*EXERCISES}
    assert {*PROGRAMS} - {*REPLICATED} == {"moments-with-one-sum"}  # Its result is whole, and it has no matmul.


@pytest.mark.parametrize("name", EXERCISES)
def test_a_right_answer_is_right(name):
    verdict = EXERCISES[name].grade(name, RIGHT[name])
    assert verdict.is_right, verdict.text


@pytest.mark.parametrize("name", EXERCISES)
@pytest.mark.parametrize("answer", [None, ..., ""])
def test_a_blank_is_asked_again(name, answer):
    verdict = EXERCISES[name].grade(name, answer)
    assert verdict.is_blank
    assert not verdict.is_right
    assert EXERCISES[name].question in verdict.text


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_function_that_returns_nothing_is_a_blank(name):
    assert EXERCISES[name].grade(name, lambda *arrays: None).is_blank


@pytest.mark.parametrize("name", NUMBERS)
def test_each_mistake_in_a_number_has_its_reply(name):
    exercise = NUMBERS[name]
    assert exercise.mistakes
    for mistake in exercise.mistakes:
        verdict = exercise.grade(name, mistake.value())
        assert not verdict.is_right
        assert mistake.reply in verdict.text
    assert not exercise.grade(name, 1.37 * exercise.answer() + 1).is_right


@pytest.mark.parametrize("name", NUMBERS)
def test_mistakes_are_no_rounding_of_the_answer_or_of_each_other(name):
    values = sorted([NUMBERS[name].answer(), *(mistake.value() for mistake in NUMBERS[name].mistakes)])
    assert all(after > before * (1 + 2 * TOLERANCE) for before, after in pairwise(values))


@pytest.mark.parametrize("name", CHOICES)
def test_each_wrong_choice_has_its_reply(name):
    exercise = CHOICES[name]
    assert {*exercise.replies} == {*exercise.options} - {exercise.answer}
    for letter, reply in exercise.replies.items():
        verdict = exercise.grade(name, f" {letter.upper()}")
        assert not verdict.is_right
        assert reply in verdict.text
    with pytest.raises(MeshwrightError, match="takes a letter"):
        exercise.grade(name, "z")


@pytest.mark.parametrize("name", SEVERAL)
def test_each_mistake_in_several_answers_has_its_reply(name):
    exercise = SEVERAL[name]
    for mistake in exercise.mistakes:
        verdict = exercise.grade(name, mistake.value())
        assert not verdict.is_right
        assert mistake.reply in verdict.text
    with pytest.raises(MeshwrightError, match="takes a mapping"):
        exercise.grade(name, {"another": 1})
    with pytest.raises(MeshwrightError, match="is one of"):
        exercise.grade(name, dict.fromkeys(exercise.answer(), "elephant"))
    assert exercise.grade(name, dict.fromkeys(exercise.answer(), ...)).is_blank


@pytest.mark.parametrize("name", REPLICATED)
def test_a_right_but_replicated_function_is_refused(name):
    verdict = PROGRAMS[name].grade(name, REPLICATED[name])
    assert not verdict.is_right
    assert "Right, but replicated" in verdict.text, verdict.text


@pytest.mark.parametrize(("name", "function", "said"), WRONG_PROGRAMS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_function_is_told_what_differs(name, function, said):
    if name == "fft-of-rows" and SPLITS_FOURIER_TRANSFORMS:
        pytest.skip("this compiler splits the transforms of whole rows by itself")
    verdict = PROGRAMS[name].grade(name, function)
    assert not verdict.is_right
    assert said in verdict.text, verdict.text


def test_transposes_are_those_that_are_compiled():
    calls = {
        "all_gather": lambda a: lax.all_gather(a, "X", axis=0, tiled=True) ** 2,
        "psum_scatter": lambda a: lax.psum_scatter(a, "X", scatter_dimension=0, tiled=True),
        "all_to_all": lambda a: lax.all_to_all(a, "X", 0, 1, tiled=True),
        "ppermute": lambda a: lax.ppermute(a, "X", [(i, (i + 1) % 8) for i in range(8)]),
    }
    mesh = jax.make_mesh((8,), ("X",), (jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        array = jax.device_put(jnp.ones((64, 64)), P("X", None))
        for name, call in calls.items():

            def gradient(array, call=call):
                mapped = jax.shard_map(call, in_specs=P("X", None), out_specs=P("X", None))
                result, transpose = jax.vjp(mapped, array)
                return transpose(result)

            found = inspect(jax.jit(gradient), array).collectives
            assert RIGHT["transposes"][name] in {move.kind for move in found if move.phase == "backward"}, name


@pytest.mark.parametrize("name", NUMBERS)
def test_replies_and_hints_do_not_print_the_answer(name):
    exercise = NUMBERS[name]
    for text in (exercise.question, *exercise.hints, *(mistake.reply for mistake in exercise.mistakes)):
        numbers = [float(word.replace(",", "")) for word in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.])", text)]
        assert all(abs(number - exercise.answer()) > TOLERANCE * exercise.answer() for number in numbers), text


def test_too_few_devices_are_an_error_that_says_how_to_get_them(monkeypatch):
    two = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: two)
    with pytest.raises(MeshwrightError, match=r'begin with jax.config.update\("jax_num_cpu_devices", 8\)'):
        PROGRAMS["fsdp-layer"].grade("fsdp-layer", RIGHT["fsdp-layer"])


def test_a_mesh_of_the_reader_is_in_nobodys_way():
    with jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"))):
        assert PROGRAMS["one-reduce-scatter"].grade("x", RIGHT["one-reduce-scatter"]).is_right


def test_check_prints_and_keeps_the_verdict(capsys):
    check("bytes-of-a-sum", "201 MB")
    assert VERDICTS[-1].is_right
    assert capsys.readouterr().out.startswith("bytes-of-a-sum: right.")


def test_hints_are_numbered(capsys):
    for number in (1, 2, 3):
        hint("four-cases", number)
        assert f"hint {number} of 3" in capsys.readouterr().out
    with pytest.raises(MeshwrightError, match="hints 1, 2 and 3, not 4"):
        hint("four-cases", 4)


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("four-case", 1, "did you mean four-cases"),
        ("bytes-of-a-sum", "many", "not a number of bytes"),
        ("bytes-of-a-sum", [1], 'as 64e6 or "64 MB"'),
        ("one-reduce-scatter", 3, "takes a function"),
    ],
)
def test_another_kind_of_answer_is_an_error(name, answer, said):
    with pytest.raises(MeshwrightError, match=re.escape(said)):
        find_exercise(name).grade(name, answer)
