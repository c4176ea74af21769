"""ResNets in plain JAX, planned as any program is."""

import json
import math

import jax
import pytest

import meshwright as mw
from meshwright.cli.main import main
from meshwright.description.families.load import RESNETS
from meshwright.examples.resnet import BLOCKS, make

PARAMETERS = {
    "resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032, "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}  # fmt: skip
"""As torchvision.models counts them."""


@pytest.mark.parametrize("name", RESNETS)
def test_parameters_are_counted_to_the_digit(name):
    _, (state, _, _) = make(name, 8)
    assert sum(math.prod(array.shape) for array in jax.tree.leaves(state["params"])) == PARAMETERS[name]
    assert tuple(BLOCKS) == RESNETS


def test_it_is_planned_as_any_program_is():
    """A convolution is three matmuls of as many flops, the stem's two; an image has 4.09 G multiply-adds (fewer without
    the zeros around it)."""
    step, arguments = make("resnet50", 256)
    plan = mw.plan(step, *arguments, on="a100-80gb:8", mesh="dp=8", num_compiled=0)
    flops = 32 * (3 * 8_178_368_512 - 2 * 118_013_952)
    assert plan.predicted.flops == pytest.approx(flops, rel=0.04)
    assert plan.predicted.flops < flops
    sums = {move.phase: move.bytes for move in plan.predicted.collectives if move.kind == "all-reduce"}
    # The gradients of kernels are summed in bfloat16, as convolutions return them.
    assert sums["backward"] == pytest.approx(2 * PARAMETERS["resnet50"], rel=0.01)


def test_the_command_plans_it_by_name(capsys):
    assert (
        main(["plan", "resnet18", "--on", "cpu:8", "--batch", "16", "--mesh", "dp=8", "--compiled", "0", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["predicted"]["mesh"] == {"dp": 8}


def test_a_step_runs_and_its_loss_is_that_of_a_guess():
    step, (state, images, labels) = make("resnet18", 2, "float32")
    state, images, labels = jax.tree.map(lambda one: jax.numpy.zeros(one.shape, one.dtype), (state, images, labels))
    _, loss = step(state, images, labels)
    assert float(loss) == pytest.approx(math.log(1000))
