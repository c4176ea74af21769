"""Text that is broken in any way: a record or one clear error, never another exception and never a hang."""

import random
import re

import pytest
import toy_programs as toys

from meshwright.description.hlo.records import read_hlo
from meshwright.errors import MeshwrightError
from meshwright.record import Record

MESH = {"fsdp": 2, "tp": 4}
TRIES = 60
NUMBERS = ("0", "-1", "7", "99999999", "123456789012345678", "999999999999999999999999")
NUMBER = re.compile(r"\d+")


pytestmark = pytest.mark.usefixtures("no_hang")


@pytest.fixture(scope="module")
def text() -> str:
    """A train step with loops, fusions, collectives and constants."""
    return toys.train_step(toys.cpu_mesh(**MESH)).compile().as_text()


def outcome(text: str, mesh=MESH) -> str:
    """What reading a text ends with; whatever is neither a record nor an error for users fails the test."""
    try:
        result = read_hlo(text, mesh, hardware="cpu:8")
        assert isinstance(result, Record)
        said = ""
    except MeshwrightError as error:
        said = str(error)
        assert said
        assert "\n" not in said
        assert len(said) < 400
    return said


def cut(text: str, draw: random.Random) -> str:
    return text[: draw.randrange(len(text))]


def flip(text: str, draw: random.Random) -> str:
    letters = list(text)
    for _ in range(draw.randint(1, 20)):
        letters[draw.randrange(len(letters))] = chr(draw.choice((draw.randrange(32, 127), 0, 10, 0x2028, 0x1F600)))
    return "".join(letters)


def change_numbers(text: str, draw: random.Random) -> str:
    places = list(NUMBER.finditer(text))
    for place in sorted(draw.sample(places, 3), key=lambda found: -found.start()):
        text = text[: place.start()] + draw.choice(NUMBERS) + text[place.end() :]
    return text


def shuffle_lines(text: str, draw: random.Random) -> str:
    lines = text.split("\n")
    for _ in range(draw.randint(1, 3)):
        one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
        kind = draw.randrange(3)
        if kind == 0:
            lines[one], lines[other] = lines[other], lines[one]
        elif kind == 1:
            lines.insert(other, lines[one])
        else:
            del lines[one]
    return "\n".join(lines)


def rename(text: str, draw: random.Random) -> str:
    """Operands, computations and attributes that name others: cycles, wrong shapes, wrong roles."""
    names = list(re.finditer(r"%[\w.\-]+", text))
    for place in sorted(draw.sample(names, 3), key=lambda found: -found.start()):
        text = text[: place.start()] + draw.choice(names)[0] + text[place.end() :]
    return text


def exchange_words(text: str, draw: random.Random) -> str:
    """Opcodes, keys and dtypes that stand for others."""
    words = list(re.finditer(r"[a-z][a-z\-_]+", text[len(text) // 3 :]))
    for place in sorted(draw.sample(words, 2), key=lambda found: -found.start()):
        start, end = (len(text) // 3 + position for position in place.span())
        text = text[:start] + draw.choice(words)[0] + text[end:]
    return text


@pytest.mark.parametrize("mutate", [cut, flip, change_numbers, shuffle_lines, rename, exchange_words])
def test_a_program_broken_at_random_is_a_record_or_one_clear_error(mutate, text):
    draw = random.Random(mutate.__name__)
    said = [outcome(mutate(text, draw)) for _ in range(TRIES)]
    assert any(said)


def entry(*lines: str) -> str:
    """A computation of no arguments that a module begins with."""
    return "\n".join(["ENTRY %e () -> f32[] {", *(f"  {line}" for line in lines), "}\n"])


def nested_tuple(depth: int) -> str:
    return "HloModule m\n\n" + entry(f"ROOT %p = {'(' * depth}f32[]{')' * depth} parameter(0)")


def nested_braces(depth: int) -> str:
    return f"HloModule m, a={'{' * depth}{'}' * depth}\n\n" + entry("ROOT %p = f32[] parameter(0)")


def chain_of_calls(length: int) -> str:
    """Each computation calls the one above it twice: 2 ** length runs of the first."""
    first = "ROOT %b = f32[2,2] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    twice = "%a = f32[2,2] call(%p), to_apply=%c{0}\n  ROOT %b = f32[2,2] call(%a), to_apply=%c{0}"
    bodies = [first, *(twice.format(i) for i in range(length - 1))]
    argument = "%p = f32[2,2] parameter(0)"
    computations = [f"%c{i} (p: f32[2,2]) -> f32[2,2] {{\n  {argument}\n  {b}\n}}\n" for i, b in enumerate(bodies)]
    last = entry(argument, f"ROOT %r = f32[2,2] call(%p), to_apply=%c{length - 1}")
    return "\n".join(["HloModule m\n", *computations, last])


def chain_of_sums(length: int) -> str:
    """Each line adds the one above it to itself, to be traced back from a loop's limit."""
    lines = ["  %x0 = s32[] constant(1)"] + [f"  %x{i} = s32[] add(%x{i - 1}, %x{i - 1})" for i in range(1, length)]
    body = "\n".join(lines)
    return (
        "HloModule m\n\n%body (p: (s32[])) -> (s32[]) {\n  %p = (s32[]) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%p), index=0\n  %one = s32[] constant(1)\n  %n = s32[] add(%i, %one)\n"
        "  ROOT %t = (s32[]) tuple(%n)\n}\n\n%cond (p: (s32[])) -> pred[] {\n  %p = (s32[]) parameter(0)\n"
        f"  %i = s32[] get-tuple-element(%p), index=0\n{body}\n"
        f"  ROOT %c = pred[] compare(%i, %x{length - 1}), direction=LT\n}}\n\n"
        "ENTRY %e () -> (s32[]) {\n  %zero = s32[] constant(0)\n  %s = (s32[]) tuple(%zero)\n"
        "  ROOT %w = (s32[]) while(%s), condition=%cond, body=%body\n}\n"
    )


def calls_itself(_: int) -> str:
    return "HloModule m\n\n" + entry("%p = f32[] parameter(0)", "ROOT %c = f32[] call(%p), to_apply=%e")


def takes_itself(_: int) -> str:
    return "HloModule m\n\n" + entry("ROOT %a = f32[] add(%a, %a)")


HOSTILE = [
    (nested_tuple, 200_000, ""),
    (nested_braces, 200_000, ""),
    (chain_of_calls, 900, ""),
    (chain_of_calls, 2_000, "too large"),
    (chain_of_sums, 20_000, ""),
    (calls_itself, 0, "is not printed above it"),
    (takes_itself, 0, "which no line above it makes"),
]


@pytest.mark.parametrize(("make", "size", "reason"), HOSTILE, ids=lambda v: getattr(v, "__name__", ""))
def test_a_hostile_program_takes_a_moment(make, size, reason):
    assert reason in outcome(make(size), {"dp": 1})


def test_a_huge_trip_count_is_multiplied_not_walked(text):
    (trips,) = set(re.findall(r'"known_trip_count":\{"n":"(\d+)"', text))
    huge = 10**17
    once, often = (
        read_hlo(text.replace(f'"n":"{trips}"', f'"n":"{count}"'), MESH, hardware="cpu:8").flops for count in (1, huge)
    )
    assert often == huge * once


def test_a_program_for_more_devices_than_there_are_is_an_error(text):
    many = text.replace("num_partitions=8", f"num_partitions={10**17}")
    assert "runs on" in outcome(many)
    assert "larger than any system" in outcome(many, {"fsdp": 10**17})


@pytest.mark.slow
def test_a_program_of_twenty_megabytes_is_read(text):
    """The loop bodies of the step many times over, as a model whose layers are not scanned has them."""
    large = toys.unrolled(text, 20_000_000)
    record = read_hlo(large, MESH, hardware="cpu:8")
    assert record.flops == read_hlo(text, MESH, hardware="cpu:8").flops
