"""Padding of the vocabulary, heads and experts, and copies of kv heads, for meshes that do not divide them.

GPT-2 XL has 50,257 tokens and 25 heads, which tp=4 does not divide, so its arrays get rows and heads of zeros until it
does, as Megatron-LM pads the vocabulary (arXiv:1909.08053). Gemma 2B has one kv head: over tp=2 each device has a copy
of it, and half of the query heads. Of a model with 60 experts, ep=8 stores 64. `padded` returns the padded model, which
determines the ops of a step and the shapes of arrays on a mesh. Configs, forward passes, checkpoints and exports keep
the original model.

Logits beyond the vocabulary are minus infinity (`models.ends.logits`), so they have no probability and no gradient. A
head of zeros has values of zero, and the output weights that multiply it are zero, so it adds nothing and has no
gradient either. The router has no logits for experts of zeros, so it sends them no tokens. Gradients of copies are
summed (`training.copies`), so that all copies stay equal.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from meshwright.description.step.model import Model, ModelConfig
from meshwright.description.step.parameter_tree import Parameter, leaves, num_parameters, parameters
from meshwright.description.step.rules import Rules
from meshwright.description.step.strategy import Strategy
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape

AnyModel = TypeVar("AnyModel", bound=Model)


def is_padded(model: Model, name: str) -> bool:
    """Whether the dims of a logical axis may be padded, or their kv heads copied. False for models written as ops."""
    return name in ("vocab", "kv_heads", "expert") and isinstance(model, ModelConfig)


def padded(model: AnyModel, mesh: MeshShape, rules: Rules) -> AnyModel:
    """Return the model with vocabulary, kv heads and experts padded until the mesh axes of `rules` divide them.

    If there are fewer kv heads than devices to split them over, they are copied, if all copies get equally many query
    heads. Sizes that cannot be padded or copied are unchanged, so that later checks reject the mesh.
    """
    return _padded(model, *(mesh.degree(rules[name]) for name in ("vocab", "kv_heads", "expert")))


@lru_cache(maxsize=1 << 10)
def _padded(model: AnyModel, vocab_parts: int, head_parts: int, expert_parts: int) -> AnyModel:
    """Return the padded model if these numbers of devices split its vocabulary, its kv heads and its experts."""
    if not isinstance(model, ModelConfig):
        return model
    # The padding is smaller than the vocabulary, so that `runtime.arrays.fit` can tell it from copies.
    vocab, inputs = _padded_rows(model.vocab, vocab_parts), model.layer_inputs
    inputs = inputs and replace(inputs, vocab=_padded_rows(inputs.vocab, vocab_parts))
    kv_heads, heads = model.num_kv_heads, model.num_heads
    attention, full = model.attention, model.attention.full_heads
    if full is not None:
        # Query heads of both kinds of layers are as many, so kv heads are copied and not padded.
        if all(_divides_or_copies(own, heads, head_parts) for own in (kv_heads, full.num_kv_heads)):
            kv_heads = max(kv_heads, head_parts)
            attention = replace(attention, full_heads=replace(full, num_kv_heads=max(full.num_kv_heads, head_parts)))
    elif kv_heads > head_parts and model.attention.qk_norm != "all heads":
        kv_heads += -kv_heads % head_parts
        heads = kv_heads * model.num_groups
    elif not head_parts % kv_heads and not heads % head_parts and model.attention.latent is None:
        kv_heads = head_parts
    experts = model.experts and model.experts.padded(expert_parts)
    sizes = {"vocab": vocab, "num_kv_heads": kv_heads, "num_heads": heads}
    found = replace(model, **sizes, experts=experts, attention=attention, layer_inputs=inputs)
    return model if found == model else found


def _padded_rows(rows: int, parts: int) -> int:
    """Return the rows of a table of tokens, padded until `parts` devices can split them if there are more rows."""
    return rows + (-rows % parts if rows > parts else 0)


def _divides_or_copies(kv_heads: int, heads: int, parts: int) -> bool:
    """Whether `parts` devices can each have equally many kv heads, or one copied kv head and equally many query heads.

    The first needs `kv_heads` to be a multiple of `parts`; the second `parts` of `kv_heads`, and `heads` of `parts`.
    """
    return kv_heads % parts == 0 or (parts % kv_heads == 0 and heads % parts == 0)


def kv_copies(model: Model, mesh: MeshShape, rules: Rules) -> tuple[tuple[str, int], ...]:
    """Return the path of each parameter whose kv heads a mesh copies, and the number of copies of each head."""
    stored = padded(model, mesh, rules)
    if not isinstance(model, ModelConfig) or not isinstance(stored, ModelConfig):
        return ()
    return _copies(model, stored)


@lru_cache(maxsize=1 << 10)
def _copies(model: ModelConfig, stored: ModelConfig) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    after = dict(leaves(parameters(stored)))
    for path, parameter in leaves(parameters(model)):
        if is_of_kv_heads(parameter):
            dim = parameter.axes.index("kv_heads")
            found.append((path, after[path].shape[dim] // parameter.shape[dim]))
    return tuple((path, copies) for path, copies in found if copies > 1)


def is_of_kv_heads(parameter: Parameter) -> bool:
    """Whether a parameter belongs to kv heads and is copied with them."""
    return "kv_heads" in parameter.axes and "group" not in parameter.axes


def divides_padded(model: Model, mesh: MeshShape, rules: Rules) -> bool:
    """Whether the axes that split a model's kv heads and experts divide them after padding or copying."""
    stored = padded(model, mesh, rules)
    if not isinstance(stored, ModelConfig):
        return True
    experts = stored.experts.num_stored if stored.experts else 0
    full = stored.with_full_heads.num_kv_heads
    return not (
        full % mesh.degree(rules["kv_heads"])
        or stored.num_kv_heads % mesh.degree(rules["kv_heads"])
        or experts % mesh.degree(rules["expert"])
    )


def describe_padding(model: Model, mesh: MeshShape, rules: Rules) -> str:
    """Describe padding and copies on a mesh: `vocab padded from 257 to 260 and 2 copies of each of 8 kv heads`."""
    stored = padded(model, mesh, rules)
    if not isinstance(model, ModelConfig) or not isinstance(stored, ModelConfig):
        return ""
    found = [f"vocab padded from {model.vocab:,} to {stored.vocab:,}"] if stored.vocab != model.vocab else []
    found += _describe_heads(model.num_kv_heads, stored.num_kv_heads)
    if model.attention.full_heads and stored.attention.full_heads:
        heads = (model.attention.full_heads.num_kv_heads, stored.attention.full_heads.num_kv_heads)
        found += [f"{text} of layers without a window" for text in _describe_heads(*heads)]
    if model.experts and stored.experts and stored.experts.padding:
        found.append(f"experts padded from {model.experts.count} to {stored.experts.num_stored}")
    return " and ".join(found)


def _describe_heads(own: int, stored: int) -> list[str]:
    """Describe how kv heads are padded or copied; [] if they are not."""
    if (copies := stored // own) > 1:
        return [f"{copies} copies of {'its one kv head' if own == 1 else f'each of {own} kv heads'}"]
    return [f"kv_heads padded from {own} to {stored}"] if stored != own else []


def padding_notes(model: Model, mesh: MeshShape, rules: Rules) -> tuple[str, ...]:
    """Return a plan's note on padding and copies; () if there are none."""
    if not (what := describe_padding(model, mesh, rules)):
        return ()
    more = num_parameters(padded(model, mesh, rules)) / num_parameters(model) - 1
    return (f"{mesh} has {what}: {more:.2%} more parameters, which memory and flops include and MFU does not",)


def check_padding(model: Model, mesh: MeshShape, rules: Rules, strategy: Strategy) -> None:
    """Raise if an optimizer's update of padded or copied arrays would differ from that of the original ones."""
    what, optimizer = describe_padding(model, mesh, rules), strategy.optimizer
    if what and optimizer in ("adafactor", "muon"):
        raise MeshwrightError(
            f"{optimizer} updates an array by its shape, and mesh {mesh} has {what}; use adamw, lion or sgd, or a"
            f" mesh that divides them"
        )
