"""LoRA's targets by the names people know them by: a family's modules, as PEFT has them, or the ops of our layers."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from meshwright.errors import MeshwrightError
from meshwright.families.family import LLAMA_NAMES, Published
from meshwright.families.registry import PUBLISHED
from meshwright.step.blocks import program
from meshwright.step.lora import LoRA, adaptable
from meshwright.step.model import ModelConfig

ALL_LINEAR = "all-linear"
"""Every product of the layers that can have an adapter, as PEFT calls it: QLoRA found that it takes all of them to be
as good as training all parameters (arXiv:2305.14314, section 4)."""


def with_adapters(
    model: ModelConfig, *, rank: int, alpha: float | None = None, targets: Sequence[str] = (ALL_LINEAR,)
) -> ModelConfig:
    """The model with low-rank adapters beside some of its products.

    Args:
        model: without adapters.
        rank, alpha: W x + alpha / rank * B A x; alpha is 2 rank where there is none, as torchtune's recipes have it.
        targets: `lora_targets`.
    """
    lora = LoRA(rank=rank, alpha=float(2 * rank if alpha is None else alpha), targets=lora_targets(model, targets))
    return replace(model, lora=lora)


def lora_targets(model: ModelConfig, names: Sequence[str]) -> tuple[str, ...]:
    """The products of a model's layers that some names mean, in the layers' order.

    A name is a module's of the family's checkpoints, as q_proj or c_attn, which may hold several products; Llama's,
    where the family has no such module; a product's own, as `query`; or `all-linear`.

    Raises:
        MeshwrightError: a name that means nothing here, or a product that can have no adapter.
    """
    known = adaptable(program(replace(model, lora=None)))
    modules = module_products(model)
    found: set[str] = set()
    for name in names:
        if name == ALL_LINEAR:
            found.update(known)
        elif name in modules:
            # A module of experts may have the name of one that can be adapted.
            found.update([op for op in modules[name] if op in known] or modules[name][:1])
        elif name in known or any(name in ops for ops in modules.values()):
            found.add(name)
        else:
            choices = [ALL_LINEAR, *(module for module, ops in modules.items() if set(ops) & set(known)), *known]
            near = difflib.get_close_matches(name, choices, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise MeshwrightError(f"lora target {name!r} is no product of {model.name}; {hint}targets are "
                                  f"{', '.join(dict.fromkeys(choices))}")  # fmt: skip
    return tuple(sorted(found, key=lambda op: known.index(op) if op in known else -1))


def module_products(model: ModelConfig) -> dict[str, list[str]]:
    """The products that each module of a family's layers holds, by the module's last name: {"q_proj": ["query"]}."""
    published = next((known for known in PUBLISHED if known.family == model.family), None)
    own = published.names if published else {}
    found: dict[str, list[str]] = {}
    for names in (own, {path: Published(name) for path, name in LLAMA_NAMES.items()}):
        of_family: dict[str, list[str]] = {}
        for path, place in names.items():
            stack, _, op = path.rpartition(".")
            if stack and place.name.endswith(".weight") and "norm" not in op:
                of_family.setdefault(place.name.split(".")[-2], []).append(op)
        found = of_family | found
    return found
