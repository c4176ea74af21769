"""Which method a split sequence is planned with, and which cannot run."""

from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.legality import check_runnable
from meshwright.description.step.sequence import sequence_method
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape

LLAMA2, LLAMA3 = PRESETS["llama2-7b"], PRESETS["llama3-8b"]


@pytest.mark.parametrize(
    ("model", "mesh", "method"),
    [
        (LLAMA2, MeshShape(sp=2), "ring"),  # 2 is not more than 1 + 32 / 32
        (LLAMA2, MeshShape(sp=4), "ulysses"),
        (LLAMA2, MeshShape(tp=8, sp=4), "ulysses"),
        (LLAMA2, MeshShape(tp=16, sp=4), "ring"),  # 64 does not divide 32 kv heads
        (LLAMA3, MeshShape(sp=4), "ring"),  # 4 is not more than 1 + 32 / 8
        (LLAMA3, MeshShape(sp=8), "ulysses"),
        (LLAMA3, MeshShape(tp=2, sp=8), "ring"),
    ],
    ids=str,
)
def test_the_method_is_the_one_that_sends_less_where_heads_allow_it(model, mesh, method):
    assert sequence_method(model, mesh) == method


@pytest.mark.parametrize(
    ("mesh", "strategy", "reason"),
    [
        (MeshShape(sp=2), Strategy(sp_method="ring"), "needs a fused attention"),
        (MeshShape(sp=16), Strategy(attention="flash", sp_method="ulysses"), r"tp\*sp=16 cannot split kv_heads=8"),
        (MeshShape(sp=2), Strategy(attention="cudnn", sp_method="ring"), "works on whole sequences"),
    ],
    ids=str,
)
def test_what_cannot_run_is_one_clear_error(mesh, strategy, reason):
    with pytest.raises(MeshwrightError, match=reason):
        check_runnable(replace(LLAMA3, num_layers=2), mesh, strategy)


def test_without_a_split_sequence_any_method_runs():
    check_runnable(LLAMA3, MeshShape(fsdp=8), replace(DEFAULT, sp_method="ring"))
