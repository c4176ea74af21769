"""`meshwright fix` on a script and on a function: the diff, what is written, the proof, and mistakes."""

import sys
from pathlib import Path

import jax
import pytest

from meshwright.cli.main import main

TRANSFORMER = Path(__file__).parents[1] / "proof" / "programs" / "foreign.py"

SCRIPT = """

STEP = jax.jit(train_step, donate_argnums=0)


def build():
    return STEP, (jax.eval_shape(lambda key: make_state(key, scanned=False), jax.random.key(0)), tokens())


if __name__ == "__main__":
    STEP(make_state(jax.random.key(0), scanned=False), tokens())
"""

HELPERS = """import jax
import jax.numpy as jnp


def product(x, w):
    return jnp.tanh(x @ w)


def step(params, x):
    def loss(params):
        h = x
        for name in params:
            h = product(h, params[name])
        return (product(h, params["a"]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda one, gradient: one - 0.1 * gradient, params, gradients), value


def build():
    params = {name: jax.ShapeDtypeStruct((512, 512), jnp.float32) for name in "abc"}
    return step, (params, jax.ShapeDtypeStruct((64, 512), jnp.float32))


def nameless():
    def loss(params, x):
        return (product(product(product(product(x, params["a"]), params["b"]), params["c"]), params["a"]) ** 2).mean()

    params = {name: jax.ShapeDtypeStruct((512, 512), jnp.float32) for name in "abc"}
    return lambda *given: jax.grad(loss)(*given), (params, jax.ShapeDtypeStruct((64, 512), jnp.float32))


def number():
    return 3


def constrained():
    def step(x):
        return jax.lax.with_sharding_constraint(x @ x.T, jax.sharding.PartitionSpec("data"))

    return step, (jax.ShapeDtypeStruct((64, 64), jnp.float32),)
"""

MISTAKES = [
    (["helpers.py:build"], ["needs hardware", "--on"]),
    (["helpers.py:build", "--on", "cpu:8", "--compiled", "x"], ["--compiled is 'x'"]),
    (["helpers.py:build", "--on", "cpu:8", "--mesh", "dp=3"], ["has 3 devices", "8"]),
    (["helpers.py:number", "--on", "cpu:8"], ["returns a step and the tuple of its arguments"]),
    (["helpers.py:none", "--on", "cpu:8"], ["none"]),
    (["none.py", "--on", "cpu:8"], ["there is no file none.py"]),
    (["wrong.py:build", "--on", "cpu:8"], ["wrong.py:1", "does not parse"]),
    (["none:build", "--on", "cpu:8"], ["cannot import 'none'"]),
    (["helpers.py:constrained", "--on", "cpu:8"], ["constraints without a mesh", "jax.set_mesh"]),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "train.py").write_text(TRANSFORMER.read_text() + SCRIPT)
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "wrong.py").write_text("def build(:\n")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield tmp_path


@pytest.mark.parametrize("subject", ["train.py:train_step", "train.py:build"])
def test_a_fix_is_printed_and_written_only_when_asked(subject, folder, capsys):
    words = ["fix", subject, "--on", "v5e:4x4", "--compiled", "0"]
    file = folder / "train.py"
    before = file.read_text()
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "· 1 constraint to add" in printed
    assert "mesh = jax.make_mesh((" in printed
    assert "proved: 65 of 65 matmuls as planned" in printed
    added = [line[1:] for line in printed.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added[0] == "from jax.sharding import PartitionSpec"
    assert added[1].startswith("    stream = jax.lax.with_sharding_constraint(stream, PartitionSpec(")
    assert len(added) == 2
    assert file.read_text() == before
    assert main([*words, "--write"]) == 0
    assert [line for line in file.read_text().splitlines() if line not in before.splitlines()] == added


def test_what_no_constraint_reaches_is_printed_with_its_line(folder, capsys):
    code = main(["fix", "helpers.py:nameless", "--on", "v5e:4x4", "--compiled", "0"])
    printed = capsys.readouterr().out
    assert code == 1
    assert "not proved: 6 of 11 matmuls as planned" in printed
    assert "helpers.py:6: tensor<64x512xf32>" in " ".join(printed.split())
    assert "only arrays that your files assign to a name can get a constraint" in printed


def test_one_constraint_in_a_loop_is_enough_for_two_axes(folder, capsys):
    assert main(["fix", "helpers.py:build", "--on", "v5e:4x4", "--compiled", "0"]) == 0
    printed = capsys.readouterr().out
    assert "proved: 11 of 11 matmuls as planned" in printed
    assert 'h = jax.lax.with_sharding_constraint(h, PartitionSpec("fsdp", PartitionSpec.UNCONSTRAINED))' in printed


def test_the_change_is_compiled_beside_the_plan(folder, capsys):
    assert main(["fix", "helpers.py:build", "--on", "v5e:4x4", "--mesh", "a=4,b=4", "--compiled", "1"]) == 0
    printed = capsys.readouterr().out
    table = [line.split() for line in printed.splitlines() if line.startswith(("unchanged", "changed", "planned"))]
    assert [row[0] for row in table] == ["unchanged", "changed", "planned"]
    assert all(row[-1] in ("kB", "MB") for row in table)
    assert "note: the unchanged program is faster" in printed


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=lambda value: " ".join(value))
def test_a_mistake_is_one_line(words, said, folder, capsys):
    assert main(["fix", *words]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert all(one in printed for one in said), printed
