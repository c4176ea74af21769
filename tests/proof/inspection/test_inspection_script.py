"""Scripts as the subject of an inspection: real files, cut at a call of their step."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from child_flags import CHILD_FLAGS

import meshwright
from meshwright.errors import MeshwrightError
from meshwright.proof.inspection.run_script import run_script
from meshwright.proof.inspection.script import read_script

TRAIN = """import argparse

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--width", type=int, default=32)
options = parser.parse_args()

jax.distributed.initialize()
mesh = jax.make_mesh((2, len(jax.devices()) // 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


@jax.jit
def init(key):
    return {"w": jax.random.normal(key, (16, options.width))}


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


@jax.jit
def train_step(params, x):
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("dp")))
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


evaluate = jax.jit(loss)

if __name__ == "__main__":
    params = jax.device_put(init(jax.random.key(0)), NamedSharding(mesh, P(None, "tp")))
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("dp")))
    print("loss before", float(evaluate(params, x)))
    for step in range(options.steps):
        try:
            params, value = train_step(params, x)
        except Exception:
            continue
        with open("steps.txt", "a") as file:
            file.write(f"{step}\\n")
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def chosen(text, source):
    """The function's name, the arguments' shapes and the note of the call that is taken from a script."""
    Path(text.partition(":")[0].split()[0]).write_text("import jax\nimport jax.numpy as jnp\n" + source)
    script = read_script(text)
    assert script is not None
    taken = run_script(script, lambda call: [leaf.shape for leaf in call.args])
    return taken.name, taken.result, taken.note


def test_a_script_that_never_ends_is_cut_when_its_step_is_called_again(folder):
    found = meshwright.inspect("train.py")
    assert found.name == "train.py:train_step"
    assert found.record.mesh == {"dp": 2, "tp": 4}
    assert {(one.kind, one.axes) for one in found.collectives} >= {("all-reduce", ("dp",))}
    assert "train_step at its call 2 (most flops in matmuls" in found.record.notes[0]
    assert "others: init, loss; train.py:NAME" in found.record.notes[0]
    assert (folder / "steps.txt").read_text() == "0\n"


def test_a_function_is_named_as_it_is_or_by_its_variable_and_is_not_run(folder):
    for name in ("loss", "evaluate"):
        found = meshwright.inspect(f"train.py:{name} --width 64")
        assert found.name == "train.py:loss"
        assert found.module.num_devices == 8
    assert not (folder / "steps.txt").exists()


def test_the_arrays_of_a_script_are_taken_as_shapes_on_the_targets_mesh():
    found = meshwright.inspect("train.py:train_step", on="cpu:16", mesh="dp=4,tp=4")
    assert found.record.mesh == {"dp": 4, "tp": 4}
    assert found.module.num_devices == 16
    with pytest.raises(MeshwrightError, match="mesh dp=2,tp=4 has 8 devices; cpu:16 has 16"):
        meshwright.inspect("train.py:train_step", on="cpu:16")


def test_the_command_gives_a_script_as_many_devices_as_the_target_has(folder):
    words = [sys.executable, "-m", "meshwright", "inspect", "train.py", "--on", "cpu:4", "--json"]
    environment = os.environ | {"XLA_FLAGS": CHILD_FLAGS, "PYTHONPATH": str(Path(meshwright.__file__).parents[1])}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert '"name": "train.py:train_step"' in done.stdout.partition("\n")[2]
    assert '"tp": 2' in done.stdout
    assert "loss before" in done.stderr


def test_of_a_script_that_calls_everything_once_the_heaviest_is_taken():
    source = """
init = jax.jit(lambda: jnp.ones((8, 8)))
@jax.jit
def light(x):
    return x @ x
@jax.jit
def heavy(x):
    return jax.lax.scan(lambda c, _: (c @ c, None), x, length=3)[0]
light(heavy(init()))
"""
    name, shapes, note = chosen("once.py", source)
    assert (name, shapes) == ("heavy", [(8, 8)])
    assert "heavy at its call 1 (most flops in matmuls, 3.07 kflop on all devices)" in note


def test_without_matmuls_it_is_the_last_and_a_function_that_is_jitted_anew_is_one():
    assert (
        chosen("plain.py", "f = jax.jit(lambda x: x + 1)\ng = jax.jit(jnp.negative)\ng(f(jnp.ones(3)))")[0]
        == "negative"
    )
    again = "def step(x):\n    return x @ x\nx = jnp.ones((4, 4))\nwhile True:\n    x = jax.jit(step)(x)"
    assert chosen("again.py", again)[0] == "step"


def test_a_step_compiled_ahead_of_time_a_method_and_a_decorator_with_options_are_recorded():
    ahead = "f = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile()\nwhile True:\n    f(jnp.ones((4, 4)))"
    assert chosen("ahead.py", ahead)[1] == [(4, 4)]
    method = """
import functools
class Trainer:
    @functools.partial(jax.jit, static_argnums=0)
    def step(self, x):
        return x @ x
trainer = Trainer()
while True:
    trainer.step(jnp.ones((4, 4)))
"""
    Path("method.py").write_text("import jax\nimport jax.numpy as jnp\n" + method)
    assert meshwright.inspect("method.py").name == "method.py:step"


def test_a_step_that_fails_here_is_still_taken():
    """As a kernel for TPUs does on CPUs."""
    source = """
def fails(x):
    raise RuntimeError("no such hardware")
step = jax.jit(lambda x: jax.pure_callback(fails, x, x @ x))
step(jnp.ones((4, 4))).block_until_ready()
"""
    name, _, note = chosen("kernel.py", source)
    assert name == "<lambda>"
    assert "then the script failed here, which changes nothing in this report: " in note


def test_steps_of_flax_are_taken_with_the_arguments_of_their_user():
    nnx = pytest.importorskip("flax.nnx")
    del nnx
    source = """
from flax import nnx
mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
spread = jax.NamedSharding(mesh, jax.P("dp"))
model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
@nnx.jit
def step(model, x):
    x = jax.lax.with_sharding_constraint(x, spread)
    loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model), gradients))
    return loss
while True:
    step(model, jax.device_put(jnp.ones((8, 8)), spread))
"""
    Path("flax_step.py").write_text("import jax\nimport jax.numpy as jnp\n" + source)
    for on in (None, "cpu:8"):
        found = meshwright.inspect("flax_step.py", on=on)
        assert found.name == "flax_step.py:step"
        assert {one.axes for one in found.collectives} == {("dp",)}


BROKEN = [
    ("none.py", None, "there is no file none.py"),
    ("broken.py", "def f(:", r"broken.py:1 does not parse: "),
    (
        "fails.py",
        "1 / 0",
        r"fails.py failed here \(ZeroDivisionError: division by zero \(fails.py:1\)\), and called no",
    ),
    ("exits.py", "import sys; sys.exit(2)", r"exits.py failed here \(exit code 2\), and called no jitted function"),
    (
        "quiet.py",
        "import jax; f = jax.jit(lambda x: x)",
        "ran to its end, and called no jitted function; it jits <lambda>",
    ),
    ("train.py:train_stp --steps 1", TRAIN, "called no jitted function train_stp; did you mean train_step?"),
]


@pytest.mark.parametrize(("text", "source", "reason"), BROKEN)
def test_a_script_without_such_a_call_is_an_error(text, source, reason, folder):
    if source is not None:
        (folder / text.partition(":")[0]).write_text(source)
    with pytest.raises(MeshwrightError, match=reason):
        meshwright.inspect(text)


def test_a_script_leaves_the_process_as_it_was(folder):
    def state():
        return jax.jit, jax.distributed.initialize, jax.sharding.get_mesh(), sys.argv, sys.path, sys.modules["__main__"]

    (folder / "train.py").write_text(TRAIN.replace("@jax.jit", "jax.set_mesh(mesh)\n\n\n@jax.jit", 1))
    before = state()
    meshwright.inspect("train.py")
    assert state() == before


def test_a_file_has_functions_of_a_mesh_as_a_module_has(folder):
    source = """import jax
def build(mesh):
    return lambda w, x: x @ w, (jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32"))
"""
    (folder / "with-builder.py").write_text(source)
    found = meshwright.inspect("with-builder.py:build", mesh="dp=2")
    assert (found.name, found.record.mesh) == ("with-builder.py:build", {"dp": 2})
    assert [one.kind for one in found.findings] == ["repeated work"]
