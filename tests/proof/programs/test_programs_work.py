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


def passes(function, *args, is_tpu=False) -> dict[tuple[int, ...], int]:
    """How often arrays of each shape are read or written between matmuls."""
    program = trace(jax.jit(function), *args)
    classes_of(program)
    found: dict[tuple[int, ...], int] = {}
    for value, times in work_of(program, is_tpu=is_tpu).passes.items():
        shape = tuple(program.dims.size(dim) for dim in value.dims)
        found[shape] = found.get(shape, 0) + times
    return found


def test_barriers_and_constraints_move_nothing():
    def plain(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    def told(x, w):
        x, w = jax.lax.optimization_barrier((x, w))
        w = jax.lax.with_sharding_constraint(w, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        return plain(x, w)

    arrays = floats(256, 128), floats(4, 128, 128)
    for is_tpu in (True, False):
        assert passes(told, *arrays, is_tpu=is_tpu) == passes(plain, *arrays, is_tpu=is_tpu)


def test_what_several_ops_read_is_written_once_where_that_moves_fewer_bytes():
    """A sum of four arrays is read by three reductions that cannot run together: 4 reads, 1 write and 3 reads."""

    def norms(a, b, c, d):
        x = a + b + c + d
        centred = x - x.mean(0, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(0, keepdims=True)) + x.max(1, keepdims=True)

    arrays = (floats(512, 512),) * 4
    assert passes(norms, *arrays, is_tpu=True)[(512, 512)] == 3 * 4 + 1
    assert passes(norms, *arrays)[(512, 512)] == 4 + 1 + 3 + 1
