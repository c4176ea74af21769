"""Plans of other people's train steps on an absent TPU slice, beside data and tensor parallelism by hand.

    .venv/bin/python benchmarks/foreign_plans.py [PROGRAM …] [--on v5e:4x4]

For each program of tests/proof/programs/zoo_flax.py: how many dims were found, the seconds of planning without
compiling, and the simulated step of the compiled program of the plan and of the best layouts of `dp`, `fsdp`, `tp` and
`fsdp` with `tp`, and of those with an axis that splits one dim in a part of the program and another elsewhere (`by
part`), each with the predicted step over the compiled one. Compiling takes about half a minute a layout.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "proof" / "programs"))

from zoo_flax import PROGRAMS  # pyright: ignore[reportMissingImports]

import meshwright as mw
from meshwright.description.hardware.system import parse_system
from meshwright.proof.program_plans.plan import compiled_candidate
from meshwright.proof.programs.search import axes_by_part
from meshwright.proof.programs.work import work_of

SIZES = {
    **{
        name: {"width": 512, "batch": 32, "length": 512} for name in ("linen_transformer", "nnx_transformer", "gpt2")
    },
    "two_towers": {"width": 256, "batch": 8192, "users": 65536, "items": 65536},
    "conv_dense": {"width": 128, "batch": 512, "side": 16, "dense": 8192},
    "resnet": {"width": 64, "batch": 64, "side": 64, "stages": (1, 1, 1)},
    "unet": {"width": 64, "batch": 32, "side": 64},
    "lstm": {"width": 1024, "batch": 256, "length": 32}, "moe": {"width": 512, "tokens": 8192},
    "vit": {"width": 512, "batch": 64, "side": 64}, "decode": {"width": 1024, "batch": 256, "length": 1024, "heads": 8},
}  # fmt: skip
STRATEGIES = ("dp", "fsdp", "tp", "fsdp,tp", "by part")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    parser.add_argument("--on", default="v5e:2x4")
    arguments = parser.parse_args()
    system = parse_system(arguments.on)
    print(f"{'':<18}{'dims':>5}{'planned in':>11}  {'strategy':<22}{'step':>10}{'predicted':>10}")
    for name in arguments.programs or PROGRAMS:
        step, args = PROGRAMS[name](**SIZES[name])
        began = time.perf_counter()
        plan = mw.plan(step, *args, on=system, num_compiled=0)
        seconds = time.perf_counter() - began
        head = f"{name:<18}{sum(not one.barred for one in plan.classes):>5}{seconds:>9.1f} s  "
        work = work_of(plan.program, is_tpu=True)
        seen: set[str] = set()
        for candidate in plan.candidates:
            assert candidate.layout is not None
            assert candidate.predicted is not None
            axes = tuple(axis.name for axis in candidate.layout.axes if axis.degree > 1)
            strategy = "by part" if axes_by_part(work, candidate.layout) else ",".join(axes)
            if strategy in seen or (strategy not in STRATEGIES and seen):
                continue
            seen.add(strategy)
            found = compiled_candidate(candidate, plan.program, plan.classes, system)
            if found.seconds is None:
                continue
            mesh = ",".join(f"{axis.name}={axis.degree}" for axis in candidate.layout.axes if axis.degree > 1)
            share = (candidate.predicted.step_seconds or 0.0) / found.seconds
            mesh += " by part" if strategy == "by part" else ""
            print(f"{head:<36}{mesh:<22}{found.seconds * 1e3:>7.2f} ms{share:>9.2f}x", flush=True)
            head = ""


if __name__ == "__main__":
    main()
