"""Every collective of a step of a server, after weight-stationary layouts in one and two dims (arXiv:2211.05102).

The stream is split over fsdp. The first products of a block are summed over fsdp, its last over sp and tp; with fsdp=1
that is Megatron's layout in one dim. Of prompts the stream is split over sp and tp too, along the tokens. A cache split
by batch or sequence moves queries to where it lies and what comes out of attention back (arXiv:2211.05102, section
3.3; scaling book, jax-ml.github.io/scaling-book/inference).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from meshwright.hardware import dtype_bytes
from meshwright.record import Collective, Kind
from meshwright.step import TENSOR_AXES, ModelConfig, Serving, ServingLayout

_X, _Y = ("fsdp",), TENSOR_AXES


def serving_collectives(serving: Serving, layout: ServingLayout, batch: int) -> tuple[Collective, ...]:
    """Every collective of a step with more than one device in its group, in bytes per device and step."""
    own = math.ceil(batch / layout.num_groups)
    rows = own * (serving.prompt_len if serving.phase == "prefill" else 1)
    moves = _Moves(serving, layout, rows)
    return (*moves.blocks(), *moves.attention(), *moves.mlps(), *moves.experts(), *moves.ends(own))


@dataclass(frozen=True)
class _Moves:
    """The collectives of a step with `rows` tokens in each group of devices."""

    serving: Serving
    layout: ServingLayout
    rows: int

    @property
    def _model(self) -> ModelConfig:
        """The model that is served."""
        return self.serving.model

    @cached_property
    def _degrees(self) -> dict[str, int]:
        """The degree of each axis."""
        return self.layout.mesh.degrees

    @cached_property
    def _token_bytes(self) -> float:
        """The bytes of one element of every token."""
        return self.rows * dtype_bytes(self.serving.activation_dtype)

    def _times(self, count: int, kind: Kind, axes: tuple[str, ...], nbytes: float, array: str) -> Iterator[Collective]:
        """A collective of so many bytes that runs `count` times, over its axes of more than one device, if any."""
        axes = tuple(axis for axis in axes if self._degrees[axis] > 1)
        if axes and count:
            size = int(nbytes) * count
            yield Collective(kind=kind, axes=axes, phase="forward", bytes=size, count=count, array=array)

    def _bytes(self, width: float) -> float:
        """The bytes of an array with so many elements for each token."""
        return width * self._token_bytes

    def _over(self, size: float, axes: tuple[str, ...]) -> float:
        """A size split over some axes."""
        return size / math.prod(self._degrees[axis] for axis in axes)

    def blocks(self) -> Iterator[Collective]:
        """The stream into and out of the blocks of a layer, and the sums of squares that its norms want of it."""
        model = self._model
        stream = self._bytes(self._over(model.embed, _X))
        for name in ("block",) if model.parallel_blocks else ("attention", "mlp"):
            yield from self._times(model.num_layers, "all-reduce", _X, 4 * self.rows, f"{name} norm")
            yield from self._summed(model.num_layers, stream, name)

    def _summed(self, layers: int, nbytes: float, name: str) -> Iterator[Collective]:
        """The last products of a block, summed over sp and tp: onto their tokens of a prompt, else whole.

        Whole is one collective and not two, which is what counts where there is little to send.
        """
        if self.serving.phase == "decode":
            yield from self._times(layers, "all-reduce", _Y, nbytes, f"{name} output")
            return
        yield from self._times(layers, "all-gather", _Y, nbytes, f"{name} input")
        yield from self._times(layers, "reduce-scatter", _Y, nbytes, f"{name} output")

    def attention(self) -> Iterator[Collective]:
        """Queries, keys and values on their way to the cache, and what comes back."""
        if self._model.latent:
            yield from self._latent_attention()
        elif self.serving.phase == "prefill":
            yield from self._prompts()
        else:
            yield from self._tokens()

    def _prompts(self) -> Iterator[Collective]:
        """Of prompts each device of fsdp takes some queries, and all keys and values before them."""
        model, layers = self._model, self._model.num_layers
        queries, pairs = self._widths()
        yield from self._times(layers, "reduce-scatter", _X, self._bytes(queries + pairs), "queries, keys and values")
        yield from self._times(layers, "all-gather", _X, self._bytes(pairs), "keys and values")
        yield from self._times(
            layers, "all-gather", _X, self._bytes(self._over(model.num_heads * model.value_dim, _Y)), "heads"
        )

    def _tokens(self) -> Iterator[Collective]:
        """Of single tokens, by how the cache is split."""
        model, layers, cache = self._model, self._model.num_layers, self.layout.cache
        queries, pairs = self._widths()
        heads = self._over(model.num_heads * model.value_dim, _Y)
        sums: Kind = "reduce-scatter" if cache == "batch" else "all-reduce"
        yield from self._times(layers, sums, _X, self._bytes(queries + pairs), "queries, keys and values")
        if cache == "batch":
            yield from self._times(layers, "all-to-all", ("sp",), self._over(self._bytes(queries), _X), "queries")
            yield from self._times(layers, "all-to-all", ("sp",), self._over(self._bytes(heads), _X), "heads")
            yield from self._times(layers, "all-gather", _X, self._bytes(heads), "heads")
        elif cache == "sequence":
            degree = self.layout.mesh.sp
            yield from self._times(layers, "all-gather", ("sp",), degree * self._bytes(queries), "queries")
            yield from self._merged(("sp",), _X, degree * heads, model.num_heads / self.layout.mesh.tp)

    def _merged(
        self, scattered: tuple[str, ...], summed: tuple[str, ...], width: float, num_heads: float
    ) -> Iterator[Collective]:
        """Partial attention over parts of a sequence: each head's maximum, then its weighted results and their sum.

        Flash decoding's merge (pytorch.org/blog/flash-decoding), over devices. Results and sums are scattered back onto
        heads over some axes, and whole after that over others.
        """
        layers, scalars = self._model.num_layers, 4 * self.rows * num_heads
        results = self._bytes(width) + scalars
        yield from self._times(layers, "all-reduce", (*summed, *scattered), scalars, "maxima")
        yield from self._times(layers, "reduce-scatter", scattered, results, "heads and sums")
        yield from self._times(layers, "all-reduce", summed, self._over(results, scattered), "heads and sums")

    def _latent_attention(self) -> Iterator[Collective]:
        """Latents are summed over fsdp; queries in the latent's space go to where the cache lies, over tp."""
        model, layers, latent = self._model, self._model.num_layers, self._model.latent
        assert latent is not None
        kept = latent.kv_rank + latent.rope_head_dim
        narrow = kept + (latent.query_rank or self._over(model.num_heads * model.query_key_dim, _Y))
        yield from self._times(layers, "all-reduce", _X, self._bytes(narrow), "latents")
        if self.serving.phase == "prefill" or self.layout.cache == "heads":
            return
        whole = self._bytes(model.num_heads * kept)
        if self.layout.cache == "sequence":
            yield from self._times(layers, "all-gather", _Y, whole, "queries")
            yield from self._merged(_Y, _X, model.num_heads * latent.kv_rank, model.num_heads)
            return
        own = self._over(model.num_heads * latent.kv_rank, _Y)
        yield from self._times(layers, "all-to-all", _Y, self._over(whole, (*_X, *_Y)), "queries")
        yield from self._times(layers, "all-to-all", _Y, self._over(self._bytes(own), _X), "heads")
        yield from self._times(layers, "all-gather", _X, self._bytes(own), "heads")

    def _widths(self) -> tuple[float, float]:
        """The elements of a device's queries, and of its keys and values, of a token."""
        model = self._model
        pairs = self._over(model.num_kv_heads * (model.query_key_dim + model.value_dim), ("tp",))
        return self._over(model.num_heads * model.query_key_dim, _Y), pairs

    def mlps(self) -> Iterator[Collective]:
        """The hidden activations of mlps, and of those shared beside experts, summed over fsdp."""
        model, experts = self._model, self._model.experts
        yield from self._hidden(model.num_dense_layers, model.mlp, 1.0)
        if experts and experts.shared_mlp:
            yield from self._hidden(model.num_layers - model.num_dense_layers, experts.shared_mlp, 1.0)

    def _hidden(self, layers: int, mlp: float, copies: float) -> Iterator[Collective]:
        """Hidden activations: the first products' sums scattered over fsdp, and gathered again once multiplied."""
        hidden = copies * self._bytes(self._over(mlp, _Y))
        yield from self._times(layers, "reduce-scatter", _X, (2 if self._model.gated else 1) * hidden, "mlp hidden")
        yield from self._times(layers, "all-gather", _X, hidden, "mlp hidden")

    def experts(self) -> Iterator[Collective]:
        """Tokens on their way to the devices of their experts and back, once to each device that has any of them.

        A token's k experts are on ep (1 - (1 - 1 / ep)^k) devices, where each is as likely. Every device of sp and tp
        sends its part of a token, which is gathered where it arrives, and summed onto parts before it goes back.
        """
        model, experts, ep = self._model, self._model.experts, self.layout.mesh.ep
        if experts is None:
            return
        layers = model.num_layers - model.num_dense_layers
        yield from self._times(layers, "all-reduce", _X, 4 * self.rows * experts.count, "router")
        yield from self._hidden(layers, experts.mlp, experts.num_active)
        if ep > 1:
            copies = ep * (1 - (1 - 1 / ep) ** experts.num_active)
            sent = copies * self._bytes(self._over(model.embed, _X))
            for name in ("dispatch", "combine"):
                yield from self._times(layers, "all-to-all", ("ep",), self._over(sent, _Y), f"experts {name}")
            yield from self._times(layers, "all-gather", _Y, sent, "experts input")
            yield from self._times(layers, "reduce-scatter", _Y, sent, "experts output")

    def ends(self, sequences: int) -> Iterator[Collective]:
        """The lookup in a split table; of each sequence's last token the logits, and the best of each part of them."""
        model, size = self._model, dtype_bytes(self.serving.activation_dtype)
        stream = self._over(model.embed, _X)
        if self.serving.phase == "decode":
            yield from self._times(1, "all-reduce", _Y, self._bytes(stream), "embedding")
        else:
            yield from self._times(1, "reduce-scatter", _Y, self._bytes(stream), "embedding")
            yield from self._times(1, "all-gather", _Y, sequences * stream * size, "logits input")
        yield from self._times(1, "all-reduce", _X, 4 * sequences * self._over(model.vocab, _Y), "logits")
        yield from self._times(1, "all-gather", _Y, 8 * sequences * self.layout.mesh.degree(_Y), "best tokens")
