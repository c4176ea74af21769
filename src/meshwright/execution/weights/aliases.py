"""Checkpoints whose tensors have other names than transformers writes today, or that hold tensors besides weights.

Early checkpoints were saved from the model without its head, so that names lack the first part
(`h.0.attn.c_attn.weight` of GPT-2). Some also hold buffers that are recomputed (masks, rotary frequencies), or a tied
embedding table twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from meshwright.description.families.family import PublishedFamily
from meshwright.errors import MeshwrightError
from meshwright.execution.weights.directory import DTYPES, Tensor

BUFFERS = (r"rotary_emb\.inv_freq$",)
"""Regular expressions for names of tensors, in any family, that are computed from config.json and are no weights."""

HEAD = "lm_head.weight"
"""Name of the stored unembedding in families that always tie it to the embedding."""


def with_known_names(
    tensors: Mapping[str, Tensor], known: frozenset[str], family: PublishedFamily
) -> dict[str, Tensor]:
    """Return a directory's tensors by their names in `known`, without tensors that are not weights.

    known: the tensor names that transformers writes for the model. A tensor whose name matches none keeps its name.

    Raises:
        MeshwrightError: config.json ties the unembedding to the embedding, and both are stored and differ.
    """
    tensors = _with_own_experts(tensors, known)
    prefixes = sorted({name.partition(".")[0] for name in known})
    ignored = re.compile("|".join((*BUFFERS, *family.buffers)))
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        longer = (f"{prefix}.{name}" for prefix in prefixes)
        ours = name if name in known else next((each for each in longer if each in known), name)
        if ours in known or not ignored.search(name):
            found[ours] = replace(tensor, name=ours)
    return _with_one_table(found, known, family)


def _with_own_experts(tensors: Mapping[str, Tensor], known: frozenset[str]) -> dict[str, Tensor]:
    """Return the tensors with those of all experts split into each expert's own, if `known` has these.

    Qwen3.5 publishes `experts.gate_up_proj` [experts, 2 mlp, embed] and `experts.down_proj` [experts, embed, mlp].
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
        is_plain = len(tensor.shape) == 3 and tensor.dtype in DTYPES
        if not (is_plain and parts and f"{module}.0.{parts[0]}.weight" in known):
            found[name] = tensor
            continue
        count, rows, columns = tensor.shape
        shape = (rows // len(parts), columns)
        size = tensor.nbytes // (count * len(parts))
        for number in range(count * len(parts)):
            own = f"{module}.{number // len(parts)}.{parts[number % len(parts)]}.weight"
            found[own] = replace(tensor, name=own, shape=shape, start=tensor.start + number * size)
    return found


def _with_one_table(found: dict[str, Tensor], known: frozenset[str], family: PublishedFamily) -> dict[str, Tensor]:
    """Return the tensors without the second copy of a tied embedding table. Raises if the copies differ."""
    table = family.names["embedding"].name
    head = family.names["unembedding"].name if "unembedding" in family.names else HEAD
    if head in known or head not in found or table not in known:
        return found
    copy = found.pop(head)
    if table not in found:
        return found | {table: replace(copy, name=table)}
    if not np.array_equal(found[table].open().view(np.uint8), copy.open().view(np.uint8)):
        raise MeshwrightError(
            f"config.json says tie_word_embeddings, and {copy.file} holds a {head} that is not {table}; a model with"
            f" both has tie_word_embeddings false"
        )
    return found
