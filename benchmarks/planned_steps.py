"""The plan's step, simulated from the schedule that its compiler makes, beside what others published: dense models on
256 chips of v5e and v6e.

    .venv/bin/python benchmarks/planned_steps.py [--programs DIR] [--only v5e:16x16]

Every model at full depth with splash attention, batch, sequence and mesh as published, the remat policy the nearest of
ours. Needs libtpu and no TPU; two to ten minutes a program, one after the other. --programs: where the compiled
programs are kept as `compiled.as_text()` prints them; those that are there are not compiled again.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Remat, Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.flops import model_flops
from meshwright.planning.plan import Plan, make_plan
from meshwright.proof.compiler.compile import compile_in_child
from meshwright.proof.simulate.buffers import read_buffers
from meshwright.proof.simulate.schedule import simulate
from meshwright.proof.verification.plans import step_request

CHIPS = 256

DENSE_16B = ModelConfig(
    name="dense-16b",
    num_layers=32,
    embed=5120,
    mlp=22_016,  # gated; within a percent of the weights of MaxText's two matrices of 32,768
    num_heads=32,
    num_kv_heads=32,
    head_dim=256,
    vocab=32_768,
    tied_embeddings=True,
)
"""MaxText's `global_parameter_scale=16`, with a gated mlp of its size."""

MAXTEXT = "github.com/AI-Hypercomputer/maxtext"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A configuration that was published, and the MFU if that was too.

    mfu: scores counted in full, as ours (PaLM, arXiv:2204.02311, appendix B). source: of the configuration and the MFU.
    """

    model: ModelConfig
    hardware: str
    batch: int  # sequences a chip
    seq_len: int
    remat: Remat
    mfu: float | None = None
    source: str

    @property
    def plan(self) -> Plan:
        """The plan of the run: all chips fully sharded."""
        workload = Workload(model=self.model, batch=CHIPS * self.batch, seq_len=self.seq_len, remat=self.remat)
        strategy = Strategy(attention="flash")
        return make_plan(workload, MeshShape(fsdp=CHIPS), parse_system(self.hardware), strategy)


RUNS = (
    Run(
        model=DENSE_16B,
        hardware="v5e:16x16",
        batch=6,
        seq_len=2048,
        remat="block",
        mfu=0.611,
        source=f"{MAXTEXT}, MaxText/configs/v5e/README.md and 16b.sh (remat full)",
    ),
    Run(
        model=PRESETS["llama2-7b"],
        hardware="v5e:16x16",
        batch=4,
        seq_len=2048,
        remat="block",
        source=f"{MAXTEXT}, MaxText/configs/v5e/llama2_7b.sh (remat save_qkv_proj)",
    ),
    Run(
        model=PRESETS["llama3-8b"],
        hardware="v5e:16x16",
        batch=2,
        seq_len=8192,
        remat="offload",
        source=f"{MAXTEXT}, benchmarks/maxtext_v5e_model_configs.py, llama3_1_8b_8192_v5e_256 (inputs, queries, keys,"
        " values and outputs offloaded)",
    ),
    Run(
        model=DENSE_16B,
        hardware="v6e:16x16",
        batch=6,
        seq_len=2048,
        remat="block",
        source="as on v5e",
    ),
    Run(
        model=PRESETS["llama2-7b"],
        hardware="v6e:16x16",
        batch=12,
        seq_len=4096,
        remat="block",
        source=f"{MAXTEXT}, benchmarks/maxtext_trillium_model_configs.py, llama2_7b_4096 (remat full)",
    ),
    Run(
        model=PRESETS["llama3-8b"],
        hardware="v6e:16x16",
        batch=4,
        seq_len=8192,
        remat="offload",
        mfu=0.4546,
        source="github.com/AI-Hypercomputer/tpu-recipes, training/trillium/Llama3.1-8B-MaxText/v6e-256 (inputs,"
        " queries, keys, values and outputs offloaded)",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, help="a folder of compiled programs")
    parser.add_argument("--only", default="", help="part of the name of the runs to show, as llama3-8b or v6e")
    args = parser.parse_args()
    for run in RUNS:
        if args.only in name(run):
            print("\n".join(lines(run, args.programs)), flush=True)


def name(run: Run) -> str:
    """What a run is called."""
    return f"{run.model.name} {run.hardware} {run.batch}x{run.seq_len} {run.remat}"


def lines(run: Run, programs: Path | None) -> Iterator[str]:
    """What is printed of a run."""
    plan = run.plan
    module = parse_hlo(program(run, plan, programs))
    schedule = simulate(module, plan.mesh.layout, plan.system)
    mfu, peak = schedule.mfu(model_flops(plan.workload)), read_buffers(module).peak_bytes
    published = f"{run.mfu:.1%}, ratio {mfu / run.mfu:.3f}" if run.mfu else "none"
    yield f"{name(run)} on mesh {plan.mesh}"
    yield f"  MFU: predicted {plan.predicted.mfu:.1%}, simulated {mfu:.1%}, published {published}"
    fits = "fits" if peak <= plan.system.usable_bytes else "does not fit"
    yield f"  peak of live buffers {peak / 2**30:.2f} of {plan.system.usable_bytes / 2**30:.2f} GiB: {fits}"
    parts = {part: seconds for part, seconds in schedule.breakdown_seconds.items() if seconds}
    said = ", ".join(f"{part} {seconds:.3f}" for part, seconds in parts.items())
    yield f"  step {schedule.step_seconds:.3f} s: {said}"
    yield f"  {run.source}"


def program(run: Run, plan: Plan, programs: Path | None) -> str:
    """The compiled program of a run, from a folder of such where it is there; else compiled, and kept there."""
    file = programs / f"{name(run).replace(' ', '_').replace(':', '_')}.hlo.gz" if programs else None
    if file and file.is_file():
        return gzip.decompress(file.read_bytes()).decode()
    text = compile_in_child(step_request(plan, effort="default")).hlo
    if file:
        file.write_bytes(gzip.compress(text.encode()))
    return text


if __name__ == "__main__":
    main()
