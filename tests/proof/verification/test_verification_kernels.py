"""Fused attention of latent heads, whose values are narrower than their queries, compiled for TPUs and GPUs."""

from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.description.families.registry import PRESETS
from meshwright.proof.verification.differences import Difference

pytestmark = pytest.mark.slow

TINY = PRESETS["tiny-deepseek"]
HEADS = replace(TINY.attention.latent, nope_head_dim=128, rope_head_dim=64, value_head_dim=128)
MODEL = replace(
    TINY,
    name="latent",
    num_layers=2,
    vocab=4096,
    experts=None,
    attention=replace(TINY.attention, latent=HEADS),
    head_dim=192,
)
"""The head dims of DeepSeek-V2 and V3, without experts."""


@pytest.mark.parametrize(
    ("on", "mesh", "options", "flops"),
    [
        ("v4:2x2x1", "fsdp=2,sp=2", {}, Difference.KERNEL_ESTIMATES),
        ("v5e:2x2", "fsdp=2,sp=2", {"sp_method": "ulysses"}, Difference.OPAQUE_KERNELS),
        ("v5p:2x2x1", "dp=2,tp=2", {"packed": True}, Difference.OPAQUE_KERNELS),
        ("v5e:2x2", "fsdp=2,sp=2", {"sp_method": "gather", "packed": True}, Difference.KERNEL_ESTIMATES),
        ("tpu7x:2x2x1", "dp=8", {}, Difference.OPAQUE_KERNELS),
        ("h100:4", "fsdp=4", {"attention": "cudnn"}, Difference.OPAQUE_KERNELS),
    ],
    ids=["v4", "ulysses", "v5p", "gather", "tpu7x", "h100"],
)
def test_values_narrower_than_queries_are_in_kernels_and_every_difference_has_a_name(on, mesh, options, flops):
    pytest.importorskip("jax_cuda13_plugin" if on.startswith("h100") else "libtpu")
    found = mw.verify(MODEL, on=on, mesh=mesh, batch=8, seq_len=2048, **{"attention": "flash"} | options)
    (row,) = [row for row in found.rows if row.quantity == "flops"]
    assert [cause.difference for cause in row.causes] == [flops]
    assert [row for row in found.rows if not row.is_explained] == []
