"""Any function can be inspected: jitted or not, with closures, on devices that are here and on those that are not."""

from pathlib import Path

import jax
import jax.numpy as jnp
import planted
import pytest
from flax import nnx
from jax import P
from jax.sharding import AbstractMesh, AxisType

import meshwright
from meshwright.errors import MeshwrightError
from meshwright.proof.inspection.dumps import inspect_text

AUTO = (AxisType.Auto,) * 2


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def mesh_of(**degrees):
    return jax.make_mesh(tuple(degrees.values()), tuple(degrees), axis_types=(AxisType.Auto,) * len(degrees))


def summary(inspection):
    """What does not depend on how loops are emitted, which the flags of tests change in this process alone."""
    moves = [(c.kind, c.axes, c.phase, c.bytes, c.count) for c in inspection.collectives]
    memory = {name: size for name, size in inspection.memory.items() if name not in ("temporaries", "peak")}
    return sorted(moves), inspection.flops, memory, [found.kind for found in inspection.findings]


def test_a_function_is_the_same_program_here_and_in_the_process_that_compiles():
    mesh = mesh_of(dp=2, tp=4)
    function, args = planted.transformer(mesh, applied=False)
    here, there = (meshwright.inspect(function, *args, on=on) for on in (None, "cpu:8"))
    assert summary(here) == summary(there)
    assert here.record.mesh == there.record.mesh == {"dp": 2, "tp": 4}
    assert there.program.memory_bytes["alias"] > 0  # donation went along
    assert not there.program.cached
    assert meshwright.inspect(function, *args, on="cpu:8").program.cached


def test_every_mesh_of_a_function_stands_for_that_of_the_target():
    here = mesh_of(dp=2, tp=4)  # of 8 devices, in the closure and in the arguments
    function, args = planted.wasted_constraint(here, used=True)
    found = meshwright.inspect(function, *args, mesh={"dp": 4, "tp": 4}, on="cpu:16")
    assert found.record.mesh == {"dp": 4, "tp": 4}
    assert found.flops == 2 * 2 * 32 * 64 * 128 / 16
    assert [(c.kind, c.axes) for c in found.collectives] == [("all-reduce", ("tp",))]
    assert found.findings == ()


def test_a_constraint_thrown_away_is_also_told_by_the_other_process():
    function, args = planted.wasted_constraint(mesh_of(dp=2, tp=4), used=False)
    (found,) = meshwright.inspect(function, *args, on="cpu:8").findings
    assert found.kind == "constraint without effect"
    assert "planted.py:" in found.source


def test_an_abstract_mesh_needs_no_devices():
    mesh = AbstractMesh((4, 8), ("dp", "tp"), axis_types=AUTO)
    function, args = planted.transformer(mesh, applied=True)
    assert meshwright.inspect(function, *args, on="cpu:32").record.mesh == {"dp": 4, "tp": 8}


def test_explicit_axes_stay_explicit():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"))

    def function(x, w):
        assert jax.typeof(w).sharding.spec == P(None, "tp")
        return x @ w

    args = planted.array(mesh, (32, 64), "dp"), planted.array(mesh, (64, 64), None, "tp")
    for on in (None, "cpu:8"):
        assert meshwright.inspect(function, *args, on=on).findings == ()


def test_arrays_are_read_for_their_shapes_and_shardings():
    mesh = mesh_of(dp=8)
    x = jax.device_put(jnp.ones((16, 8)), jax.NamedSharding(mesh, P("dp")))
    found = meshwright.inspect(lambda x, w: x @ w, x, jnp.ones((8, 8)), on="cpu:8")
    assert found.flops == 2 * 2 * 8 * 8
    assert found.memory["arguments"] == 4 * (2 * 8 + 8 * 8)


def test_a_function_for_one_device_needs_no_mesh():
    for on in (None, "cpu:1"):
        found = meshwright.inspect(lambda x: x @ x, jnp.ones((8, 8)), on=on)
        assert (found.flops, found.collectives, found.findings) == (1024, (), ())


def test_flops_stand_under_their_scopes():
    function, args = planted.transformer(mesh_of(dp=2, tp=4), applied=True)
    scopes = meshwright.inspect(function, *args).flops_by_scope
    assert set(scopes) == {"mlp", "attention", ""}
    assert scopes["mlp"] == 3 * 2 * 2 * 8 * 16 * 64 * 128 / 8


def test_an_hlo_text_says_all_but_memory():
    mesh = mesh_of(dp=2, tp=4)
    function, args = planted.transformer(mesh, applied=False)
    whole = meshwright.inspect(function, *args)
    text = inspect_text(whole.program.hlo, mesh={"dp": 2, "tp": 4}, on="cpu:8", name="dump")
    assert text.findings == whole.findings
    assert text.collectives == whole.collectives
    assert text.memory == {}
    timeless = inspect_text(whole.program.hlo, mesh={"dp": 2, "tp": 4})
    assert [found.cost_seconds for found in timeless.findings] == [None]
    assert {move.seconds for move in timeless.collectives} == {None}


def test_an_inspection_is_plain_data():
    function, args = planted.transformer(mesh_of(dp=2, tp=4), applied=False)
    data = meshwright.inspect(function, *args).to_json()
    assert set(data) == {"name", "record", "flops_by_scope", "findings", "ignored", "in_baseline"}
    named = {"id", "kind", "bytes", "cost_seconds", "source", "elsewhere", "link", "evidence", "fix"}
    assert set(data["findings"][0]) == named | {
        "axis",
        "degree",
        "flops",
        "total_flops",
        "wasted_flops",
    }


def test_a_layer_of_a_library_is_told_by_the_line_that_calls_it():
    mesh = mesh_of(tp=8)
    graph, state = nnx.split(nnx.eval_shape(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0))))

    def forward(state, x):
        return nnx.merge(graph, state)(x)

    (found,) = meshwright.inspect(forward, state, jnp.ones((32, 64)), mesh=mesh).findings
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "merge(graph" in text)
    assert found.source.startswith(f"{__file__}:{line} ")


def in_shardings_alone():
    sharding = jax.NamedSharding(mesh_of(dp=8), P("dp"))
    return jax.jit(jnp.sin, in_shardings=sharding), jax.ShapeDtypeStruct((8, 8), jnp.float32)


def test_a_mesh_that_is_set_or_given_is_the_one_of_a_function_without_any_in_its_arguments():
    function, x = in_shardings_alone()
    assert meshwright.inspect(function, x).record.mesh == {"dp": 8}  # as the lowered module names it
    assert meshwright.inspect(function, x, mesh=mesh_of(dp=8)).record.mesh == {"dp": 8}
    with jax.set_mesh(mesh_of(dp=8)):
        assert meshwright.inspect(function, x).record.mesh == {"dp": 8}


MISTAKES = [
    (lambda: meshwright.inspect(jnp.sin, jnp.ones(8), mesh={"dp": 16}), r"16 devices and 8 are here; on='cpu:16'"),
    (lambda: meshwright.inspect(jnp.sin, jnp.ones(8), mesh={"dp": 4}, on="cpu:8"), r"dp=4 has 4 devices; cpu:8 has 8"),
    (
        lambda: meshwright.inspect(jnp.sin, planted.array(mesh_of(dp=8), (8,), "dp"), mesh={"data": 8}, on="cpu:8"),
        r"a mesh of axes dp; it is to be compiled for axes data",
    ),
]


@pytest.mark.parametrize(("call", "reason"), MISTAKES)
def test_a_mistake_is_one_line_that_says_what_would_be_right(call, reason):
    with pytest.raises(MeshwrightError, match=reason) as raised:
        call()
    assert "\n" not in str(raised.value)
