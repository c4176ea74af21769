"""Three ways to attend over a split sequence, side by side: what a device moves and holds, how long it takes.

    .venv/bin/python benchmarks/sequence_methods.py [--model llama3-8b] [--compile]

A row is one layer's attention, forward and backward with nothing recomputed, of one sequence of S tokens over P = sp
devices in bf16. Moved: bytes of the collectives over sp. Held: keys and values, as many of them as are there at once,
and their gradients. Times are on a 4x4x4 slice of v5p and on 64 H100, of which each P devices have a sequence: of the
collectives, nothing hidden, and with them of attention on the device that has most to do, which of gathered tokens in
order is the last one. --compile: the train step at a few points, of a narrow model on v5e, by the TPU compiler; a
minute or two for each, and no device.
"""

import argparse
from dataclasses import replace

from meshwright.cost import activation_collectives
from meshwright.cost.attention import fused_attention_time
from meshwright.errors import MeshwrightError
from meshwright.hardware import System, lay_mesh, parse_system
from meshwright.mesh import MeshShape
from meshwright.planner import make_plan
from meshwright.planner.waits import move_seconds
from meshwright.units import show_bytes, show_seconds
from meshwright.workload import (
    PRESETS,
    ModelConfig,
    SequenceMethod,
    Strategy,
    Workload,
    check_sequence,
    load_model,
    sequence_method,
)

METHODS: tuple[SequenceMethod, ...] = ("gather", "ring", "ulysses")
LENGTHS = (8192, 32768, 131072, 524288, 1048576)
DEGREES = (2, 4, 8, 16)
SYSTEMS = ("v5p:4x4x4", "h100:64")

NARROW = replace(PRESETS["tiny"], name="narrow", num_layers=1, num_heads=8, num_kv_heads=8, head_dim=64)
POINTS: tuple[tuple[SequenceMethod, int, int], ...] = (
    ("gather", 32768, 8),
    ("ring", 32768, 8),
    ("ulysses", 32768, 8),
    ("ring", 1048576, 8),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    show_table(replace(load_model(args.model), num_layers=1))
    if args.compile:
        for point in POINTS:
            show_compiled(*point)


def show_table(model: ModelConfig) -> None:
    """Print a row for every length, degree and method; a star marks what `sequence_method` chooses."""
    print(f"{model.name}: {model.num_heads} heads, {model.num_kv_heads} kv heads of {model.head_dim}")
    times = "".join(f"{name:>13}{'+ attention':>13}" for name in SYSTEMS)
    print(f"{'S':>8} {'P':>3}   {'method':<8}{'moved':>12}{'held':>12}{times}")
    for length in LENGTHS:
        for degree in DEGREES:
            for method in METHODS:
                show_row(model, length, degree, method)


def show_row(model: ModelConfig, length: int, degree: int, method: SequenceMethod) -> None:
    """Print one row, or why the method cannot split the heads."""
    mesh, strategy = MeshShape(dp=64 // degree, sp=degree), Strategy(attention="flash", sequence=method)
    star = "*" if method == sequence_method(model, mesh) else " "
    head = f"{length:>8} {degree:>3} {star} {method:<8}"
    try:
        check_sequence(model, mesh, strategy)
    except MeshwrightError as error:
        print(f"{head}  {error}")
        return
    workload = Workload(model=model, batch=mesh.dp, seq_len=length, remat="none")
    moves = [move for move in activation_collectives(workload, mesh, strategy) if move.axes == ("sp",)]
    moves = [move for move in moves if move.array != "loss"]
    times = ""
    for system in map(parse_system, SYSTEMS):
        moving = sum(move_seconds(move, lay_mesh(system, mesh.layout)) for move in moves)
        working = attention_seconds(model, length, degree, method, system)
        times += f"{show_seconds(moving):>13}{show_seconds(moving + working):>13}"
    moved, held = sum(move.bytes for move in moves), held_bytes(model, length, degree, method)
    print(f"{head}{show_bytes(moved):>12}{show_bytes(held):>12}{times}")


def attention_seconds(model: ModelConfig, length: int, degree: int, method: SequenceMethod, system: System) -> float:
    """The time of a fused attention, forward and backward, on the device with most to do.

    Of causal tokens in order the last device has (2 P - 1) / P times the mean.
    """
    flops = length**2 / degree * model.num_heads * (model.query_key_dim + model.value_dim)
    time = fused_attention_time(flops, length, model.head_dim, "flash", system)
    return (time.forward + time.backward) * ((2 * degree - 1) / degree if method == "gather" else 1)


def held_bytes(model: ModelConfig, length: int, degree: int, method: SequenceMethod) -> int:
    """The keys and values that a device has at once in backward with their float32 gradients.

    Gathered: those of all. Round a ring: those that are here and those that come, and gradients likewise. Ulysses:
    those of all, for a share of the heads.
    """
    own = length // degree * model.num_kv_heads * (model.query_key_dim + model.value_dim)
    return own * (2 + 4) * {"gather": degree, "ring": 2, "ulysses": 1}[method]


def show_compiled(method: SequenceMethod, length: int, degree: int) -> None:
    """Compile the train step of a narrow model for v5e and print what it moves over sp beside what is planned."""
    from meshwright.compiled import verify

    system = parse_system("v5e:2x4" if degree == 8 else "v5e:4x4")
    workload = Workload(model=NARROW, batch=1, seq_len=length)
    plan = make_plan(workload, MeshShape(sp=degree), system, Strategy(attention="flash", sequence=method))
    found = verify(plan)
    print(f"\n{method}, S = {length}, P = {degree}, {system}: compiled in {found.program.compile_seconds:.0f} s")
    for row in found.rows:
        if "peak" in row.quantity or ("sp" in row.quantity.split() and row.predicted and row.predicted > 1000):
            print(f"  {row.quantity:<36} planned {row.predicted:>14,.0f}   compiled {row.compiled or 0:>14,.0f}")


if __name__ == "__main__":
    main()
