"""What a traced function reads from memory between its matmuls is what the program compiled for a TPU reads."""

import jax
import jax.numpy as jnp
import pytest
from zoo import floats

import meshwright as mw
from meshwright.proof.programs.classes import classes_of
from meshwright.proof.programs.trace import trace
from meshwright.proof.programs.work import work_of


@jax.jit
def gradients_of_attention(query, key, value):
    def loss(query, key, value):
        scores = jnp.einsum("bqhk,bshk->bhqs", query, key) / 8
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        return (jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), value) ** 2).mean()

    return jax.grad(loss, (0, 1, 2))(query, key, value)


ARRAYS = (floats(2, 512, 4, 64),) * 3


def reads_of_scores(*, is_tpu: bool) -> int:
    """How often an array of scores is read, by matmuls and by other ops."""
    program = trace(gradients_of_attention, *ARRAYS)
    classes_of(program)
    work = work_of(program, is_tpu=is_tpu)
    sizes = {value: [program.dims.size(dim) for dim in value.dims] for value in work.passes}
    operands = (value for one in work.products.elements() for value in (one.left, one.right))
    found = sum(times for value, times in work.passes.items() if sizes[value] == [2, 4, 512, 512])
    return found + sum([program.dims.size(dim) for dim in value.dims] == [2, 4, 512, 512] for value in operands)


def test_a_tpu_reduces_scores_in_the_matmuls_that_make_them():
    """Of 8 reads one is the sum of exponentials: it needs their maximum first."""
    assert reads_of_scores(is_tpu=True) == 8
    assert reads_of_scores(is_tpu=False) > 8


@pytest.mark.matrix
def test_the_compiled_program_reads_scores_as_often():
    module = mw.inspect(gradients_of_attention, *ARRAYS, on="v5e:1x1", effort="default").module
    entry = module.computations[module.entry].instructions.values()
    operands = [str(operand.shape) for one in entry if one.opcode == "fusion" for operand in module.operands(one)]
    assert operands.count("f32[2,4,512,512]") == reads_of_scores(is_tpu=True)
