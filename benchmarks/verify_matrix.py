"""Our train step compiled for every kind of hardware under every parallelism, and each difference from its plan.

    .venv/bin/python benchmarks/verify_matrix.py [--on cpu:8 v5e:4x4 …] [--effort default]

Two layers of a Llama-like model, 2048 wide, bf16 (f32 on simulated CPU devices). Needs libtpu and jax-cuda13-plugin,
and none of the hardware; a quarter of an hour on two busy cores where nothing is cached. Prints for each program how
many of the flops, the memory and the collectives by kind, axes and phase are equal, and of each that is not what names
the difference. Ends with code 1 where a quantity differs without a name.
"""

import argparse
import sys
from collections.abc import Iterator

from meshwright.description.hardware.system import parse_system
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.pictures.screens.comparison import row_cells
from meshwright.planning.plan import Plan, make_plan
from meshwright.proof.verification.plans import Verification, verify_all

HARDWARE = ("cpu:8", "v5e:4x4", "v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x2", "h100:8")

MODEL = ModelConfig(
    name="llama-2-layers",
    num_layers=2,
    embed=2048,
    mlp=8192,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    vocab=32_000,
)
BATCH, SEQ_LEN = 16, 512


def parallelisms(num_devices: int) -> dict[str, tuple[MeshShape, Strategy]]:
    """The meshes of some devices and how they are run, by what that is called."""
    return {
        "dp": (MeshShape(dp=num_devices), DEFAULT),
        "fsdp": (MeshShape(fsdp=num_devices), DEFAULT),
        "tp, every device with the whole stream": (MeshShape(tp=num_devices), Strategy(tp_stream="whole")),
        "tp, the stream split along the sequence": (MeshShape(tp=num_devices), DEFAULT),
        "fsdp+tp": (MeshShape(fsdp=num_devices // 4, tp=4), DEFAULT),
    }


def plans(hardware: list[str]) -> Iterator[tuple[str, Plan]]:
    """The plan of each program, with what its parallelism is called."""
    for name in hardware:
        system = parse_system(name)
        dtype = "f32" if system.chip.kind == "cpu" else "bf16"
        workload = Workload(model=MODEL, batch=BATCH, seq_len=SEQ_LEN, compute_dtype=dtype)
        for title, (mesh, strategy) in parallelisms(system.num_devices).items():
            yield title, make_plan(workload, mesh, system, strategy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", nargs="*", default=list(HARDWARE))
    parser.add_argument("--effort", choices=("fast", "default"), default="fast")
    args = parser.parse_args()
    todo = list(plans(args.on))
    unnamed = 0
    for number, outcome in verify_all([plan for _, plan in todo], effort=args.effort):
        title, plan = todo[number]
        print(f"\n{plan.hardware}  {title}  {plan.mesh}", flush=True)
        if isinstance(outcome, MeshwrightError):
            print(f"  not compiled: {outcome}")
        else:
            unnamed += show(outcome)
    print(f"\n{unnamed} differences without a name")
    return int(unnamed > 0)


def show(found: Verification) -> int:
    """Print what is equal in a line and each difference in its own; how many differ without a name."""
    program, rows = found.program, [row for row in found.rows if row.unit in ("flop", "B")]
    different = [row for row in rows if not row.is_equal]
    print(f"  {program.compiler}, {program.compile_seconds:.0f} s: {len(rows) - len(different)} of {len(rows)} equal")
    for row in different:
        quantity, *amounts, reason = row_cells(row, with_measured=False)
        print(f"  {quantity:<32}" + "".join(f"{amount:>12}" for amount in amounts) + f"  {reason}")
    return sum(not row.is_explained for row in different)


if __name__ == "__main__":
    sys.exit(main())
