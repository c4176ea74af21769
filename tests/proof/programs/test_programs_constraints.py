"""The fewest constraints in somebody's file: found, written as a diff, and proved on the changed file."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import foreign
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.cli.calls import take_call
from meshwright.errors import MeshwrightError
from meshwright.proof.compiler.load import load_function
from meshwright.proof.compiler.shardy import Matmul, matmul_shardings
from meshwright.proof.program_plans.constraints import count_equal, fewest_constraints, lower_call, use_mesh
from meshwright.proof.program_plans.edits import changed_files, constrained_text, diff, spec_text
from meshwright.proof.program_plans.plan import plan_program
from meshwright.proof.program_plans.sources import Assignment, Marks, read_source, sources

BUILD = """

def build():
    state = jax.eval_shape(lambda key: make_state(key, scanned={scanned}), jax.random.key(0))
    return jax.jit(train_step, donate_argnums=0), (state, tokens())
"""

FLAX = """import flax.linen as nn
import jax
import jax.numpy as jnp


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (96, 128):
            x = nn.Dense(width)(x)
            x = nn.relu(x)
        return nn.Dense(16)(x)


def step(params, x):
    def loss(params):
        return (Model().apply(params, x) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda one, gradient: one - 0.1 * gradient, params, gradients), value


def build():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return step, (jax.eval_shape(Model().init, jax.random.key(0), x), x)
"""


@pytest.fixture(autouse=True)
def _of_other_people():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def found(file, mesh, on="cpu:8", tp=()):
    """The fix of a file's function `build`, and the matmuls of the changed file.

    In its plan the batch and the state at rest are split over fsdp, and the classes in `tp` over tp.
    """
    marks = Marks()

    def take(call):
        plan = plan_program(call.function, *call.args, on=on, mesh=mesh, num_compiled=0, **call.kwargs)
        atoms = {one.name: one.atom for one in plan.classes}
        wanted = {"fsdp": {atoms["batch"]}, "tp": {atoms[name] for name in tp}}
        layouts = [(one, one.layout.axes) for one in plan.candidates if one.layout is not None]
        chosen = [
            one
            for one, axes in layouts
            if all(wanted[axis.name] <= {*axis.atoms} and axis.is_stored == (axis.name == "fsdp") for axis in axes)
            and all(axis.atoms[0] in wanted["fsdp"] for axis in axes if axis.name == "fsdp")
        ]
        return fewest_constraints(replace(plan, candidates=tuple(chosen[:1])), call, marks.assignments)

    fix = take_call(f"{file}:build", take, marks.marked)
    changed = changed_files(fix.constraints)
    with use_mesh(fix.plan):
        proof = take_call(
            f"{file}:build",
            lambda call: matmul_shardings(lower_call(fix.plan, call)),
            lambda one, text: changed.get(one, text),
        )
    return fix, changed, proof


def transformer(folder, *, scanned):
    file = folder / "transformer.py"
    file.write_text(Path(foreign.__file__).read_text() + BUILD.format(scanned=scanned))
    return file


def test_one_constraint_lays_a_whole_transformer_out(tmp_path):
    file = transformer(tmp_path, scanned=False)
    before = file.read_bytes()
    fix, changed, proof = found(file, "fsdp=8")
    assert fix.before < len(fix.planned) == len(proof)
    assert fix.is_proved(proof)
    assert [(at.name, spec) for at, spec in fix.constraints.items()] == [("stream", P("fsdp", None, None))]
    added = [line for line in diff(file, file.read_text(), changed[file]).splitlines() if line[:1] == "+"][1:]
    assert added == [
        "+from jax.sharding import PartitionSpec",
        '+    stream = jax.lax.with_sharding_constraint(stream, PartitionSpec("fsdp", None, None))',
    ]
    assert file.read_bytes() == before

    # The changed function, on devices, computes the same.
    (tmp_path / "changed.py").write_text(changed[file])
    state, data = foreign.make_state(jax.random.key(0), scanned=False), foreign.tokens()
    _, loss = jax.jit(foreign.train_step)(state, data)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        specs = [NamedSharding(mesh, one.spec) for one in fix.plan.abstract().in_shardings]
        args = jax.device_put((state, data), jax.tree.unflatten(jax.tree.structure((state, data)), specs))
        _, other = jax.jit(load_function(f"{tmp_path / 'changed.py'}:train_step"))(*args)
    assert jnp.allclose(loss, other, atol=1e-5)


def test_layers_in_a_scan_over_two_axes_of_hardware_that_is_not_there(tmp_path):
    file = transformer(tmp_path, scanned=True)
    fix, _, proof = found(file, "fsdp=4,tp=4", "v5e:4x4", ("up:2", "k:2"))
    assert fix.before < len(fix.planned)
    assert fix.is_proved(proof)
    assert len(fix.constraints) <= 2


def test_the_assignments_of_a_flax_model(tmp_path):
    (file := tmp_path / "model.py").write_text(FLAX)
    fix, _, proof = found(file, "fsdp=8")
    assert len(fix.planned) == 8
    assert fix.is_proved(proof)
    assert [one.result for one in proof] == [one.result for one in fix.after]


def test_an_installed_package_is_not_marked(tmp_path):
    (file := tmp_path / "model.py").write_text(FLAX)
    marks = Marks()
    take_call(f"{file}:build", lambda call: call, marks.marked)
    assert {at.file for at in marks.assignments} == {file}
    assert [(at.line, at.name) for at in marks.assignments] == [(10, "x"), (11, "x"), (24, "x")]


def test_only_a_statement_alone_on_its_lines_is_marked():
    body = ["if x: a = 1", "b = 2; c = 3", "d = (", "  4)  # four", "e, g = x", "h += 5"]
    text = "\n    ".join(["def f(x):", *body]) + "\nk = 6\n"
    marks = Marks()
    compile(marks.marked(Path("f.py"), text), "f.py", "exec")
    assert [(at.line, at.name) for at in marks.assignments] == [(5, "d"), (7, "h")]


IMPORTS = "import jax\nfrom jax.sharding import PartitionSpec\n"
TEXTS = [
    ('"""A file."""\n\n\ndef f(x):\n    y = x\n', IMPORTS, "PartitionSpec"),
    ("import jax\nimport os\n\ndef f(x):\n  y = x", IMPORTS, "PartitionSpec"),
    ("import jax\r\nfrom jax.sharding import PartitionSpec as P\r\n\r\ndef f(x):\r\n\ty = x\r\n", " as P\r\n", "P"),
]


@pytest.mark.parametrize(("text", "imports", "name"), TEXTS)
def test_a_changed_file_has_its_own_names_line_ends_and_indents(text, imports, name):
    line, indent = len(text.splitlines()), text.splitlines()[-1].partition("y")[0]
    changed = constrained_text(text, {Assignment(Path("f.py"), line, indent, "y"): P("dp", ("a", "b"), None)})
    compile(changed, "f.py", "exec")
    assert imports in changed
    assert changed.count("import jax\n") <= 1
    call = f'y = jax.lax.with_sharding_constraint(y, {name}("dp", ("a", "b"), None))'
    assert changed.splitlines()[-1] == f"{indent}{call}"
    assert all(end.endswith("\r\n") == ("\r\n" in text) for end in changed.splitlines(keepends=True))


def test_a_spec_is_written_as_source():
    spec = P("dp", ("a", "b"), None, P.UNCONSTRAINED)
    assert spec_text(spec, "P") == 'P("dp", ("a", "b"), None, P.UNCONSTRAINED)'
    assert eval(spec_text(spec), {"PartitionSpec": P}) == spec


def test_a_diff_is_one_that_patch_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (file := tmp_path / "f.py").write_text("import jax\nx = 1")  # without a last line end
    text = constrained_text("import jax\nx = 1", {Assignment(file, 2, "", "x"): P("dp")})
    subprocess.run(["patch", "-p1"], input=diff(file, read_source(file), text), text=True, check=True)
    assert file.read_text() == text


def test_other_sources_are_forgotten_afterwards(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "changing.py").write_text("value = 1\n")
    with sources(lambda file, text: "value = 2\n" if file.name == "changing.py" else text):
        import changing  # pyright: ignore[reportMissingImports]

        assert changing.value == 2
    assert "changing" not in sys.modules
    import changing  # pyright: ignore[reportMissingImports]

    assert changing.value == 1
    sys.modules.pop("changing")


def test_propagation_follows_calls_and_constraints():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))

    @jax.jit
    def product(x, w):
        return x @ w

    def function(x, w, v):
        with jax.named_scope("one"):
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("dp")))
        return product(product(x, w) @ v, w)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 4), (4, 6), (6, 4))]
    lowered = jax.jit(function).lower(*shapes)
    split = [one.result for one in matmul_shardings(lowered)]
    assert split == [f'tensor<16x{size}xf32> [{{"dp"}}, {{}}]' for size in (6, 4, 6)]
    assert {Path(one.line.partition(":")[0]).name for one in matmul_shardings(lowered)} == {Path(__file__).name}
    whole = [one.result for one in matmul_shardings(lowered, lambda scope: "one" not in scope)]
    assert whole == [f"tensor<16x{size}xf32> [{{}}, {{}}]" for size in (6, 4, 6)]


def test_programs_of_other_matmuls_are_not_compared():
    with pytest.raises(MeshwrightError, match="has 0 matmuls on the plan's mesh, and 1"):
        count_equal([Matmul("a", "")], [])
