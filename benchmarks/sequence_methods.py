"""Three ways to attend over a split sequence, side by side: what a device moves and holds, how long it takes.

    .venv/bin/python benchmarks/sequence_methods.py [--model llama3-8b] [--compile]

A row is one layer's attention, forward and backward with nothing recomputed, of one sequence of S tokens over P = sp
devices in bf16. Moved: bytes of the collectives over sp. Held: keys and values, as many of them as are there at once,
and their gradients. Times are on a 4x4x4 slice of v5p and on 64 H100, of which each P devices have a sequence: of the
collectives alone, and of attention with them; what goes round a ring travels beside attention, the rest before or after
it. --compile: attention alone at a few points, of few heads on v5e, by the TPU compiler: what it moves, what it holds,
and from its schedule the time and what of it waits for collectives. A minute for each, and no device.
"""

import argparse
from dataclasses import asdict, replace
from typing import Any

from meshwright.description.families.load import load_model
from meshwright.description.families.registry import PRESETS, workload_from_data
from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import System, parse_system
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.sequence import check_sequence, is_zigzag, sequence_method
from meshwright.description.step.strategy import SequenceMethod, Strategy, strategy_from_data
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.cost.comm_volume import activation_moves
from meshwright.planning.cost.rates.attention import fused_attention_time
from meshwright.planning.cost.rates.collective_time import planned_seconds
from meshwright.record import Collective
from meshwright.units import show_bytes, show_seconds

METHODS: tuple[SequenceMethod, ...] = ("gather", "ring", "ulysses")
LENGTHS = (8192, 32768, 131072, 524288, 1048576)
DEGREES = (2, 4, 8, 16)
SYSTEMS = ("v5p:4x4x4", "h100:64")

FEW_HEADS = replace(PRESETS["tiny"], name="few heads", num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128)
POINTS: tuple[tuple[SequenceMethod, int, int], ...] = (
    *((method, 32768, 8) for method in METHODS),
    *((method, 1048576, 8) for method in METHODS),
    ("ring", 1048576, 16),
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
    mesh, strategy = MeshShape(dp=64 // degree, sp=degree), Strategy(attention="flash", sp_method=method)
    star = "*" if method == sequence_method(model, mesh) else " "
    head = f"{length:>8} {degree:>3} {star} {method:<8}"
    try:
        check_sequence(model, mesh, strategy)
    except MeshwrightError as error:
        print(f"{head}  {error}")
        return
    workload = Workload(model=model, batch=mesh.dp, seq_len=length, remat="none")
    moves, times = sequence_moves(workload, mesh, strategy), ""
    for system in map(parse_system, SYSTEMS):
        moving = sum(planned_seconds(move, lay_mesh(system, mesh.layout)) for move in moves)
        working = attention_seconds(model, length, degree, system)
        together = max(moving, working) if method == "ring" else moving + working
        times += f"{show_seconds(moving):>13}{show_seconds(together):>13}"
    moved, held = sum(move.bytes for move in moves), held_bytes(model, length, degree, method)
    print(f"{head}{show_bytes(moved):>12}{show_bytes(held):>12}{times}")


def sequence_moves(workload: Workload, mesh: MeshShape, strategy: Strategy) -> list[Collective]:
    """The collectives that bring the keys of a split sequence to its queries."""
    moves = [move for move, _ in activation_moves(workload, mesh, strategy)]
    return [move for move in moves if move.axes == ("sp",) and move.array != "loss"]


def attention_seconds(model: ModelConfig, length: int, degree: int, system: System) -> float:
    """The time of a fused attention, forward and backward, on one device; all have as much to do."""
    flops = length**2 / degree * model.num_heads * (model.query_key_dim + model.value_dim)
    time = fused_attention_time(flops, length, model.query_key_dim, model.value_dim, "flash", system)
    return time.forward + time.backward


def held_bytes(model: ModelConfig, length: int, degree: int, method: SequenceMethod) -> int:
    """The keys and values that a device has at once in backward with their float32 gradients.

    Gathered: those of all. Round a ring: those that are here and those that come, and gradients likewise. Ulysses:
    those of all, for a share of the heads.
    """
    own = length // degree * model.num_kv_heads * (model.query_key_dim + model.value_dim)
    return own * (2 + 4) * {"gather": degree, "ring": 2, "ulysses": 1}[method]


def show_compiled(method: SequenceMethod, length: int, degree: int) -> None:
    """Compile attention for v5e and print what it moves over sp beside what is planned, and what its schedule says."""
    from meshwright.description.hlo.parser import parse_hlo
    from meshwright.proof.compiler.compile import compile_in_child
    from meshwright.proof.compiler.program import CompileRequest
    from meshwright.proof.compiler.records import read_program
    from meshwright.proof.simulate.schedule import simulate

    on = "v5e:2x4" if degree == 8 else "v5e:4x4"
    mesh, strategy = MeshShape(sp=degree), Strategy(attention="flash", sp_method=method)
    workload = Workload(model=FEW_HEADS, batch=1, seq_len=length, remat="none")
    arguments = {"workload": asdict(workload), "strategy": asdict(strategy)}
    head = f"{method:<8} S = {length:>7}, P = {degree:>2}, {on}:"
    try:
        program = compile_in_child(
            CompileRequest(function="sequence_methods:lower", hardware=on, mesh=mesh.layout, arguments=arguments)
        )
    except MeshwrightError as error:
        print(f"{head} {error}")
        return
    planned = sum(move.bytes for move in sequence_moves(workload, mesh, strategy))
    moved = sum(move.bytes for move in read_program(program, mesh, on).collectives)
    schedule = simulate(parse_hlo(program.hlo), mesh.layout, parse_system(on))
    exposed = sum(schedule.exposed_by("axes").values())
    print(
        f"{head} predicted {show_bytes(planned):>9}, compiled"
        f" {show_bytes(moved):>9}, temporaries {show_bytes(program.memory_bytes['temporaries']):>9}; simulated"
        f" {show_seconds(schedule.step_seconds)}, of which {show_seconds(exposed)} waits; compiled in"
        f" {program.compile_seconds:.0f} s"
    )


def lower(mesh: Any, *, workload: dict[str, Any], strategy: dict[str, Any]) -> Any:
    """The attention of one layer of a workload and its gradients, lowered for a mesh."""
    import jax
    import jax.numpy as jnp

    from meshwright.execution.runtime.attention.segments import Mask, Segments
    from meshwright.execution.runtime.attention.sequence import KEYS, QUERIES, TOKENS, LayerMask, attend, token_order
    from meshwright.execution.runtime.sharding_context import ShardingContext

    asked, way = workload_from_data(workload), strategy_from_data(strategy)
    model, shape = asked.model, MeshShape(**dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)))
    layout, tokens = ShardingContext(shape), (asked.batch, asked.seq_len)
    groups = model.num_heads // model.num_kv_heads

    def array(names: tuple[str, ...], *dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, layout.spec(*names))
        return jax.ShapeDtypeStruct((*tokens, *dims), dtype, sharding=sharding)

    order = token_order(asked.seq_len, layout, way)

    def run(query: Any, key: Any, value: Any, positions: Any, gradient: Any) -> Any:
        places = Segments(positions) if is_zigzag(shape, way) else None

        def attention(query: Any, key: Any, value: Any) -> Any:
            masks = [LayerMask(Mask(), places)]
            return attend(query, key, value, layout, method=way.sp_method, masks=masks, order=order)

        output, back = jax.vjp(attention, query, key, value)
        return output, *back(gradient)

    query = array(QUERIES, model.num_kv_heads, groups, model.head_dim)
    key, positions = array(KEYS, model.num_kv_heads, model.head_dim), array(TOKENS, dtype=jnp.int32)
    with jax.set_mesh(mesh):
        return jax.jit(run).lower(query, key, key, positions, query)


if __name__ == "__main__":
    main()
