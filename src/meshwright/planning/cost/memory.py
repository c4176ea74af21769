"""Peak memory of a train step on one device, in bytes, term by term."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.step.blocks import program
from meshwright.description.step.ir import Block, Matmul
from meshwright.description.step.layer import CrossEntropy, Stack, alternating
from meshwright.description.step.passes.pipeline import (
    LOGITS,
    is_spmd_pipeline,
    kept_layers,
    pre_pipeline_stack,
    pre_pipeline_strategy,
    stage_layers,
)
from meshwright.description.step.reference import reference_pass
from meshwright.description.step.rules import RULES
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload, with_remat
from meshwright.mesh import MeshShape
from meshwright.planning.cost.activations import Activations
from meshwright.planning.cost.arguments import Kind, batch_bytes, reference_bytes
from meshwright.planning.cost.model_states import States

_ROUNDING = 64
"""Upper bound on the bytes by which rounding all terms down to whole numbers lowers their sum."""

ALWAYS = ("parameters", "optimizer", "activations", "gradients")
"""Memory terms reported even when zero."""


def step_memory(
    workload: Workload,
    mesh: MeshShape,
    strategy: Strategy = DEFAULT,
    *,
    kind: Kind = "cpu",
    is_first_stage: bool = False,
) -> dict[str, int]:
    """Return the bytes per device at the moment of peak memory, by term, and their sum, `peak`.

    The peak is in one of these: a reference model's forward pass, the loss, the backward pass of a layer's attention or
    MLP, the gradient of the embedding table, the update. The terms of `ALWAYS` are always included, others (such as
    `logits`) if they are live at the peak. For a pipeline it is the peak of the fullest stage: the first, which has
    most layers, or the last. The runtime's own memory is not counted, because `System.usable_bytes` excludes it. kind:
    the kind of chip; TPUs pad arrays to tiles. is_first_stage: count the first stage even if the last is fuller.
    """
    return _Step(workload, mesh, strategy, kind).memory(is_first_stage=is_first_stage)


def peak_within(
    workload: Workload, mesh: MeshShape, strategy: Strategy, num_bytes: float, *, kind: Kind = "cpu"
) -> int | None:
    """Return the peak of `step_memory` in bytes; None, which is faster to compute, if it exceeds `num_bytes`."""
    return _Step(workload, mesh, strategy, kind).peak_within(num_bytes)


def host_bytes(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> int:
    """Return the largest number of bytes of one device's activations that are in its host's memory at one time."""
    layers = stage_layers(workload.model.num_layers, mesh) * in_flight(mesh, strategy)
    return int(layers * Activations(workload, mesh, strategy).on_host)


def offloaded_bytes(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> int:
    """Return the bytes of activations that one device copies to its host's memory in a step, and copies back later."""
    layers = stage_layers(workload.model.num_layers, mesh) * strategy.num_microbatches
    return int(layers * Activations(workload, mesh, strategy).on_host)


def in_flight(mesh: MeshShape, strategy: Strategy, *, last: bool = False) -> float:
    """Return the number of microbatches whose activations are live at once on the first pipeline stage, the fullest.

    last: count on the last stage instead. For p stages of v virtual stages each: all microbatches with GPipe; p with
    1F1B, 1 on the last stage; with interleaved 1F1B p + (p - 1) / v (arXiv:2205.05198, appendix B), and (p (v - 1) + 1)
    / v on the last stage (arXiv:2104.04473, section 2.2).
    """
    stages, virtual = mesh.pp, strategy.virtual_stages
    if stages == 1:
        return 1
    if strategy.schedule == "gpipe":
        return strategy.num_microbatches
    most = (stages * (virtual - 1) + 1) / virtual if last else stages
    if virtual > 1 and not last:
        most *= 1 + (stages - 1) / (stages * virtual)
    return min(most, strategy.num_microbatches)


@dataclass(frozen=True)
class _Step:
    """The memory of a step on one device, at each moment that can be the peak.

    The methods named after a moment (`_loss`, `_update`) return bytes by term, without the terms of `_always`.
    """

    workload: Workload
    mesh: MeshShape
    strategy: Strategy
    kind: Kind

    @cached_property
    def states(self) -> States:
        """Training state and gradients."""
        return States(self.workload, self.mesh, self.strategy, is_tiled=self.kind == "tpu")

    @cached_property
    def activations(self) -> Activations:
        """Sizes of the activations of one layer of the last stack, and of the logits."""
        return Activations(self.workload, self.mesh, self.strategy)

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacks of layers that are split over pipeline stages."""
        before = self.before
        return tuple(stack for stack in program(self.workload.model).stacks if stack is not before)

    @cached_property
    def before(self) -> Stack | None:
        """The stack of layers that all stages run before the pipeline; None if there is none."""
        return pre_pipeline_stack(program(self.workload.model), self.mesh, self.strategy)

    @property
    def layers(self) -> int:
        """The number of layers of a stage, empty slots included, without the layers before the pipeline."""
        repeats = self.activations.step.repeats
        return sum(repeats[stack.name].once for stack in self.stacks)

    @cached_property
    def _kinds(self) -> tuple[tuple[Activations, int], ...]:
        """Pairs (activations of a layer, number of such layers on a device), one for each stack of alternating layers.

        If no layers alternate, there is one pair: the activations of the last stack, and the number of all layers.
        """
        group = self.stacks if self._has_donors else alternating(self.stacks)[-1]
        if len(group) == 1:
            return ((self.activations, self.layers),)
        repeats = self.activations.step.repeats
        return tuple((replace(self.activations, stack=stack.name), repeats[stack.name].once) for stack in group)

    @property
    def _has_donors(self) -> bool:
        """Whether layers attend to keys and values of earlier ones; its stacks are then of a few layers each."""
        return any(stack.is_donor for stack in self.stacks)

    @property
    def is_spmd_pipeline(self) -> bool:
        """Whether pipeline stages run in lockstep, as one SPMD program; False without a pipeline."""
        return is_spmd_pipeline(self.mesh, self.strategy)

    @property
    def _is_xla(self) -> bool:
        """Whether XLA compiles the step; frameworks whose pipeline stages are not one SPMD program use PyTorch."""
        return self.strategy.profile.spmd_pipeline

    @property
    def _is_xla_gpu(self) -> bool:
        """Whether XLA compiles the step for GPUs: it gathers weights along their first dim, and loops over experts."""
        return self.kind == "gpu" and self._is_xla

    def peak_within(self, num_bytes: float) -> int | None:
        """Return the peak in bytes; None as soon as a moment exceeds `num_bytes`."""
        most = num_bytes - sum(self._always.values()) + _ROUNDING
        moments = (self._mlp, self._loss, self._attention, self._before)
        if most < 0 or any(sum(moment().values()) > most for moment in moments):
            return None
        peak = self.memory()["peak"]
        return peak if peak <= num_bytes else None

    @cached_property
    def _always(self) -> dict[str, float]:
        """The bytes by term that are live at every moment of a step."""
        states = self.states
        always = {"parameters": states.parameters, "optimizer": states.moments}
        if states.master_weights:
            always["master weights"] = states.master_weights
        always["reference"] = reference_bytes(self.workload, self.mesh, self.strategy, kind=self.kind)
        if self.strategy.profile.memory_bytes:
            always["framework"] = self.strategy.profile.memory_bytes
        always["batch"] = batch_bytes(self.workload, self.mesh, self.strategy)
        return always

    def memory(self, *, is_first_stage: bool = False) -> dict[str, int]:
        """Return the bytes at the moment with most memory, by term, and their sum, `peak`; is_first_stage: no loss."""
        always = self._always
        moments = (
            self._reference(), {} if is_first_stage and self.mesh.pp > 1 else self._loss(), self._attention(),
            self._mlp(), self._before(), self._table(), self._update(),
        )  # fmt: skip
        if held := self.states.held_gradients:
            moments = tuple(terms | {"gradients": held} for terms in moments)
        fullest = max(moments, key=lambda terms: sum(terms.values()))
        terms = {name: int(size) for name, size in (always | fullest).items() if size or name in ALWAYS}
        return terms | {"peak": sum(terms.values())}

    def _reference(self) -> dict[str, float]:
        """Return bytes by term in the reference model's forward pass, which comes first: logits and output head."""
        if (own := reference_pass(self.workload, self.mesh, self.strategy)) is None:
            return {}
        forward = _Step(*own, self.kind)
        logits = 4 * forward.activations.logit_elements + forward.activations.compute_bytes * forward.activations.inputs
        logits += forward._gathered(forward._logits_weight)
        return {"activations": 0.0, "gradients": 0.0, "reference pass": logits}

    def _loss(self) -> dict[str, float]:
        """Return bytes by term in the loss: logits, output head, and the head's gradient.

        The head and its gradient are live together, except with tied embeddings and in PyTorch on GPUs. A frozen head
        has no gradient, and no copy if it is stored whole.
        """
        is_apart = self.kind == "gpu" and not self._is_xla
        both = 1 if self.workload.model.tied_embeddings or is_apart or not self._trains_logits else 2
        is_copied = self._trains_logits or self.mesh.degree(RULES["embed"]) > 1
        weight, narrow = self._gathered(self._logits_weight) if is_copied else 0.0, self._narrow_logits()
        if self.kind == "tpu":
            # The head's gradient is computed from the logits' gradient in the compute dtype, once the float32 logits
            # are freed.
            narrow = max(0.0, narrow - (both - 1) * weight)
        gradients = self._summed()
        is_scattered = self.strategy.zero_stage >= 2 and self.mesh.degree(RULES["embed"]) > 1 and self.mesh.pp == 1
        if self._is_xla_gpu and is_scattered and self.strategy.attention != "scores":
            # XLA:GPU zeroes the stacked gradients of the layers before the loss (with scores in memory, after it); with
            # ZeRO-2 and several microbatches, there are two such arrays.
            is_twice = self.strategy.zero_stage == 2 and self.strategy.num_microbatches > 1
            gradients += (2 if is_twice else 1) * self.states.gradients(self.states.stored[0])
        return {
            "activations": self._kept(last=True),
            "gradients": gradients,
            "logits": self.activations.logits + narrow,
            "gathered": both * weight,
        }

    def _narrow_logits(self) -> float:
        """Return the bytes of the logits' gradient in the compute dtype, next to the float32 logits.

        XLA:GPU always writes it, for two matmuls. The TPU compiler fuses it into each of them, except, with a trained
        head, for a microbatch of one sequence per device with fewer tokens than vocabulary entries, outside a pipeline
        and without a softcap on the logits.
        """
        size = dtype_bytes(self.workload.compute_dtype)
        if self.kind == "cpu" or not self._is_xla or size == 4:
            return 0.0
        if self.kind == "tpu":
            op, local = self.activations.step.ops.forward[LOGITS].matmuls[0], self.activations.step.extents.local_dims
            is_one = local(op.rows[:1]) == 1 and local(op.rows) < local(op.columns) and self.mesh.pp == 1
            losses = (op for op in program(self.workload.model).logits if isinstance(op, CrossEntropy))
            if not (is_one and self._trains_logits) or any(loss.softcap for loss in losses):
                return 0.0
        return size * self.activations.logit_elements

    def _attention(self) -> dict[str, float]:
        """Return bytes by term in the backward pass of a layer's attention."""
        on_tpu = self.kind == "tpu"
        return self._in_layer() | {
            "working": max(own.in_attention(on_tpu=on_tpu) for own, _ in self._kinds) + self._arriving(),
            "gathered": self._of_layer(self._weights(_makes_heads)) + self._prefetched(),
        }

    def _mlp(self) -> dict[str, float]:
        """Return bytes by term in a layer's MLP backward pass, with its weights and the gradient of one weight."""
        return self._in_layer() | {
            "working": max(own.in_mlp + self._is_xla_gpu * own.in_loops for own, _ in self._kinds) + self._arriving(),
            "gathered": self._of_layer(self._weights(_is_mlp) + self._weights(self._is_trained_mlp) / 3)
            + self._prefetched(),
        }

    def _before(self) -> dict[str, float]:
        """Return bytes by term in the backward pass of the layers before the pipeline; empty if there are none."""
        if (before := self.before) is None:
            return {}
        # These layers save nothing: backward recomputes a whole microbatch, which is then live.
        count = before.num_layers
        strategy = pre_pipeline_strategy(self.strategy, before)
        held = Activations(with_remat(self.workload, "none"), self.mesh, strategy, before.name)
        return self._in_layer() | {
            "working": count * held.kept + held.in_attention(on_tpu=self.kind == "tpu"),
            "gathered": count * self.activations.compute_bytes * self._elements(held.ops.matmuls),
        }

    def _in_layer(self) -> dict[str, float]:
        """Return bytes by term that are live in a layer's backward pass, whether in its attention or its MLP."""
        terms = {
            "activations": self._kept(),
            "gradients": max(self.states.gradients(self.states.stored[0]), self._summed()),
        }
        if self.is_spmd_pipeline:
            # The loss and the backward pass of a tick are of different microbatches, so both are live at once.
            terms["logits"] = self.activations.logits + self._narrow_logits()
            # A tick's gradients of a chunk of layers are live next to their sums over microbatches.
            terms["gradients"] += self.states.gradients(self.states.stored[0]) / self.strategy.virtual_stages
        if self.mesh.pp == 1:
            terms["logits gradient"] = self._pending()
        if elements := self._transposed:
            each = dtype_bytes(self.workload.param_dtype) / (self.mesh.fsdp * self.mesh.sp)
            terms["transposed weights"] = each * elements
        if early := self._recomputed_early():
            terms["recomputed early"] = early
        return terms

    def _recomputed_early(self) -> float:
        """Return the bytes of layers that are recomputed, but not the one whose backward pass runs; 0 except on CPUs.

        XLA:CPU removes the optimization barriers of `jax.checkpoint` before it schedules. All layers of a loop's body,
        one of each kind that alternates, are then recomputed before the backward pass of the last of them. A loop that
        runs once is unrolled, so that its layers are beside those of other loops.
        """
        if self.kind != "cpu" or not self._is_xla:
            return 0.0

        def recomputed(stack: Stack) -> float:
            own = replace(self.activations, stack=stack.name)
            return own.in_attention(on_tpu=False) - own.kept + self._of_layer(self._elements(own.ops.matmuls))

        repeats = self.activations.step.repeats
        groups = [(repeats[group[0].name].once, list(map(recomputed, group))) for group in alternating(self.stacks)]
        looped = max((sizes for count, sizes in groups if count > 1), key=sum, default=list[float]())
        live = [*looped, *(size for count, sizes in groups if count == 1 for size in sizes)]
        return sum(live) - max(live)

    @cached_property
    def _transposed(self) -> float:
        """Elements of all layers' weights that a compiler copies once per step into another layout.

        XLA:GPU copies weights that it gathers along another dim than the first: in the matmuls of attention and dense
        MLPs their last one, and that of experts, of which a single layer's are copied in the layer. The TPU compiler
        copies, in pipelines, the weights of queries, keys and values.
        """
        if not self._is_xla_gpu:
            is_lockstep = self.kind == "tpu" and self.is_spmd_pipeline
            return self.layers * self._weights(_makes_heads) if is_lockstep else 0.0
        if self.mesh.fsdp * self.mesh.sp == 1:
            return 0.0
        step = self.activations.step
        regions = step.ops.forward
        mixed = {name for name, ops in regions.items() if any(op.experts for op in ops.matmuls)}
        alike = self._weights(lambda op: op.is_summed and (op.block is Block.ATTENTION or op.region.name not in mixed))
        counts = {stack.name: step.repeats[stack.name].once for stack in self.stacks}
        return self.layers * alike + sum(
            count * self._elements(op for op in regions[name].matmuls if op.experts)
            for name, count in counts.items() if count > 1
        )  # fmt: skip

    def _pending(self) -> float:
        """Return the bytes that the loss leaves live in the layers' backward: the output head's gradient, unreduced.

        With tp, XLA:GPU starts the layers' backward once the gradient of the residual stream is reduced. It computes
        the output head's gradient later, so the logits' gradient and the head's input stay live in its place.
        """
        if not self._trains_logits:
            return 0.0
        if self._is_xla_gpu and self.mesh.tp > 1:
            return self.activations.logits - self.activations.compute_bytes * self.activations.inputs
        return self.activations.compute_bytes * self._logits_weight

    def _table(self) -> dict[str, float]:
        """Return bytes by term while the embedding table's gradient is reduced: the unsharded gradient and its sum."""
        if not self.activations.trains_tables:
            return {}
        is_tied = self.workload.model.tied_embeddings or not self._trains_logits
        return {
            "activations": self._kept() if self.is_spmd_pipeline else 0.0,
            "gradients": max(self.states.gradients(self.states.stored[0]), self._summed()),
            "logits gradient": 0.0 if is_tied else self.activations.compute_bytes * self._logits_weight,
            "table gradient": 2 * self.activations.compute_bytes * self.activations.table_elements,
        }

    def _update(self) -> dict[str, float]:
        """Return bytes by term in the optimizer's update, which needs all gradients for their norm."""
        terms = {"activations": 0.0, "gradients": self.states.gradients(self.states.elements)}
        return terms | ({"working": working} if (working := self.states.muon_working_bytes) else {})

    def _summed(self) -> float:
        """Return the bytes of gradients summed over microbatches; 0 with one microbatch outside an SPMD pipeline."""
        is_summed = self.strategy.num_microbatches > 1 or self.is_spmd_pipeline
        return self.states.gradients(self.states.elements) if is_summed else 0.0

    def _kept(self, *, last: bool = False) -> float:
        """Return the bytes that the fullest pipeline stage saves for backward. last: return those of the last stage.

        GPipe in lockstep also saves the inputs of the loss.
        """
        if self.is_spmd_pipeline:
            cycle = sum(own.kept + self._is_xla_gpu * own.kept_by_loops for own, _ in self._kinds)
            cycles = kept_layers(self.stacks[0].num_layers, self.mesh, self.strategy)
            inputs = self.strategy.num_microbatches * self.activations.compute_bytes * self.activations.stream
            return cycles * cycle + (self.strategy.schedule == "gpipe") * inputs
        flight = in_flight(self.mesh, self.strategy, last=last)
        kept = sum(count * flight * (own.kept + self._is_xla_gpu * own.kept_by_loops) for own, count in self._kinds)
        return kept + flight * self.activations.between_layers

    def _arriving(self) -> float:
        """Return the bytes of the offloaded inputs that are being copied from the host, of this layer and the next."""
        return 2 * self.activations.on_host

    def _prefetched(self) -> float:
        """Return the bytes that PyTorch's FSDP holds for two other layers: weights of one, gradients of the other.

        The weights of the next layer exist twice, in the gather buffer and copied out. The gradients of the last layer
        are in the reduction buffer, which is freed one layer later (torch/distributed/fsdp, `_fsdp_collectives.py`).
        """
        if not self.strategy.profile.flat_buffers:
            return 0.0
        summed = dtype_bytes(self.strategy.gradient_dtype or self.workload.compute_dtype)
        return (2 * self.activations.compute_bytes + 2 * summed) * self._weights(lambda _: True)

    def _gathered(self, elements: float) -> float:
        """Return the bytes of `elements` gathered weight elements; 0 below ZeRO-3, where parameters stay unsharded."""
        return self.activations.compute_bytes * elements if self.strategy.zero_stage == 3 else 0.0

    def _of_layer(self, elements: float) -> float:
        """Return `_gathered` of a layer's weights; quantised ones are dequantised in the layer below ZeRO-3 too."""
        return self.activations.compute_bytes * elements if self.workload.quantize_base else self._gathered(elements)

    def _weights(self, is_one: Callable[[Matmul], bool]) -> float:
        """Return the elements on one device of one layer's weights, for the matmuls that `is_one` selects.

        Of stacks whose layers alternate, the one with most elements counts; other stacks are added up.
        """
        regions, stacks = self.activations.step.ops.forward, program(self.workload.model).stacks
        groups = (stacks,) if self._has_donors else alternating(stacks)
        return sum(max(self._elements(filter(is_one, regions[stack.name].matmuls)) for stack in own) for own in groups)

    def _elements(self, ops: Iterable[Matmul]) -> float:
        """Return the elements of the weights of some matmuls on one device, gathered over fsdp."""
        local = self.activations.step.extents.local_dims
        return sum(local((*op.experts, *op.inner, *op.columns)) for op in ops)

    @property
    def _logits_weight(self) -> float:
        """Elements of the output head's weight on one device, gathered over fsdp."""
        return self._elements(self.activations.step.ops.forward[LOGITS].matmuls)

    @property
    def _trains_logits(self) -> bool:
        """Whether the output head's weight is trained."""
        ops = self.activations.step.ops.forward[LOGITS].matmuls
        return any(op.name not in self.workload.frozen_paths for op in ops)

    def _is_trained_mlp(self, op: Matmul) -> bool:
        """Whether a matmul is of an MLP and its weight is trained."""
        return _is_mlp(op) and op.name not in self.workload.frozen_paths


def _makes_heads(op: Matmul) -> bool:
    """Whether a matmul computes queries, keys or values."""
    return any(dim.letter == "K" for dim in op.columns)


def _is_mlp(op: Matmul) -> bool:
    """Whether a matmul belongs to an MLP or to experts, routers excluded."""
    return op.block is Block.MLP and op.is_rounded
