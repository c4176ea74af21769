"""Claims of other pages that docs/learn.md calls wrong, shown to be wrong: a function for each row of its table."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.description.step.parameter_tree import num_parameters

ROOT = Path(__file__).parents[2]


def there_is_no_asynchronous_gather():
    assert not hasattr(jax.lax, "all_gather_async")


def a_mesh_of_two_axes_wants_an_array_of_two_dims():
    with pytest.raises(ValueError, match="ndim"):
        Mesh(jax.devices(), ("x", "y"))


def operands(kind):
    mesh = jax.make_mesh((8,), ("X",), (kind,))
    specs = {(16, 32): P(None, "X"), (32, 8): P("X", None)}
    return mesh, [jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec)) for shape, spec in specs.items()]


def an_ambiguous_contraction_is_an_error():
    mesh, (a, b) = operands(AxisType.Explicit)
    assert jax.make_mesh((8,), ("X",)).axis_types == mesh.axis_types
    with jax.set_mesh(mesh), pytest.raises(Exception, match="ambiguous"):
        jnp.matmul(a, b)


def device_put_in_jit_does_not_bind():
    mesh, (a, _) = operands(AxisType.Auto)
    rows = NamedSharding(mesh, P("X", None))
    put = jax.jit(lambda a: jax.device_put(a * 2, rows))(a)
    bound = jax.jit(lambda a: jax.lax.with_sharding_constraint(a * 2, rows))(a)
    assert not put.sharding.is_equivalent_to(rows, 2)
    assert bound.sharding.is_equivalent_to(rows, 2)


def adam_keeps_8_bytes_a_parameter():
    plan = mw.plan("gpt2-xl", on="v5p:1", batch=1, seq_len=128, mesh="dp=1")
    each = plan.predicted.memory_bytes["optimizer"] / num_parameters(plan.workload.model)
    assert each == pytest.approx(8, rel=0.05)


def gpt2_xl_is_3_gb_in_16_bits():
    count = num_parameters(mw.plan("gpt2-xl", on="v5p:1", batch=1, seq_len=128, mesh="dp=1").workload.model)
    assert (round(count * 2 / 1e9, 1), round(count * 4 / 1e9, 1)) == (3.1, 6.2)


def a_reduce_scatter_sends_all_but_a_share():
    move = mw.collective("reduce-scatter", X=4, on="v5e:2x2", bytes="64M")
    assert move.wire_bytes == move.bytes * 3 / 4


def a_smaller_fsdp_can_be_faster():
    step = {"on": "v4:64", "batch": 128, "seq_len": 2048}
    best, largest = mw.plan("llama3-8b", **step), mw.plan("llama3-8b", **step, mesh="fsdp=64")
    assert best.mesh.fsdp < 64
    assert best.predicted.step_seconds < largest.predicted.step_seconds
    alike = [
        mw.plan("llama3-8b", **step, mesh=str(mesh), zero_stage=3, remat="block").predicted.memory_bytes["peak"]
        for mesh in (largest.mesh, best.mesh)
    ]
    assert alike[0] < alike[1]


def layers_on_devices_are_a_pipeline():
    stages = mw.plan("llama3-8b", on="v5p:4", batch=16, seq_len=512, mesh="pp=4").predicted
    matrices = mw.plan("llama3-8b", on="v5p:4", batch=16, seq_len=512, mesh="tp=4").predicted
    forward = [{one.kind for one in each.collectives if one.phase == "forward"} for each in (stages, matrices)]
    assert "collective-permute" in forward[0]
    assert not forward[0] & {"all-gather", "reduce-scatter"}
    assert forward[1] & {"all-gather", "reduce-scatter"}


def work_of_a_pipeline_is_m_of_m_plus_p_minus_1():
    assert mw.pipeline(stages=4, microbatches=8).efficiency == pytest.approx(8 / 11)


SHOWN = {
    "`jax.lax.all_gather_async` overlaps a gather": there_is_no_asynchronous_gather,
    '`Mesh(jax.devices(), ("x", "y"))` makes a mesh of two axes': a_mesh_of_two_axes_wants_an_array_of_two_dims,
    "`A @ B` with a split contracted dim is left to the compiler": an_ambiguous_contraction_is_an_error,
    "`device_put` of a weight in `jit` makes a layer model parallel": device_put_in_jit_does_not_bind,
    "AdamW of 1 billion parameters takes 4 GB": adam_keeps_8_bytes_a_parameter,
    "GPT-2 with 1.5 billion parameters takes 6 GB in fp16": gpt2_xl_is_3_gb_in_16_bits,
    "a reduce-scatter sends all of its bytes": a_reduce_scatter_sends_all_but_a_share,
    "the largest fsdp is the best mesh": a_smaller_fsdp_can_be_faster,
    "layers 0 to 2 on one device and 3 to 5 on the next are tensor parallelism": layers_on_devices_are_a_pipeline,
    "a pipeline's efficiency is (m - p + 1) / m": work_of_a_pipeline_is_m_of_m_plus_p_minus_1,
}


@pytest.mark.parametrize("claim", SHOWN)
def test_what_is_said_elsewhere_is_wrong(claim):
    SHOWN[claim]()


def test_every_claim_of_the_document_has_its_test():
    table = (ROOT / "docs/learn.md").read_text().split("## What other pages say")[1]
    rows = re.findall(r"^\| (.*?) \| .* \| \d+ \|$", table, re.MULTILINE)
    assert rows == list(SHOWN)
