"""Every row of the correctness kit, compiled for hardware that is not there: what differs from its plan, and findings.

    .venv/bin/python benchmarks/strategy_matrix.py [--on h100 | v5e] [--only moe …] [--effort default]

The rows are those of `tests/execution/runtime/kit_rows.py`, on v5e those of 4 and 8 devices, their models widened to
sizes that hardware is for: four layers 1024 wide, 16 sequences of 1024 tokens, bf16. Needs jax-cuda13-plugin or libtpu,
and none of the hardware; where nothing is cached 8 to 25 seconds of one core a row for H100s, a minute for v5e. Prints
for each row how many of the flops, the memory and the collectives by kind, axes and phase are equal, of each that is
not what names the difference, and what `meshwright inspect` finds wrong with the program. Ends with code 1 where a
quantity differs without a name or anything is found.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "execution" / "runtime"))

from kit_rows import FAMILIES, FINE_TUNING, ROWS, Row  # pyright: ignore[reportMissingImports]
from verify_matrix import show

from meshwright.description.hardware.system import parse_system
from meshwright.description.step.attention import LatentAttention
from meshwright.description.step.model import AttentionConfig, LearnedPositions, ModelConfig
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.planning.plan import Plan, make_plan
from meshwright.proof.inspection.finding import Finding
from meshwright.proof.inspection.inspection import read_inspection
from meshwright.proof.verification.plans import Verification, verify_all

HARDWARE = {
    "h100": {1: "h100:1", 2: "h100:2", 4: "h100:4", 8: "h100:8"},
    "v5e": {4: "v5e:2x2", 8: "v5e:2x4"},
}


def widened(model: ModelConfig) -> ModelConfig:
    """A model of the kit at sizes that hardware is for."""
    experts = (
        replace(model.experts, mlp=512, shared_mlp=1024 * bool(model.experts.shared_mlp)) if model.experts else None
    )
    wide = replace(model, embed=1024, mlp=4096, head_dim=128, vocab=32_768, experts=experts)
    if isinstance(wide.positions, LearnedPositions):
        wide = replace(wide, positions=LearnedPositions(rows=1024))
    if wide.attention.latent:
        query_rank = wide.attention.latent.query_rank and 256
        latent = LatentAttention(
            query_rank=query_rank, kv_rank=128, nope_head_dim=64, rope_head_dim=64, value_head_dim=128
        )
        wide = replace(wide, attention=AttentionConfig(latent=latent))
    return wide


def plans(on: str, only: list[str]) -> Iterator[tuple[Row, Plan]]:
    """The plan of each row, of those whose names have all of some words in them."""
    for row in (*ROWS, *FAMILIES, *FINE_TUNING):
        hardware = HARDWARE[on].get(row.mesh.num_devices)
        if hardware and all(word in str(row) for word in only):
            workload = Workload(model=widened(row.model), batch=16, seq_len=1024, remat=row.remat, frozen=row.frozen)
            yield row, make_plan(workload, row.mesh, parse_system(hardware), row.strategy)


def findings(found: Verification) -> tuple[Finding, ...]:
    """What is wrong with the program of a plan, whose collectives are expected to be there."""
    plan = found.plan
    inspection = read_inspection(
        "step",
        found.program.hlo,
        plan.mesh.layout,
        hardware=plan.hardware,
        system=plan.system,
        program=found.program,
        expected=found.expected,
    )
    return inspection.findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=tuple(HARDWARE), default="h100")
    parser.add_argument("--only", nargs="*", default=[], help="rows that have all of these words in their names")
    parser.add_argument("--effort", choices=("fast", "default"), default="fast")
    args = parser.parse_args()
    todo = list(plans(args.on, args.only))
    unnamed = wrong = 0
    for number, outcome in verify_all([plan for _, plan in todo], effort=args.effort):
        row, plan = todo[number]
        print(f"\n{row}  {plan.hardware}", flush=True)
        if isinstance(outcome, MeshwrightError):
            print(f"  not compiled: {outcome}")
            wrong += 1
            continue
        unnamed += show(outcome)
        for finding in findings(outcome):
            print(f"  found {finding.kind}: {finding.evidence}  {finding.source}")
            wrong += 1
    print(f"\n{len(todo)} rows: {unnamed} differences without a name, {wrong} findings")
    return int(unnamed + wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
