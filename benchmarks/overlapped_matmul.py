"""What two compilers make of an overlapped product, beside what `jit` alone makes of the same product.

    .venv/bin/python benchmarks/overlapped_matmul.py [--on v5e:4x4 h100:8] [--json]

Compiles bf16 products as tensor parallelism has them, forward alone and with backward, at the compilers' default
effort, for hardware that need not be there (pip install meshwright[tpu-compiler,gpu-compiler]). In each program's
schedule it counts the collectives that are asynchronous, and for each the partial products that stand between its start
and its done: with none there, nothing hides it. Nothing is run, so nothing is timed.

plain: `jax.jit(jnp.einsum)` with shardings. one way, two ways: `runtime.collective_matmul.all_gather_matmul` and
`runtime.collective_matmul.matmul_reduce_scatter`, each shard whole in one direction, or in halves in both. A switch has
no two directions, and XLA keeps one collective of a GPU in flight: there, one way does all.
"""

from __future__ import annotations

import argparse
import itertools as it
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

from meshwright.description.hlo.module import Instruction, Module
from meshwright.description.hlo.parser import parse_hlo
from meshwright.execution.runtime.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from meshwright.pictures.tables import console, show, table
from meshwright.proof.compiler.compile import compile_in_child
from meshwright.proof.compiler.program import CompileRequest

SIZES = {"b": 4, "s": 8192, "d": 8192, "f": 28672}
"""Sequences, tokens of each, and the width and hidden size of Llama-3-70B (config.json of meta-llama/Meta-Llama-3-70B
on huggingface.co).
"""

PRODUCTS = {
    "gather": ("bsd,df->bsf", "s", (P("dp", "tp", None), P(None, "tp"), P("dp", None, "tp"))),
    "scatter": ("bsf,fd->bsd", "s", (P("dp", None, "tp"), P("tp", None), P("dp", "tp", None))),
}
"""Each with its einsum, the dim that the ring gathers or scatters, and how operands and result lie."""

MESHES = {"v5e:4x4": {"dp": 4, "tp": 4}, "h100:8": {"dp": 1, "tp": 8}}
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
PASSES = ("forward", "both")
"""Forward alone, or with backward."""

FORMS = ("plain", "one way", "two ways")
PRODUCT_OPCODES = ("dot", "convolution")
SHORT = {"collective-permute": "permute"}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a program's schedule overlaps.

    products: the local products in it. between: for each asynchronous collective, in order, its kind and the products
    between its start and its done. synchronous: the other collectives.
    """

    on: str
    product: str
    passes: str
    form: str
    products: int
    between: tuple[tuple[str, int], ...]
    synchronous: tuple[str, ...]
    compiler: str

    @property
    def hidden(self) -> int:
        """The asynchronous collectives with a product between start and done."""
        return sum(count > 0 for _, count in self.between)


def lower(mesh: Mesh, *, product: str, form: str, passes: str) -> jax.stages.Lowered:
    """A product, lowered for a mesh: what the child process compiles."""
    formula, dim, specs = PRODUCTS[product]
    if form == "plain":
        mesh = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    arrays = [
        jax.ShapeDtypeStruct([SIZES[letter] for letter in letters], jnp.bfloat16, sharding=sharding)
        for letters, sharding in zip(formula.replace("->", ",").split(","), shardings, strict=True)
    ]

    def ring(left: jax.Array, right: jax.Array) -> jax.Array:
        call = all_gather_matmul if product == "gather" else matmul_reduce_scatter
        return call(formula, left, right, axes="tp", dim=dim, is_two_way=form == "two ways")

    def plain(left: jax.Array, right: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(jnp.einsum(formula, left, right), shardings[2])

    forward = plain if form == "plain" else jax.shard_map(ring, mesh=mesh, in_specs=specs[:2], out_specs=specs[2])

    def both(left: jax.Array, right: jax.Array, gradient: jax.Array) -> Any:
        result, backward = jax.vjp(forward, left, right)
        return result, *backward(gradient)

    with jax.set_mesh(mesh):
        if passes == "forward":
            return jax.jit(forward, out_shardings=shardings[2]).lower(*arrays[:2])
        return jax.jit(both, out_shardings=(shardings[2], *shardings[:2])).lower(*arrays)


def schedule(on: str, product: str, passes: str, form: str) -> Schedule:
    """The schedule of a product compiled for some hardware."""
    program = compile_in_child(
        CompileRequest(
            function="overlapped_matmul:lower",
            hardware=on,
            mesh=MESHES[on],
            arguments={"product": product, "form": form, "passes": passes},
        )
    )
    module = parse_hlo(program.hlo)
    order = list(module.computations[module.entry].instructions.values())
    products = [place for place, instruction in enumerate(order) if holds(module, instruction, PRODUCT_OPCODES)]
    spans = list(asynchronous(module, order))
    return Schedule(
        on=on,
        product=product,
        passes=passes,
        form=form,
        products=len(products),
        between=tuple((kind, sum(start < place < done for place in products)) for kind, start, done in spans),
        synchronous=tuple(
            kind for i in order if (kind := i.opcode.removesuffix("-start")) in KINDS and is_synchronous(i)
        ),
        compiler=program.compiler,
    )


def asynchronous(module: Module, order: Sequence[Instruction]) -> Iterator[tuple[str, int, int]]:
    """Each asynchronous collective of a schedule: its kind, and where it starts and is done."""
    for start, instruction in enumerate(order):
        kind, name = instruction.opcode.removesuffix("-start"), instruction.name
        if kind in KINDS and kind != instruction.opcode and not is_synchronous(instruction):
            yield kind, start, next(n for n, user in enumerate(order) if name in user.operands and n > start)
        # The TPU compiler's own form, fusions that name each other, their steps spread over the fusions in between.
        if instruction.opcode == "fusion" and name.startswith("async-collective-start"):
            done = name.replace("-start", "-done")
            kinds = [kind for kind in KINDS if holds(module, instruction, (kind,))]
            yield kinds[0], start, next(n for n, other in enumerate(order) if other.name == done)


def is_synchronous(instruction: Instruction) -> bool:
    """Whether a collective is: so are those that XLA for GPUs splits in start and done and then waits for at once."""
    return instruction.opcode in KINDS or '"is_sync":true' in instruction.attributes.get("backend_config", "")


def holds(module: Module, instruction: Instruction, opcodes: Sequence[str]) -> bool:
    """Whether an instruction has one of some opcodes, or calls a computation with one that has."""
    return instruction.opcode in opcodes or any(
        holds(module, inner, opcodes)
        for name in instruction.called("calls", "to_apply")
        for inner in module.computations[name].instructions.values()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cases = list(it.product(args.on, PRODUCTS, PASSES, FORMS))
    found = []
    for number, case in enumerate(cases, start=1):
        print(f"compiling {number} of {len(cases)}: {', '.join(case)}", file=sys.stderr)
        found.append(schedule(*case))
    if args.json:
        print(json.dumps([asdict(item) for item in found], indent=2))
        return
    print(f"compiled by {', '.join(dict.fromkeys(item.compiler for item in found))}\n")
    columns = ("on", "product", "passes", "form", "products", "asynchronous", "hidden", "between", "synchronous")
    show(console(), table(columns, map(row, found), left=(0, 1, 2, 3, 5, 7, 8), folds=5))
    print("\n hidden: of the asynchronous ones; between: the fewest and the most products between start and done")


def row(found: Schedule) -> tuple[str, ...]:
    """A schedule's line."""
    kinds = Counter(SHORT.get(kind, kind) for kind, _ in found.between)
    counts = [count for _, count in found.between]
    return (
        *(found.on, found.product, found.passes, found.form, str(found.products)),
        ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "-",
        f"{found.hidden} of {len(counts)}" if counts else "-",
        f"{min(counts)} to {max(counts)}" if counts else "-",
        ", ".join(found.synchronous) or "-",
    )


if __name__ == "__main__":
    main()
