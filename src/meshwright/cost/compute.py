"""The time a device computes in each pass of a step: products, attention, elementwise passes over memory, the update.

A product takes what `product_seconds` says of its sizes; what is between products is bound by memory. Products with
weights follow from the declaration; attention and elementwise passes are counted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.cost.achieved import HBM_SHARE, product_seconds
from meshwright.cost.attention import fused_attention_time
from meshwright.cost.efficiency import gpu_figures, layer_shares
from meshwright.cost.elementwise import (
    LOGITS_BYTES,
    LOGITS_BYTES_ONE_BY_ONE,
    UPDATE_PASSES,
    UPDATE_PASSES_ONE_BY_ONE,
    layer_passes,
    softmax_passes,
)
from meshwright.cost.flops import SCORES_AGAIN, is_recomputed
from meshwright.cost.model_states import parameter_elements
from meshwright.cost.ticks import before_stages, of_stages, stage_slots
from meshwright.cost.traffic import is_of_weights, stage_layers, weight_collectives
from meshwright.hardware import System, dtype_bytes
from meshwright.mesh import MeshShape
from meshwright.record import Phase
from meshwright.workload import (
    DEFAULT,
    STACKED,
    Parameter,
    Strategy,
    Workload,
    leaves,
    parameters,
    sent_copies,
    sent_tokens,
    token_axes,
    used_shape,
)


@dataclass(frozen=True)
class PassSeconds:
    """The seconds one device computes in a step's passes, if nothing else held it up."""

    forward: float
    recompute: float
    backward: float

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.recompute + self.backward

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(
            self.forward + other.forward, self.recompute + other.recompute, self.backward + other.backward
        )

    def __mul__(self, times: float) -> PassSeconds:
        return PassSeconds(times * self.forward, times * self.recompute, times * self.backward)


@dataclass(frozen=True)
class Product:
    """[rows, inner] @ [inner, columns] on one device, `count` times in a row (experts)."""

    path: str
    rows: float
    inner: int
    columns: int
    count: int
    num_layers: int


def microbatch_seconds(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> PassSeconds:
    """The passes of one microbatch through the slowest stage of a pipeline.

    That is a stage with most layers, or the last one, which has the logits beside what layers are left for it; stages
    in lockstep share the logits, and the plain layers before those of experts where they can.
    """
    staged, before = of_stages(workload, mesh, strategy), before_stages(workload, mesh, strategy)
    ops = _ops(staged, mesh, system, strategy)
    layer, ends = _parts_seconds(ops)
    num_layers = staged.model.num_layers
    if mesh.pp == 1 or strategy.lockstep:
        stage = layer * stage_slots(num_layers, mesh, strategy) + ends * (1 / mesh.pp)
        if before is None:
            return stage
        plain, _ = _parts_seconds(_ops(before.workload, before.mesh, system, before.strategy))
        return stage + plain * before.workload.model.num_layers
    most = stage_layers(num_layers, mesh)
    last = max(num_layers - most * (mesh.pp - 1), 0)
    return max(layer * most, layer * last + ends, key=lambda stage: stage.total)


def _ops(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> _Ops:
    """The ops of one microbatch, with what their sizes depend on alone: a search meets each of them many times."""
    tokens = workload.tokens / mesh.degree(token_axes()) / strategy.num_microbatches
    return _Ops(workload, MeshShape(tp=mesh.tp, ep=mesh.ep), system, _ops_strategy(strategy), tokens)


@lru_cache(maxsize=1 << 14)
def _parts_seconds(ops: _Ops) -> tuple[PassSeconds, PassSeconds]:
    """The passes of one microbatch through one layer, and through the logits, whatever the mesh around them."""
    return ops.layer(), ops.ends()


@lru_cache(maxsize=1 << 12)
def _ops_strategy(strategy: Strategy) -> Strategy:
    """The strategy with the defaults where it changes no op; of microbatches, whether there are several."""
    return replace(
        strategy, num_microbatches=min(strategy.num_microbatches, 2), virtual_stages=1, schedule="1f1b", zero_stage=3
    )


def layer_parts(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> dict[str, PassSeconds]:
    """The time of one layer's ops, each compiled by itself, for one microbatch: attention, and all else."""
    tokens = workload.tokens / mesh.degree(token_axes()) / strategy.num_microbatches
    return _Ops(workload, mesh, system, strategy, tokens).layer_alone()


def attention_seconds(
    workload: Workload, mesh: MeshShape, system: System, strategy: Strategy
) -> tuple[PassSeconds, float]:
    """The time of one layer's attention for one microbatch, and of the products with its queries' gradient."""
    return _attention_seconds(_ops(workload, mesh, system, strategy))


@lru_cache(maxsize=1 << 12)
def _attention_seconds(ops: _Ops) -> tuple[PassSeconds, float]:
    """`attention_seconds`, whatever the mesh around the ops."""
    return ops.layer_alone()["attention"], ops.of_queries()


def update_seconds(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy = DEFAULT) -> float:
    """The time of the gradients' norm and of AdamW: in one pass, or op by op as PyTorch's foreach has it."""
    states = parameter_elements(workload, mesh, strategy) * dtype_bytes(workload.param_dtype)
    passes = UPDATE_PASSES if strategy.fuses else UPDATE_PASSES_ONE_BY_ONE
    return passes * states / (HBM_SHARE * system.hbm_bytes_per_second)


def buffer_seconds(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> dict[Phase, float]:
    """The time in which weights are copied out of what they are gathered into, and gradients into theirs.

    On the stream of the ops, so that nothing hides it. Of a buffer each element is read and written once. Into a list
    of shards there is a copy for each member of the group, and before a gather the array is filled with zeros; queries,
    keys and values are one array there.
    """
    if not (strategy.flat_buffers or strategy.lists_shards):
        return {}
    narrow = dtype_bytes(workload.compute_dtype)
    wide = dtype_bytes(strategy.gradient_dtype) if strategy.gradient_dtype else narrow
    # A gather's bytes are read and written; a gradient is read narrow and written in the dtype of its sum.
    factors, launch = {"all-gather": 2.0, "reduce-scatter": 1 + narrow / wide}, 0.0
    if strategy.lists_shards:
        factors = {"all-gather": 3.0, "reduce-scatter": 2.0}
        launch = gpu_figures(system.chip.name).launch_seconds if system.chip.kind == "gpu" else 0.0
    seconds: dict[Phase, float] = {}
    for move in filter(is_of_weights, weight_collectives(workload, mesh, strategy)):
        copies = 0 if move.array.endswith((".key", ".value")) else move.count * mesh.degree(move.axes)
        taken = copies * launch + factors[move.kind] * move.bytes / (HBM_SHARE * system.hbm_bytes_per_second)
        seconds[move.phase] = seconds.get(move.phase, 0.0) + taken
    return seconds


def products(workload: Workload, mesh: MeshShape, tokens: float) -> Iterator[Product]:
    """Every product with weights that a device does for so many tokens, forward."""
    for path, parameter in leaves(parameters(workload.model)):
        if parameter.role == "product":
            yield _product(path, parameter, tokens, workload, mesh)


def _product(path: str, parameter: Parameter, tokens: float, workload: Workload, mesh: MeshShape) -> Product:
    """The product of one weight; what is contracted is the stream, or for a weight back into it all else."""
    dims = dict(zip(parameter.axes, used_shape(parameter, mesh, path), strict=True))
    num_layers, count, rows = parameter.num_layers, 1, tokens
    for name in STACKED:
        dims.pop(name, None)
    if "expert" in dims:
        experts = workload.model.experts
        assert experts is not None
        count = dims.pop("expert")
        # Rows of empty slots are multiplied too.
        rows = tokens * mesh.ep * sent_copies(workload, mesh) / (sent_tokens(workload, mesh) * experts.count)
    contracted = next(iter(dims.values()))
    if next(reversed(dims)) == "embed" and "vocab" not in dims:
        contracted = math.prod(dims.values()) // dims["embed"]
    elif path == "embedding":
        contracted = dims["embed"]
    return Product(path, rows, contracted, math.prod(dims.values()) // contracted, count, num_layers)


@dataclass(frozen=True)
class _Ops:
    """The ops of one microbatch on one device."""

    workload: Workload
    mesh: MeshShape
    system: System
    strategy: Strategy
    tokens: float

    def layer(self) -> PassSeconds:
        """One layer, inside the program of a step."""
        shares = layer_shares(self.system)
        if self.strategy.attention != "scores":
            shares = {**shares, "attention": 1.0}
        alone = self.layer_alone()
        return alone["attention"] * (1 / shares["attention"]) + alone["rest"] * (1 / shares["rest"])

    def layer_alone(self) -> dict[str, PassSeconds]:
        """The parts of one layer, each op by itself; of a model with layers of two kinds the mean of them."""
        inside = [product for product in products(self.workload, self.mesh, self.tokens) if "." in product.path]
        work = PassSeconds(0.0, 0.0, 0.0)
        for product in inside:
            work += self._product(product) * (product.num_layers / self.workload.model.num_layers)
        return {"attention": self._attention(), "rest": work + self._elementwise()}

    def of_queries(self) -> float:
        """The products with the gradient of one layer's queries; of layers of two kinds the mean of them."""
        made = [
            product for product in products(self.workload, self.mesh, self.tokens) if product.path.endswith(".query")
        ]
        whole = sum(product.num_layers * self._product(product).backward for product in made)
        return whole / self.workload.model.num_layers

    def ends(self) -> PassSeconds:
        """The logits and their softmax; the lookup is a gather of rows."""
        tokens, model = self.tokens, self.workload.model
        work = PassSeconds(0.0, 0.0, 0.0)
        for product in products(self.workload, self.mesh, self.tokens):
            if "." not in product.path:
                work += self._product(product)
        logits = tokens * model.vocab / self.mesh.tp
        forward, backward = LOGITS_BYTES if self.strategy.fuses else LOGITS_BYTES_ONE_BY_ONE
        return work + PassSeconds(self._hbm(forward * logits), 0.0, self._hbm(backward * logits))

    def _product(self, product: Product) -> PassSeconds:
        """A product forward, and the two of its gradients."""
        is_rounded = "." in product.path and not product.path.endswith("router")
        dtype = (self.strategy.matmul_dtype if is_rounded else None) or self.workload.compute_dtype
        rows, inner, columns = product.rows, product.inner, product.columns
        # int8 training multiplies for gradients of weights as it would without (`models.quantised`).
        of_weight = self.workload.compute_dtype if dtype == "int8" else dtype

        steps = self._ring_steps(product)
        forward = product.count * self._seconds(rows, inner, columns, dtype, steps=steps)
        # A weight that adds to the stream has its gradient summed over what comes round; of others all is there.
        sums = steps if product.path.endswith(("output", "down")) else 1
        backward = product.count * (
            self._seconds(rows, columns, inner, dtype, steps=steps)
            + self._seconds(inner, rows / sums, columns, of_weight) * sums
        )
        if self.strategy.num_microbatches > 1:
            # The gradient of each microbatch is added to those before: both are read, the sum is written.
            backward += self._hbm(3 * dtype_bytes(self.workload.compute_dtype) * product.count * inner * columns)
        if dtype == "fp8":
            # Each operand is read for its largest value, read again and written narrow (torchao, float8 training).
            cast = product.count * 5 * (rows * (inner + 2 * columns) + 2 * inner * columns)
            forward, backward = forward + self._hbm(cast / 3), backward + self._hbm(2 * cast / 3)
        if dtype == "int8":
            forward += self._hbm(product.count * 5 * (rows * inner + inner * columns))
            backward += self._hbm(product.count * 5 * (rows * columns + inner * columns))
        is_again = is_recomputed(product.path, self.workload.remat, self.strategy)
        return PassSeconds(forward, forward if is_again else 0.0, backward)

    def _ring_steps(self, product: Product) -> int:
        """The steps that a product is done in: where it overlaps with its collective, one for each shard of tp.

        Round a torus a shard goes in two halves, one each way, and so does the product with it.
        """
        is_mixed = "expert" in product.path or "router" in product.path
        if not self.strategy.overlaps_tp or self.mesh.tp == 1 or "." not in product.path or is_mixed:
            return 1
        return self.mesh.tp * (2 if self.system.chip.kind == "tpu" else 1)

    def _attention(self) -> PassSeconds:
        """Scores and their product with the values."""
        model = self.workload.model
        pairs = self.tokens * model.num_heads / self.mesh.tp * self.workload.seq_len
        if self.strategy.attention == "scores":
            return self._scores(pairs)
        flops = pairs * (model.query_key_dim + model.value_dim) * self._window_share()
        head_dim = (model.query_key_dim + model.value_dim) / 2
        kernel = self.strategy.attention
        time = fused_attention_time(flops, self.workload.seq_len, head_dim, kernel, self.system)
        again = time.forward if SCORES_AGAIN[self.workload.remat] == 1.0 else 0.0
        return PassSeconds(time.forward, again, time.backward)

    def _window_share(self) -> float:
        """The share of the keys before it that a query attends to, the mean over layers: (2 w / s) (1 - w / 2 s)."""
        length = self.workload.seq_len

        def share(window: int | None) -> float:
            seen = min(1.0, (window or length) / length)
            return seen * (2 - seen)

        return self.workload.model.mean_over_layers(share)

    def _scores(self, pairs: float) -> PassSeconds:
        """Attention whose scores go through memory: [s, h] @ [h, s] and [s, s] @ [s, h] for each head, in one batch."""
        model, seq_len, size = self.workload.model, self.workload.seq_len, dtype_bytes(self.workload.compute_dtype)
        heads = pairs / seq_len**2
        products = 0.0
        for inner, columns in ((model.query_key_dim, seq_len), (seq_len, model.value_dim)):
            moved = size * heads * (seq_len * inner + inner * columns + seq_len * columns)
            products += self._seconds(heads * seq_len, inner, columns, self.workload.compute_dtype, moved)
        forward, backward = products, 2 * products
        for each in softmax_passes(fuses=self.strategy.fuses, dropout=self.strategy.dropout > 0):
            forward += self._pass(pairs, each.forward_bytes, each.forward_kernels)
            backward += self._pass(pairs, each.backward_bytes, each.backward_kernels)
        return PassSeconds(forward, SCORES_AGAIN[self.workload.remat] * forward, backward)

    def _elementwise(self) -> PassSeconds:
        """Norms, residual sums, rotation and activation."""
        model, tp = self.workload.model, self.mesh.tp
        widths = {
            "stream": model.embed / (tp if self.strategy.sequence_parallel else 1),
            "mlp": self._mlp_width() / tp,
            "heads": (model.num_heads + model.num_kv_heads) * model.query_key_dim / tp,
        }
        forward = backward = 0.0
        for name, each in layer_passes(model, fuses=self.strategy.fuses, dropout=self.strategy.dropout > 0):
            forward += self._pass(self.tokens * widths[name], each.forward_bytes, each.forward_kernels)
            backward += self._pass(self.tokens * widths[name], each.backward_bytes, each.backward_kernels)
        return PassSeconds(forward, 0.0 if self.workload.keeps_read else forward, backward)

    def _mlp_width(self) -> float:
        """The elements of the mlps' inner activations for a token, the mean over layers."""
        model, experts = self.workload.model, self.workload.model.experts
        if experts is None:
            return model.mlp
        sparse = experts.num_active * experts.mlp + experts.shared_mlp
        return (model.num_dense_layers * model.mlp + (model.num_layers - model.num_dense_layers) * sparse) / (
            model.num_layers
        )

    def _pass(self, elements: float, nbytes: float, kernels: int) -> float:
        """The time of kernels that together move so many bytes for each element, given for narrow ones."""
        launch = gpu_figures(self.system.chip.name).launch_seconds if self.system.chip.kind == "gpu" else 0.0
        scale = dtype_bytes(self.workload.compute_dtype) / 2
        return kernels * launch + self._hbm(scale * nbytes * elements)

    def _seconds(
        self,
        rows: float,
        inner: float,
        columns: float,
        dtype: str,
        moved_bytes: float | None = None,
        *,
        steps: int = 1,
    ) -> float:
        """The time of one product, its rows in so many steps."""
        once = product_seconds(rows / steps, inner, columns, system=self.system, dtype=dtype, moved_bytes=moved_bytes)
        return steps * once

    def _hbm(self, nbytes: float) -> float:
        """The time of a pass over memory."""
        return nbytes / (HBM_SHARE * self.system.hbm_bytes_per_second)
