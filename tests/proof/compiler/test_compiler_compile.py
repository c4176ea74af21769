"""Programs compiled in a process of their own, each for hardware that is not there."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy_programs as toys

from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.canonical import canonicalize_collective
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.proof.compiler.compile import _key, cache_directory, compile_all, compile_in_child
from meshwright.proof.compiler.program import CompileRequest
from meshwright.proof.compiler.records import read_program
from meshwright.record import merge

MESH = MeshShape(fsdp=2, tp=4)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "meshwright" / "programs"


def request(
    function: str = "train_step", hardware: str = "cpu:8", mesh: MeshShape = MESH, **arguments
) -> CompileRequest:
    return CompileRequest(
        function=f"toy_programs:{function}",
        hardware=hardware,
        mesh=mesh.layout,
        arguments=arguments,
        effort="fast",
    )


def test_a_program_is_compiled_for_other_devices_than_this_process_has(cache):
    mesh = MeshShape(fsdp=4, tp=4)
    program = compile_in_child(request(hardware="cpu:16", mesh=mesh))
    assert program.hlo.startswith("HloModule jit_step")
    assert program.compiler.startswith("jaxlib")
    assert (program.mesh_method, program.cached) == ("jax.make_mesh", False)
    # The weights of 3 layers and a row of the input, in float32.
    weights = 4 * 3 * 2 * toys.EMBED * toys.MLP // 16
    assert program.memory_bytes["arguments"] == weights + 4 * toys.BATCH * toys.SEQ_LEN * toys.EMBED // 16
    assert program.memory_bytes["alias"] == weights
    memory = program.memory_bytes
    held = memory["arguments"] + memory["outputs"] - memory["alias"] + memory["temporaries"]
    assert memory["peak"] >= held
    # The tables of 16 devices are in the text, so that what is sliced by them is known.
    gradients = [c for c in read_program(program, mesh, "cpu:16").collectives if c.phase == "backward"]
    assert [canonicalize_collective(c, mesh.degrees)[0].kind for c in gradients if c.axes == ("fsdp",)] == [
        "reduce-scatter"
    ]


def test_the_same_program_comes_from_the_cache_and_another_does_not(cache):
    asked = request("matmuls", "cpu:1", MeshShape())
    first, again = compile_in_child(asked), compile_in_child(asked)
    assert (first.cached, again.cached) == (False, True)
    assert again.hlo == first.hlo
    assert again.compile_seconds == first.compile_seconds
    (file,) = cache.iterdir()
    assert _key(asked, parse_system("cpu:1")) in file.name
    others = [request(layers=1), request(layers=2), request(layers=1, mesh=MeshShape(fsdp=4, tp=2))]
    assert len({_key(each, parse_system("cpu:8")) for each in others}) == 3


def test_a_corrupt_cache_is_compiled_over(cache):
    first = compile_in_child(request("matmuls", "cpu:1", MeshShape()))
    (file,) = cache.iterdir()
    for junk in (b"junk", gzip.compress(b"{}"), file.read_bytes()[:50]):
        file.write_bytes(junk)
        again = compile_in_child(request("matmuls", "cpu:1", MeshShape()))
        assert (again.cached, again.hlo) == (False, first.hlo)


def test_a_cache_that_cannot_be_written_does_no_harm(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_in_child(request("matmuls", "cpu:1", MeshShape())).hlo
    assert cache_directory() == tmp_path / "file" / "meshwright" / "programs"


def test_flops_of_a_program_on_one_device_are_its_products():
    program = compile_in_child(request("matmuls", "cpu:1", MeshShape()))
    assert read_program(program, MeshShape(), "cpu:1").flops == 2 * 64 * 32 * 128 + 2 * 64 * 64 * 32


MISTAKES = [
    ("wrong", {}, r"toy_programs:wrong on cpu:8 does not compile: TypeError: .* \(.*toy_programs.py:\d+\)"),
    ("not_lowered", {}, r"returned OrderedDict; it must return jax.jit"),
    ("absent", {}, r"module toy_programs has no 'absent'"),
    ("train_step", {"depth": 1}, r"unexpected keyword argument 'depth'"),
    ("killed", {}, r"ended with signal 9"),
]


@pytest.mark.parametrize(("function", "arguments", "reason"), MISTAKES)
def test_a_mistake_in_the_child_comes_back_as_one_line_with_its_cause(function, arguments, reason):
    with pytest.raises(MeshwrightError, match=reason) as raised:
        compile_in_child(request(function, **arguments))
    assert "\n" not in str(raised.value)


def test_a_mesh_of_another_size_is_an_error():
    with pytest.raises(MeshwrightError, match=r"mesh .* has 4 devices; cpu:8 has 8"):
        compile_in_child(request(mesh=MeshShape(fsdp=4)))


def test_a_module_that_is_not_there_is_an_error():
    with pytest.raises(MeshwrightError, match="cannot import 'nowhere'"):
        compile_in_child(CompileRequest(function="nowhere:f", hardware="cpu:1", mesh={"dp": 1}, arguments={}))


def test_arguments_that_are_no_plain_data_are_an_error():
    with pytest.raises(MeshwrightError, match="plain data"):
        compile_in_child(request(layers=object()))


def test_an_interrupt_ends_the_child(tmp_path):
    """The child sleeps inside the user's function; the parent is interrupted as by Ctrl-C in another terminal."""
    (tmp_path / "sleeper.py").write_text(
        "import os, pathlib, time\n"
        "def sleep(mesh, *, file):\n"
        "    pathlib.Path(file).write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
    )
    started = tmp_path / "pid"
    code = (
        "import signal\n"
        "from meshwright.proof.compiler.compile import CompileRequest, compile_in_child\n"
        # A shell that runs the tests in the background may have it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "compile_in_child(CompileRequest(function='sleeper:sleep', hardware='cpu:1', mesh={'dp': 1},"
        f" arguments={{'file': {str(started)!r}}}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    child = int(started.read_text())
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def kinds(record, mesh):
    """The bytes by kind, axes and phase, as a plan names them; weights are gathered again in either backward phase."""
    plain = merge(one for found in record.collectives for one in canonicalize_collective(found, mesh.degrees))
    return {(c.kind, c.axes, c.phase): c.bytes for c in plain if c.phase != "update"}


@pytest.mark.slow
def test_a_program_compiles_for_a_tpu_slice_that_is_not_there():
    pytest.importorskip("libtpu")
    mesh = MeshShape(fsdp=4, tp=4)
    program = compile_in_child(request(hardware="v5e:4x4", mesh=mesh, dtype="bfloat16", scale=8))
    record = read_program(program, mesh, "v5e:4x4")
    embed, mlp = 8 * toys.EMBED, 8 * toys.MLP
    weights, activations = 3 * 2 * 2 * embed * mlp // 4, 3 * 2 * toys.BATCH // 4 * toys.SEQ_LEN * embed
    assert program.compiler.startswith("libtpu")
    assert record.fits is True
    assert record.flops == 3 * 7 * 2 * toys.BATCH * toys.SEQ_LEN * embed * mlp / 16
    assert kinds(record, mesh) == {
        ("all-gather", ("fsdp",), "forward"): weights,
        ("all-gather", ("fsdp",), "recompute"): weights,
        ("reduce-scatter", ("fsdp",), "backward"): weights,
        ("all-gather", ("tp",), "forward"): activations,
        ("all-gather", ("tp",), "recompute"): activations,
        ("all-gather", ("tp",), "backward"): activations,
        ("reduce-scatter", ("tp",), "forward"): activations,
        ("reduce-scatter", ("tp",), "backward"): activations,
    }


@pytest.mark.slow
def test_a_program_compiles_for_gpus_that_are_not_there():
    pytest.importorskip("jax_cuda13_plugin")
    mesh = MeshShape(fsdp=4, tp=2)
    program = compile_in_child(request(hardware="h100:8", mesh=mesh, dtype="bfloat16", scale=8))
    record = read_program(program, mesh, "h100:8")
    embed, mlp = 8 * toys.EMBED, 8 * toys.MLP
    weights, activations = 3 * 2 * 2 * embed * mlp // 2, 3 * 2 * toys.BATCH // 4 * toys.SEQ_LEN * embed
    assert program.compiler.startswith("jax-cuda13-plugin")
    assert record.flops == 3 * 7 * 2 * toys.BATCH * toys.SEQ_LEN * embed * mlp / 8
    assert kinds(record, mesh) == {
        ("all-gather", ("fsdp",), "forward"): weights,
        ("all-gather", ("fsdp",), "recompute"): weights,
        ("reduce-scatter", ("fsdp",), "backward"): weights,
        ("all-gather", ("tp",), "forward"): activations,
        ("all-gather", ("tp",), "recompute"): activations,
        ("all-gather", ("tp",), "backward"): activations,
        ("reduce-scatter", ("tp",), "forward"): activations,
        ("reduce-scatter", ("tp",), "backward"): activations,
    }


@pytest.mark.slow
def test_a_program_too_large_for_a_tpu_does_not_fit():
    pytest.importorskip("libtpu")
    with pytest.raises(MeshwrightError, match=r"too_large on v5e:1x1 does not fit: it needs .* of the 15.75G"):
        compile_in_child(request("too_large", "v5e:1x1", MeshShape()))


@pytest.mark.slow
def test_mesh_axes_that_no_whole_physical_axes_make_split_them():
    pytest.importorskip("libtpu")
    mesh = MeshShape(fsdp=8, tp=2)
    program = compile_in_child(request(hardware="v6e:4x4", mesh=mesh))
    assert program.mesh_method == "mesh_utils.create_device_mesh, physical axes split"


def test_a_request_is_plain_data():
    asked = request(layers=3)
    assert CompileRequest(**json.loads(json.dumps(asked.to_json()))) == asked


def test_several_programs_are_compiled_at_once_and_each_says_what_became_of_it(cache):
    kept = request("matmuls", "cpu:1", MeshShape())
    compile_in_child(kept)
    requests = [request("wrong"), kept, request("matmuls", "cpu:2", MeshShape(dp=2)), request(hardware="v9:8")]
    outcomes = dict(compile_all(requests))
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert "does not compile: TypeError" in str(outcomes[0])
    assert (outcomes[1].cached, outcomes[2].cached) == (True, False)
    assert "chip 'v9'" in str(outcomes[3])


class Pretended:
    """A child that is done when it has been asked for the third time, and notes how many there were at once."""

    alive = 0
    most = 0

    def __init__(self, *_: object) -> None:
        self.asked = 0
        Pretended.alive += 1
        Pretended.most = max(Pretended.most, Pretended.alive)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def is_done(self) -> bool:
        self.asked += 1
        return self.asked >= 3

    def program(self):
        Pretended.alive -= 1
        raise MeshwrightError("it only pretends")


@pytest.mark.parametrize(("free", "cores", "at_once"), [(64 << 30, 2, 2), (5 << 30, 8, 1), (0, 8, 1), (64 << 30, 8, 5)])
def test_as_many_compile_at_once_as_there_are_cores_and_memory_for(free, cores, at_once, monkeypatch):
    Pretended.alive = Pretended.most = 0
    monkeypatch.setattr("meshwright.proof.compiler.compile.CompileProcess", Pretended)
    monkeypatch.setattr("meshwright.proof.compiler.compile._free_bytes", lambda: free)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    outcomes = dict(compile_all([request("matmuls", "cpu:1", MeshShape(), number=n) for n in range(5)]))
    assert {str(outcome) for outcome in outcomes.values()} == {"it only pretends"}
    assert (len(outcomes), Pretended.most) == (5, at_once)
