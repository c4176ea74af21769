"""Steps with padding, copies of kv heads and uneven stages, and how TPU compilers' programs of them are stored.

    python tests/predictions/tpu_rows.py

compiles each on every target of `TARGETS` (five minutes of two cores) and writes the records to tpu.json.gz.
`test_stored_tpu.py` compares the plans with them. The models are wide enough that memory is where it is in large ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.description.hardware.system import parse_system
from meshwright.description.step.layer_inputs import LayerInputs
from meshwright.description.step.model import Experts, ModelConfig
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.plan import Plan, make_plan
from meshwright.proof.verification.plans import Verification, verify_all

sys.path.insert(0, str(Path(__file__).parent))
from records import TPU, write

TARGETS = ("v5e:2x4", "v5p:2x2x2")

EVEN = ModelConfig(
    name="base", num_layers=4, embed=1024, mlp=4096, num_heads=8, num_kv_heads=8, head_dim=128, vocab=32_000
)
ODD = replace(EVEN, name="odd", num_heads=10, num_kv_heads=5, vocab=32_001)
FEW = replace(EVEN, name="few", num_kv_heads=2)
SIX = replace(EVEN, name="six", experts=Experts(count=6, num_active=2, mlp=1024), num_layers=2)
SLOTTED = replace(SIX, name="six slotted", experts=Experts(count=6, num_active=2, mlp=1024, capacity_factor=1.5))
UNEVEN = replace(EVEN, name="uneven", num_layers=5)
# A device's columns of the table, 1120, are no multiple of 128.
TABLED = replace(EVEN, name="tabled", layer_inputs=LayerInputs(vocab=EVEN.vocab, width=1120))


@dataclass(frozen=True)
class Row:
    """A step on a mesh of 8 devices, by a strategy."""

    model: ModelConfig
    mesh: MeshShape
    strategy: Strategy = DEFAULT

    def __str__(self) -> str:
        return f"{self.model.name} {self.mesh}"

    def plan(self, target: str) -> Plan:
        """The plan of the step on a target."""
        return make_plan(
            Workload(model=self.model, batch=16, seq_len=1024), self.mesh, parse_system(target), self.strategy
        )


ROWS = (
    Row(ODD, MeshShape(fsdp=2, tp=4)),
    Row(FEW, MeshShape(fsdp=2, tp=4)),
    Row(SIX, MeshShape(fsdp=2, ep=4)),
    Row(SLOTTED, MeshShape(fsdp=2, ep=4)),
    Row(TABLED, MeshShape(dp=2, fsdp=4)),
    Row(UNEVEN, MeshShape(fsdp=4, pp=2), Strategy(num_microbatches=4)),
    Row(UNEVEN, MeshShape(fsdp=2, tp=2, pp=2), Strategy(num_microbatches=4, virtual_stages=2)),
)

CASES = {f"{row} {target}": (row, target) for row in ROWS for target in TARGETS}


def compiled(names: list[str]) -> Iterator[tuple[str, Verification]]:
    """Compile the programs of some cases, and yield each with its name as it is done."""
    plans = [row.plan(target) for row, target in (CASES[name] for name in names)]
    for number, outcome in verify_all(plans):
        if not isinstance(outcome, Verification):
            raise outcome
        yield names[number], outcome


def main() -> None:
    """Compile all cases and write their records."""
    found = {}
    for name, outcome in compiled(list(CASES)):
        found[name] = outcome.compiled.to_json()
        print(name, f"{outcome.program.compile_seconds:.0f} s", flush=True)
    write(TPU, found)


if __name__ == "__main__":
    main()
