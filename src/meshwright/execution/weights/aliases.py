"""Tensors of Hugging Face checkpoints with other names than transformers writes, and tensors that are not weights.

Early checkpoints were saved from the model without its head, so names lack the first part (`h.0.attn.c_attn.weight` of
GPT-2), with buffers that are recomputed (masks, rotary frequencies), or with a tied table twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from meshwright.description.families.family import PublishedFamily
from meshwright.errors import MeshwrightError
from meshwright.execution.weights.directory import Tensor

BUFFERS = (r"rotary_emb\.inv_freq$",)
"""Patterns of tensors in any family that are computed from its config.json."""

HEAD = "lm_head.weight"
"""Name of the unembedding in families that always tie it."""


def with_known_names(
    tensors: Mapping[str, Tensor], known: frozenset[str], family: PublishedFamily
) -> dict[str, Tensor]:
    """Return a directory's tensors by the names in `known`, without tensors that are not weights.

    Raises:
        MeshwrightError: if a table that config.json ties to another is stored too and differs from it.
    """
    prefixes = sorted({name.partition(".")[0] for name in known})
    ignored = re.compile("|".join((*BUFFERS, *family.buffers)))
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        longer = (f"{prefix}.{name}" for prefix in prefixes)
        ours = name if name in known else next((each for each in longer if each in known), name)
        if ours in known or not ignored.search(name):
            found[ours] = replace(tensor, name=ours)
    return _with_one_table(found, known, family)


def _with_one_table(found: dict[str, Tensor], known: frozenset[str], family: PublishedFamily) -> dict[str, Tensor]:
    """Remove the second copy of a tied table."""
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
