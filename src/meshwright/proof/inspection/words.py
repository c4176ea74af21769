"""Sentences about findings: the evidence, and what to change."""

from __future__ import annotations

from functools import singledispatch

from meshwright.proof.inspection.checks.constraints import DroppedConstraint, OverruledConstraint, UnevenConstraint
from meshwright.proof.inspection.checks.duplicate_gathers import GatheredTwice
from meshwright.proof.inspection.checks.duplicate_reductions import ReducedTwice
from meshwright.proof.inspection.checks.exposed_collectives import ExposedCollective
from meshwright.proof.inspection.checks.full_rematerializations import GatheredToReshard
from meshwright.proof.inspection.checks.mesh_order import SlowMeshOrder
from meshwright.proof.inspection.checks.missing_sums import MissingSum
from meshwright.proof.inspection.checks.padding import PaddedArrays
from meshwright.proof.inspection.checks.redundant_compute import RedundantCompute
from meshwright.proof.inspection.checks.replicated_batches import ReplicatedBatch
from meshwright.proof.inspection.checks.replicated_parameters import ReplicatedParameter
from meshwright.proof.inspection.checks.replicated_states import ReplicatedStates
from meshwright.proof.inspection.checks.sliced_all_reduces import SlicedAllReduce
from meshwright.proof.inspection.checks.undonated_buffers import NotDonated
from meshwright.proof.inspection.checks.uneven_stages import UnevenStages
from meshwright.proof.inspection.checks.unexpected_collectives import UnexpectedBecause, UnexpectedCollective
from meshwright.proof.inspection.finding import Finding
from meshwright.units import show_bytes, show_degrees, show_flops, show_percent, show_seconds


def evidence(finding: Finding) -> str:
    """Return what the compiled program does, with figures."""
    others = len(finding.elsewhere)
    lines = f"; the same at {others} other line{'s' if others > 1 else ''}" if others else ""
    return _sentences(finding)[0] + lines


def fix(finding: Finding) -> str:
    """Return what to change."""
    return _sentences(finding)[1]


@singledispatch
def _sentences(finding: Finding) -> tuple[str, str]:
    """The evidence and the fix."""
    raise TypeError(f"no sentences for {type(finding).__name__}")


def _axes(axes: tuple[str, ...]) -> str:
    return "*".join(axes)


@_sentences.register
def _(found: DroppedConstraint) -> tuple[str, str]:
    if found.device.startswith("P("):
        return (
            f"device_put of {found.shape} to {found.device} is inside of jit, where JAX drops it: the value stays as it"
            " was",
            "use jax.lax.with_sharding_constraint in its place, or jax.reshard where the axes are explicit",
        )
    if found.device:
        return (
            f"device_put of {found.shape} to {found.device} is inside of jit, which runs on all of its devices: it does"
            " nothing",
            "put it on devices before the call, or constrain it by a NamedSharding",
        )
    return (
        f"nothing uses the result of with_sharding_constraint on {found.shape}; the value stays as it was",
        "go on with what it returns: x = with_sharding_constraint(x, …)",
    )


@_sentences.register
def _(found: UnevenConstraint) -> tuple[str, str]:
    size = found.shape.dims[found.dim]
    return (
        f"dim {found.dim} of {found.shape} does not divide over {_axes(found.axes)}={found.degree}:"
        f" {size} % {found.degree} = {size % found.degree}; it is padded to {found.padded} inside the program,"
        " and whole again wherever it leaves it",
        f"make the dim a multiple of {found.degree}, as {found.padded}, or constrain another dim",
    )


@_sentences.register
def _(found: OverruledConstraint) -> tuple[str, str]:
    return (
        f"{found.shape} was constrained to {found.requested} and has {found.actual}",
        "look for another constraint on the same value, and keep one",
    )


@_sentences.register
def _(found: GatheredToReshard) -> tuple[str, str]:
    return (
        f"{found.shape} a device goes from {found.before} to {found.after} by being gathered whole,"
        f" {show_bytes(found.bytes)} on every device, and cut again ({found.op})",
        "keep each axis on a dim that the op keeps, or constrain the value in between to a sharding that differs from"
        " either in one axis",
    )


@_sentences.register
def _(found: ExposedCollective) -> tuple[str, str]:
    share = show_percent(found.exposed_seconds / found.step_seconds)
    return (
        f"ops wait {show_seconds(found.exposed_seconds)} a step ({share}) for the {found.collective} of"
        f" {found.array} over {_axes(found.axes)} in {found.phase}, while {show_seconds(found.independent_seconds)} of"
        " other ops beside it do not depend on it",
        _OVERLAP.get(
            found.collective,
            "make it a reduce-scatter and an all-gather, which compilers run beside other ops, or cut it into pieces"
            " between which ops can run",
        ),
    )


_OVERLAP = {
    "all-gather": (
        "start the gather earlier: take what it gathers out of the chain of ops before it (an optimization barrier, a"
        " loop over what could be gathered ahead), or overlap it with its product in a ring (collective matmul)"
    ),
    "reduce-scatter": (
        "let the next product begin before this sum is done: overlap both in a ring (collective matmul)"
    ),
    "collective-permute": (
        "send earlier: what it sends is ready before the op in front of it, which does not need it; in a ring, begin"
        " the next step's permute before this step's product"
    ),
    "all-to-all": "cut the array into pieces and exchange one while ops work on another",
}


@_sentences.register
def _(found: SlowMeshOrder) -> tuple[str, str]:
    order = show_degrees(dict(found.order))
    return (
        f"collectives take {show_seconds(found.seconds_now)} a step on this mesh and"
        f" {show_seconds(found.seconds_then)} with its axes in the order {order}; most of it the {found.collective}"
        f" over {_axes(found.axes)}, now on {found.now}, then on {found.then}",
        f"make the mesh as {order}, outermost first",
    )


@_sentences.register
def _(found: PaddedArrays) -> tuple[str, str]:
    many = f"{found.count} arrays {found.shape}" if found.count > 1 else str(found.shape)
    held = found.count * found.shape.bytes
    return (
        f"{many} of {show_bytes(held)} take {show_bytes(found.stored_bytes)} in memory,"
        f" {found.stored_bytes / held:.3g} times their elements: their tiles are not filled",
        "make the last dim a multiple of 128 and the one before it of 8 (bf16: 16, 8 bits: 32), as one device holds"
        " them: merge small dims, or split another dim",
    )


@_sentences.register
def _(found: RedundantCompute) -> tuple[str, str]:
    share = found.flops / found.total_flops
    which = "all products" if share == 1 else f"products with {show_percent(share)} of the flops"
    return (
        f"{which} are the same on all {found.degree} devices along {found.axis}:"
        f" {show_flops(found.wasted_flops)} a device and step for nothing",
        f"split a dim of these products over {found.axis}: give the arguments themselves a sharding with {found.axis}"
        " (an annotation that nothing applies has no effect), or constrain a dim of the activations to it",
    )


@_sentences.register
def _(found: UnevenStages) -> tuple[str, str]:
    axes, idle = "*".join(found.axes), 1 - found.mean_flops / found.busiest_flops
    return (
        f"along {axes} the busiest device does {show_flops(found.busiest_flops)} in this branch and the average one"
        f" {show_flops(found.mean_flops)}; the others wait {show_percent(idle)} of it",
        f"give every stage along {axes} the same work: move layers from the longest branch to the others",
    )


@_sentences.register
def _(found: ReplicatedParameter) -> tuple[str, str]:
    over = _axes(found.axes)
    more = f", as {' and '.join(found.others)}, has" if found.others else " has"
    why = f"its rule splits it over {over}"
    if found.sharded_share is not None:
        why = f"{found.sharded_share:.0%} of {found.tree} is split over {over}"
    return (
        f"{found.name} {found.shape}{more} a copy on each of {found.degree} devices along {over}; {why}:"
        f" {show_bytes(found.bytes)} a device held for nothing",
        f"put it where it belongs before the step: a NamedSharding with {over} for {found.name}, given to device_put,"
        " to jit's in_shardings, or to the function that makes it",
    )


@_sentences.register
def _(found: ReplicatedStates) -> tuple[str, str]:
    many = f"{found.count} arrays of {found.tree}, as {found.name} {found.shape}," if found.count > 1 else found.name
    has = "have" if found.count > 1 else f"{found.shape} has"
    return (
        f"{many} {has} a copy on each of {found.degree} devices along {_axes(found.axes)}, which splits {found.like}:"
        f" {show_bytes(found.bytes)} a device held for nothing",
        "make the optimizer's state from parameters that are split already, or give it their shardings: jit of"
        " optimizer.init with out_shardings",
    )


@_sentences.register
def _(found: ReplicatedBatch) -> tuple[str, str]:
    return (
        f"{found.name} {found.shape} is whole on each of {found.degree} devices along {found.axis}, which splits no"
        " other data: they work on the same examples, and parameters or activations move instead",
        f"split its first dim over {found.axis} before the step: device_put with a NamedSharding, or jit's"
        " in_shardings",
    )


@_sentences.register
def _(found: NotDonated) -> tuple[str, str]:
    trees = " and ".join(found.trees)
    many = f"{found.count} arrays of {trees}, the largest {found.name} {found.shape}, come back updated and keep their"
    one = f"{found.name} {found.shape} comes back updated and keeps its"
    numbers = [tree[5:-1] for tree in found.trees if tree.startswith("args[")]
    names = [repr(tree) for tree in found.trees if not tree.startswith("args[")]
    donated = [f"donate_argnums=[{', '.join(numbers)}]"] * bool(numbers)
    donated += [f"donate_argnames=[{', '.join(names)}]"] * bool(names)
    jitted = f"jax.jit(…, {', '.join(donated)})"
    if any(tree.startswith("dynamic_") for tree in found.trees):
        jitted = "eqx.filter_jit(…, donate='all')"  # it has names of its own for what it jits
    return (
        f"{many if found.count > 1 else one} old buffers: {show_bytes(found.bytes)} a device for values that a loop of"
        " such steps needs no more",
        f"{jitted}, and do not use what was handed over after the call",
    )


@_sentences.register
def _(found: MissingSum) -> tuple[str, str]:
    name = f"result {found.name}" if found.name else "the result"
    return (
        f"{name} {found.shape} is said to be the same on all {found.degree} devices along {_axes(found.axes)}, and each"
        " has its own: shard_map does not check that (check_vma=False)",
        f"sum it over {_axes(found.axes)} (psum) before it leaves shard_map, or name {_axes(found.axes)} in out_specs;"
        " check_vma=True refuses it",
    )


@_sentences.register
def _(found: GatheredTwice) -> tuple[str, str]:
    how = (
        f"by {found.num_gathers} all-gathers" if found.num_gathers > 1 else f"in each of {found.iterations} iterations"
    )
    return (
        f"{found.tensor} {found.shape} is gathered over {_axes(found.axes)} {how} of {found.phase}:"
        f" {show_bytes(found.bytes)} a device and step more than once",
        "gather it once and hand the result on; before the loop where memory allows",
    )


@_sentences.register
def _(found: ReducedTwice) -> tuple[str, str]:
    over = _axes(found.equal_axes)
    makes = f"makes {found.degree} times the value" if found.is_sum else "changes nothing"
    return (
        f"{found.collective} of {found.shape} over {_axes(found.axes)} in {found.phase}, but all {found.degree}"
        f" devices along {over} hold the same: it {makes}",
        f"leave {over} out of this reduction: the value is reduced already; shard_map with check_vma=True tells which"
        " values still vary",
    )


@_sentences.register
def _(found: SlicedAllReduce) -> tuple[str, str]:
    return (
        f"all-reduce of {found.array} over {_axes(found.axes)} in {found.phase}, of which every device then takes a"
        f" share: {show_bytes(found.reduced_bytes)} are sent back to all for nothing",
        (
            "the program takes its share at once, yet the compiler sums it whole: sum it with psum_scatter in"
            " shard_map, or store the parameter split along another dim"
        )
        if found.is_sliced_at_once
        else (
            "constrain the sum (the gradient) to the sharding of what it is added to (the parameter), before anything"
            " is computed with it; take norms of the shards"
        ),
    )


@_sentences.register
def _(found: UnexpectedCollective) -> tuple[str, str]:
    primitive, axes = found.primitive, _axes(found.axes)
    because, fix = {
        UnexpectedBecause.NOT_EXPECTED: (
            "no plan has it",
            "compare the shardings of its operands with the plan's",
        ),
        UnexpectedBecause.MOVES_SPLIT: (
            f"the partitioner moves a split from one dim to another to make {primitive}",
            "give the operands of this op shardings that fit each other, or reshard on purpose where it is cheapest",
        ),
        UnexpectedBecause.NEEDS_WHOLE: (
            f"{primitive} needs whole lines of its array, and the partitioner moves what is split to give it to all",
            f"do {primitive} in shard_map, with a dim split that it does not run along",
        ),
        UnexpectedBecause.REARRANGES: (
            f"{primitive} changes the dim that is split, so the data must follow",
            f"keep the split dim out of this {primitive}: split another dim before it, or do it in shard_map",
        ),
        UnexpectedBecause.GATHERS_BATCH: (
            "it gathers a computed value over an axis that splits the batch, so every device along it does the rest"
            " for the whole batch",
            f"constrain the operand of {primitive} to stay split over {axes}",
        ),
    }[found.because]
    times = f", {found.count} times" if found.count > 1 else ""
    return (
        f"{found.collective} of {found.array} over {axes} in {found.phase}{times},"
        f" {show_bytes(found.bytes)} a device and step: {because}",
        fix,
    )
