"""Efficiencies that are predicted with another chip's figures, because a chip has no figures of its own."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.description.hardware.system import System
from meshwright.planning.cost.rates.data_files import tpu_attention_shares, tpu_layer_shares, tpu_products
from meshwright.planning.cost.rates.efficiency import related_gpu

LENDER = "v5p"
"""The TPU whose figures are used for TPUs without figures of their own."""


def borrowed_figures(system: System) -> dict[str, tuple[str, ...]]:
    """Return the names of the efficiencies for which a system uses another chip's figures, by that chip.

    For example `{"v5p": ("attention kernels",)}`; empty for simulated devices, which use a roofline. The figures are
    fractions of peak flops or bandwidth, and are applied to the system's own peaks.
    """
    name = system.chip.name
    if system.chip.kind == "gpu":
        products, attention = related_gpu(name), "h100"
        found = [("products", products), ("collectives in a node", products), ("attention kernels", attention)]
    elif system.chip.kind == "tpu":
        tables: dict[str, Mapping[str, object]] = {
            "products": tpu_products()["chips"],
            "attention kernels": tpu_attention_shares(),
            "ops of a layer together": tpu_layer_shares(),
        }
        found = [(what, name if name in table else LENDER) for what, table in tables.items()]
    else:
        return {}
    lenders = dict.fromkeys(chip for _, chip in found if chip != name)
    return {lender: tuple(what for what, chip in found if chip == lender) for lender in lenders}


def borrowed_notes(system: System) -> tuple[str, ...]:
    """Return a note for each chip whose efficiencies are used for a system (`borrowed_figures`)."""
    name = system.chip.name
    return tuple(
        f"no efficiencies of {name} for {_list(whats)}: those of {lender} are taken, as shares of {name}'s own peak"
        for lender, whats in borrowed_figures(system).items()
    )


def _list(words: tuple[str, ...]) -> str:
    """Join words to `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
