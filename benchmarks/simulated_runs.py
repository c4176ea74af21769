"""A step of a compiled program, simulated: its time, its share of the peak, and what of its collectives is exposed.

    .venv/bin/python benchmarks/simulated_runs.py FILE.hlo[.gz] --mesh fsdp=256 --on v5e:16x16 [--model-flops 3.27e17]
        [--trace run.json.gz]

FILE holds what `compiled.as_text()` printed. --model-flops: those of a step over all devices, for the MFU. --trace:
where to write a trace for ui.perfetto.dev. Runs in a few seconds and needs no device.
"""

import argparse
import gzip
from pathlib import Path

from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.parser import parse_hlo
from meshwright.mesh import parse_mesh
from meshwright.proof.simulate.buffers import read_buffers
from meshwright.proof.simulate.perfetto import write_trace
from meshwright.proof.simulate.schedule import Schedule, simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--on", required=True, help="hardware, as v5e:16x16")
    parser.add_argument("--model-flops", type=float)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    system = parse_system(args.on)
    mesh = parse_mesh(args.mesh, num_devices=system.num_devices)
    module = parse_hlo(read(args.file))
    schedule = simulate(module, mesh.layout, system)
    show(schedule, args.model_flops)
    memory = read_buffers(module)
    print(f"peak of live buffers {memory.peak_bytes / 2**30:.3f} GiB in {' > '.join(memory.moment)}")
    if args.trace:
        write_trace(schedule, args.trace)


def read(file: Path) -> str:
    """The text of a file, unpacked where its name ends in .gz."""
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix == ".gz" else data).decode()


def show(schedule: Schedule, model_flops: float | None) -> None:
    """Print what a schedule says."""
    mfu = f", MFU {schedule.mfu(model_flops):.1%}" if model_flops else ""
    print(f"step {schedule.step_seconds:.4f} s, HFU {schedule.hfu:.1%}{mfu}")
    print(f"{schedule.estimated_share:.0%} of the time of ops is the compiler's own estimate")
    for name, seconds in schedule.breakdown_seconds.items():
        print(f"  {name:<24}{seconds:10.4f} s {seconds / schedule.step_seconds:6.1%}")
    print("exposed by axis")
    for axes, seconds in schedule.exposed_by("axes").items():
        print(f"  {axes:<24}{seconds:10.4f} s")
    print("exposed by scope")
    for scope, seconds in list(schedule.exposed_by("scope").items())[:10]:
        print(f"  {scope[-60:]:<62}{seconds:10.4f} s")
    for note in schedule.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    main()
