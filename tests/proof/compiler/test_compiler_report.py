import random
import re

import pytest
import toy_programs as toys

from meshwright.description.hlo.records import read_hlo
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.proof.compiler.program import CompiledProgram, MeshMethod
from meshwright.proof.compiler.records import read_program
from meshwright.record import merge, record_from_json

MESH = MeshShape(fsdp=2, tp=4)
MEMORY = {"arguments": 100, "outputs": 60, "temporaries": 200, "alias": 60, "code": 0, "peak": 300}


@pytest.fixture(scope="module")
def hlo() -> str:
    return toys.train_step(toys.cpu_mesh(**MESH.degrees)).compile().as_text()


def program(hlo: str, **changes) -> CompiledProgram:
    fields = {"hlo": hlo, "memory_bytes": MEMORY, "messages": "", "compile_seconds": 1.0, "compiler": "jaxlib"}
    return CompiledProgram(**(fields | {"mesh_method": MeshMethod.MAKE_MESH} | changes))


def test_a_compiled_program_becomes_the_record_of_its_flops_memory_and_collectives(hlo):
    record = read_program(program(hlo), MESH, "cpu:8")
    assert (record.origin, record.hardware, record.mesh) == ("compiled", "cpu:8", MESH.layout)
    # 3 layers: 2 products forward, 4 backward, 1 again, shared by 8 devices.
    assert record.flops == 3 * 7 * 2 * toys.BATCH * toys.SEQ_LEN * toys.EMBED * toys.MLP / 8
    assert record.memory_bytes == MEMORY
    assert {c.kind for c in record.collectives} == {"all-gather", "all-reduce"}
    assert record.fits is None
    assert len(merge(record.collectives)) < len(record.collectives)


def test_the_record_goes_through_json(hlo):
    record = read_program(program(hlo), MESH, "cpu:8")
    assert record_from_json(record.to_json()) == record


@pytest.mark.parametrize(("peak", "fits"), [(16_000_000_000, True), (17_000_000_000, False)])
def test_a_program_fits_where_its_peak_is_within_what_a_chip_can_give(hlo, peak, fits):
    compiled = program(hlo, memory_bytes=MEMORY | {"peak": peak})
    assert read_program(compiled, MESH, "v5e:2x4").fits is fits  # 15.75 GiB


def test_a_mesh_that_splits_physical_axes_is_noted(hlo):
    compiled = program(hlo, mesh_method=MeshMethod.SPLIT_PHYSICAL_AXES)
    assert any("physical axes split" in note for note in read_program(compiled, MESH, "v6e:2x4").notes)


def test_each_slice_of_several_runs_a_program_of_its_own(hlo):
    record = read_program(program(hlo), MeshShape(dp=2, fsdp=2, tp=4), "2*v5e:2x4")
    assert record.mesh["dp"] == 2
    assert {axis for c in record.collectives for axis in c.axes} == {"fsdp", "tp"}


def test_a_program_for_another_number_of_devices_is_an_error(hlo):
    with pytest.raises(MeshwrightError, match=r"runs on 8 devices; mesh fsdp=4,tp=4 has 16"):
        read_hlo(hlo, {"fsdp": 4, "tp": 4}, hardware="cpu:16")


def test_a_module_that_contradicts_itself_is_an_error(hlo):
    with pytest.raises(MeshwrightError):
        read_hlo(hlo.replace("lhs_contracting_dims={1}", "lhs_contracting_dims={9}"), MESH.layout, hardware="cpu:8")
    with pytest.raises(MeshwrightError, match="contradicts itself"):
        read_hlo(hlo.replace("num_partitions=8", "num_partitions=x"), MESH.layout, hardware="cpu:8")


JUNK = ["{", "}", "(", ")", '"', "\\", "[", "]", ",", "=", "%", "\n", "ROOT ", "f32[", "tuple", "-done", "{...}"]
JUNK += [f"{opcode}(" for opcode in ("while", "dot", "fusion", "all-reduce", "get-tuple-element", "dynamic-slice")]
JUNK += ["9" * 30]


def mutated(text: str, dice: random.Random) -> str:
    """A text with one thing wrong: cut, with a hole, with junk, an opcode or a number exchanged, an attribute gone."""
    place = dice.randrange(len(text))
    match dice.randrange(6):
        case 0:
            return text[:place]
        case 1:
            return text[:place] + text[place + dice.randrange(300) :]
        case 2:
            return text[:place] + dice.choice(JUNK) + text[place + dice.choice((0, 1, 5)) :]
        case 3:
            one, other = dice.choices(list(re.finditer(r" ([a-z][\w-]*)\(", text)), k=2)
            return text[: one.start(1)] + other[1] + text[one.end(1) :]
        case 4:
            number = dice.choice(list(re.finditer(r"\d+", text)))
            return text[: number.start()] + str(dice.choice((0, 1, 7, 99999, 10**12))) + text[number.end() :]
        case _:
            attribute = dice.choice(list(re.finditer(r", [a-z_]+=[^,\s]+", text)))
            return text[: attribute.start()] + text[attribute.end() :]


@pytest.mark.parametrize("seed", range(8))
def test_a_corrupt_program_is_read_or_refused_never_worse(hlo, seed):
    dice = random.Random(seed)
    refusals = []
    for _ in range(40):
        try:
            read_hlo(mutated(hlo, dice), MESH.layout, hardware="cpu:8")
        except MeshwrightError as error:
            refusals.append(str(error))
    assert refusals
    assert not any("\n" in reason for reason in refusals)
