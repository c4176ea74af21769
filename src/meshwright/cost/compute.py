"""The time a device computes in each pass of a step: products, attention, elementwise passes over memory, the update.

A product takes what `product_seconds` says of its sizes; what is between products is bound by memory. Products with
weights follow from the declaration; attention and elementwise passes are counted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.cost.achieved import FLASH_BACKWARD, HBM_SHARE, UNFUSED_PASSES, attention_share, product_seconds
from meshwright.cost.flops import NEVER_RECOMPUTED
from meshwright.cost.memory import parameter_elements
from meshwright.cost.traffic import stage_layers
from meshwright.hardware import System, dtype_bytes
from meshwright.mesh import MeshShape
from meshwright.workload import Parameter, Strategy, Workload, leaves, parameters, token_axes, used_shape


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

    That is a stage with most layers, or the last one, which has the logits beside what layers are left for it.
    """
    tokens = workload.tokens / mesh.degree(token_axes()) / strategy.num_microbatches
    # Beside the tokens these axes are all that sizes of ops depend on: a search meets each of them many times.
    ops_mesh = MeshShape(tp=mesh.tp, ep=mesh.ep, pp=mesh.pp)
    return _stage_seconds(_Ops(workload, ops_mesh, system, replace(strategy, num_microbatches=1), tokens))


@lru_cache(maxsize=1 << 14)
def _stage_seconds(ops: _Ops) -> PassSeconds:
    """The passes of one microbatch, whatever the mesh around them."""
    layer, ends, num_layers, stages = ops.layer(), ops.ends(), ops.workload.model.num_layers, ops.mesh.pp
    if stages == 1:
        return layer * num_layers + ends
    most = stage_layers(num_layers, ops.mesh)
    last = max(num_layers - most * (stages - 1), 0)
    return max(layer * most, layer * last + ends, key=lambda stage: stage.total)


def update_seconds(workload: Workload, mesh: MeshShape, system: System) -> float:
    """The optimizer's pass: it reads gradient, parameter and two moments and writes the last three."""
    states = parameter_elements(workload, mesh) * dtype_bytes(workload.param_dtype)
    return 7 * states / (HBM_SHARE * system.hbm_bytes_per_second)


def products(workload: Workload, mesh: MeshShape, tokens: float) -> Iterator[Product]:
    """Every product with weights that a device does for so many tokens, forward."""
    for path, parameter in leaves(parameters(workload.model)):
        if parameter.role == "product":
            yield _product(path, parameter, tokens, workload, mesh)


def _product(path: str, parameter: Parameter, tokens: float, workload: Workload, mesh: MeshShape) -> Product:
    """The product of one weight; what is contracted is the stream, or for a weight back into it all else."""
    dims = dict(zip(parameter.axes, used_shape(parameter, mesh, path), strict=True))
    num_layers, count, rows = parameter.num_layers, 1, tokens
    dims.pop("layers", None)
    if "expert" in dims:
        experts = workload.model.experts
        assert experts is not None
        count = dims.pop("expert")
        rows = tokens * experts.num_active / experts.count * mesh.ep
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
        """One layer; of a model with layers of two kinds the mean of them."""
        inside = [product for product in products(self.workload, self.mesh, self.tokens) if "." in product.path]
        work = PassSeconds(0.0, 0.0, 0.0)
        for product in inside:
            work += self._product(product) * (product.num_layers / self.workload.model.num_layers)
        return work + self._attention() + self._elementwise()

    def ends(self) -> PassSeconds:
        """The logits and their softmax; the lookup is a gather of rows."""
        tokens, model = self.tokens, self.workload.model
        work = PassSeconds(0.0, 0.0, 0.0)
        for product in products(self.workload, self.mesh, self.tokens):
            if "." not in product.path:
                work += self._product(product)
        # float32 logits: written by the product, read for maximum, sum and gradient.
        softmax = self._hbm(3 * 4 * tokens * model.vocab / self.mesh.tp)
        return work + PassSeconds(softmax, 0.0, softmax)

    def _product(self, product: Product) -> PassSeconds:
        """A product forward, and the two of its gradients."""
        inside = "." in product.path
        dtype = (self.strategy.matmul_dtype if inside else None) or self.workload.compute_dtype
        rows, inner, columns = product.rows, product.inner, product.columns

        def seconds(*sizes: float) -> float:
            return product.count * product_seconds(*sizes, system=self.system, dtype=dtype)

        forward = seconds(rows, inner, columns)
        backward = seconds(rows, columns, inner) + seconds(inner, rows, columns)
        if dtype == "fp8":
            # Each operand is read for its largest value, read again and written narrow (torchao, float8 training).
            cast = product.count * 5 * (rows * (inner + 2 * columns) + 2 * inner * columns)
            forward, backward = forward + self._hbm(cast / 3), backward + self._hbm(2 * cast / 3)
        is_again = self.workload.remat == "block" and product.path.rpartition(".")[2] not in NEVER_RECOMPUTED
        return PassSeconds(forward, forward if is_again else 0.0, backward)

    def _attention(self) -> PassSeconds:
        """Scores and their product with the values."""
        model, system = self.workload.model, self.system
        queries, keys = self.tokens * model.num_heads / self.mesh.tp, self.workload.seq_len
        flops = 2 * queries * keys * (model.query_key_dim + model.value_dim)
        if self.strategy.attention == "flash":
            forward = flops / 2 / (attention_share(system) * system.peak(self.workload.compute_dtype))
            again = forward if self.workload.remat == "block" else 0.0
            return PassSeconds(forward, again, FLASH_BACKWARD * forward)
        # Two products a head, [s, h] @ [h, s] and [s, s] @ [s, h]; scores written, masked and normed, and read again.
        rows, heads = self.workload.seq_len, queries / self.workload.seq_len
        dtype = self.workload.compute_dtype
        first = product_seconds(rows, model.query_key_dim, keys, system=system, dtype=dtype)
        second = product_seconds(rows, keys, model.value_dim, system=system, dtype=dtype)
        # Narrow scores are written by the first product, read and written by the softmax, read by the second.
        passes = 4 if self.strategy.fuses else 4 + 2 * UNFUSED_PASSES
        softmax = self._hbm(passes * dtype_bytes(dtype) * queries * keys)
        forward = heads * (first + second) + softmax
        again = 0.0 if self.workload.remat == "none" else forward
        return PassSeconds(forward, again, 2 * forward)

    def _elementwise(self) -> PassSeconds:
        """Norms, residual sums, rotation and activation: each reads its operands and writes its result once."""
        model, tp = self.workload.model, self.mesh.tp
        stream = model.embed / (tp if self.strategy.sequence_parallel else 1)
        width = self._mlp_width() / tp
        heads = (model.num_heads * model.query_key_dim + model.num_kv_heads * model.query_key_dim) / tp
        # A sum reads two and writes one, a norm reads one and writes one; both twice a layer.
        elements = 10 * stream + (3 if model.gated else 2) * width
        elements += 2 * heads if model.positions == "rotary" else 0
        passes = 1 if self.strategy.fuses else UNFUSED_PASSES
        forward = self._hbm(passes * elements * dtype_bytes(self.workload.compute_dtype) * self.tokens)
        again = 0.0 if self.workload.remat == "none" else forward
        return PassSeconds(forward, again, 2 * forward)

    def _mlp_width(self) -> float:
        """The elements of the mlps' inner activations for a token, the mean over layers."""
        model, experts = self.workload.model, self.workload.model.experts
        if experts is None:
            return model.mlp
        sparse = experts.num_active * experts.mlp + experts.shared_mlp
        return (model.num_dense_layers * model.mlp + (model.num_layers - model.num_dense_layers) * sparse) / (
            model.num_layers
        )

    def _hbm(self, nbytes: float) -> float:
        """The time of a pass over memory."""
        return nbytes / (HBM_SHARE * self.system.hbm_bytes_per_second)
