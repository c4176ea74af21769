"""`%inspect` in a notebook, with a stand-in for its shell: IPython is not among the tests' dependencies."""

import jax
import jax.numpy as jnp
import pytest

import meshwright


class Shell:
    """What an extension uses of IPython's `InteractiveShell`."""

    def __init__(self, **names):
        self.user_ns = names
        self.magics = {}

    def register_magic_function(self, func, magic_kind="line", magic_name=None):
        self.magics[magic_kind, magic_name] = func


@pytest.fixture
def shell():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    w = jax.device_put(jnp.ones((16, 32)), jax.NamedSharding(mesh, jax.P(None, "tp")))
    x = jax.device_put(jnp.ones((8, 16)), jax.NamedSharding(mesh, jax.P("dp")))

    @jax.jit
    def step(w, x):
        jax.debug.callback(lambda: pytest.fail("it ran"))
        return (x @ w).sum()

    shell = Shell(step=step, w=w, x=x, batches=[x])
    meshwright.load_ipython_extension(shell)
    return shell


@pytest.mark.parametrize("line", ["step(w, x)", "loss = step(w, x=batches[0])", "step(*(w, x))"])
def test_a_line_inspects_a_call_instead_of_running_it(shell, line):
    found = shell.magics["line_cell", "inspect"](line)
    assert found.name == "step"
    assert found.record.mesh == {"dp": 2, "tp": 4}
    assert "<table" in found._repr_html_()
    assert "loss" not in shell.user_ns


def test_of_a_cell_the_last_line_is_inspected_and_the_others_are_run(shell):
    found = shell.magics["line_cell", "inspect"]("--on cpu:4 --mesh dp=2,tp=2", "y = x * 2.0\nloss = step(w, y)\n")
    assert found.record.mesh == {"dp": 2, "tp": 2}
    assert float(shell.user_ns["y"][0, 0]) == 2


@pytest.mark.parametrize(
    ("line", "cell", "reason"),
    [
        ("step", None, "nothing is called; write `%inspect step(state, batch)`"),
        ("", "x = 1", "nothing is called"),
        ("step(w,", None, "'step(w,' does not parse"),
        ("--off v5e step(w, x)", None, "has no option '--off'; it has --on, --mesh and --effort"),
        ("step", "step(w, x)", "has no option 'step'"),
        ("--on v9 step(w, x)", None, "v9"),
    ],
)
def test_a_mistake_is_one_line(shell, line, cell, reason, capsys):
    assert shell.magics["line_cell", "inspect"](line, cell) is None
    error = capsys.readouterr().err
    assert reason in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
