"""How long products and all-reduces take on GPUs: fits the constants of `cost.rates.efficiency`, prints their error.

    .venv/bin/python benchmarks/gpu_products.py FILE [--write]

FILE has measured times by chip: `gemm_ops` (the products of a decoder layer, fp16, forward) and `all_reduce`. Every
constant is fitted on all rows of its chip; the held-out error is of each kind of product with constants fitted on the
other three. With --write the constants go to src/meshwright/planning/cost/rates/data/gpu_products.json.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from scipy.optimize import minimize

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import System, parse_system
from meshwright.planning.cost.rates.collective import collective_seconds
from meshwright.planning.cost.rates.data_files import DATA
from meshwright.planning.cost.rates.efficiency import GpuFigures, gpu_product_seconds
from meshwright.planning.cost.rates.links import LinkFigures

CHIPS = {"A100-80GB-SXM": "a100-80gb", "H100-80GB-SXM": "h100"}
# Those that are enabled. A100 and H100: NVIDIA's white papers. Blackwell: github.com/flashinfer-ai/flashinfer (pull
# request 4557: B200 and GB300; the wait statistics of its mixed products: GB200).
MULTIPROCESSORS = {
    "a100-40gb": 108,
    "a100-80gb": 108,
    "h100": 132,
    "h100-96gb-500w": 132,
    "h200": 132,
    "b200": 148,
    "gb200-nvl72": 152,
    "gb300-nvl72": 152,
}
# Of what products reach in bursts, what a GPU sustains at its power limit while its neighbours work too: the tables of
# maximum achievable and sustainable flops of github.com/stas00/ml-engineering, compute/accelerator (commit 0359db8).
# H200 755 of 850; Blackwell as far below Hopper as its sustained shares of the peak, 64.0% (B200) and 67.5% (B300), are
# below 76.3%. The A100's products stay under the 258 that a weaker one, of 300 W, sustains there: they are sustained.
SUSTAINED_SHARES = {
    "a100-40gb": 1.0,
    "a100-80gb": 1.0,
    "h100": 0.888,
    "h200": 0.888,
    "b200": 0.745,
    "gb200-nvl72": 0.745,
    "gb300-nvl72": 0.786,
}
# The same tables: the share of the peak sustained in fp8 over that in bf16, H200 68.4% and 76.3%.
FP8_SHARES = {"h100": 0.897, "h200": 0.897, "b200": 0.969, "gb200-nvl72": 0.969, "gb300-nvl72": 0.978}
LEAST_BYTES = 1 << 20
"""Smaller all-reduces take 10 to 60 us in no order, so they are not fitted."""


class Product(NamedTuple):
    """A measured product."""

    op: str
    m: int
    k: int
    n: int
    seconds: float


class Reduction(NamedTuple):
    """A measured all-reduce inside a node, and its time at full rate."""

    degree: int
    nbytes: float
    ideal_seconds: float
    seconds: float


def products(data: dict, chip: str) -> list[Product]:
    """The products of a layer, as each device of `tp` has them."""
    found = set()
    for row in data["gemm_ops"]:
        if row["chip"] != chip:
            continue
        D, F, tp, m = (row[name] for name in ("d_model", "d_ff", "tp", "tokens"))
        heads = (row["heads"] + 2 * row["kv_heads"]) * D // row["heads"]
        shapes = {
            "qkv": (D, heads // tp),
            "o": (D // tp, D),
            "up": (D, (2 if row["gated"] else 1) * F // tp),
            "down": (F // tp, D),
        }
        found |= {Product(op, m, k, n, row[f"{op}_ms"] / 1e3) for op, (k, n) in shapes.items()}
    return sorted(found)


def reductions(data: dict, chip: str) -> list[Reduction]:
    """The all-reduces inside one node; those across nodes ran over a network of unknown speed."""
    found = []
    for row in data["all_reduce"]:
        degree = row["num_workers"]
        if row["chip"] != chip or row["devices_per_node"] < degree:
            continue
        placement = lay_mesh(parse_system(f"{CHIPS[chip]}:{degree}"), {"X": degree}).placement("X")
        for nbytes, ms in row["size_bytes__median_ms"]:
            ideal = collective_seconds("all-reduce", nbytes, placement).bandwidth_seconds
            found.append(Reduction(degree, nbytes, ideal, ms / 1e3))
    return found


def figures(values: Sequence[float], chip: str) -> GpuFigures:
    """The constants that a vector of the search stands for, each of the order of 1 in it."""
    peak, start, reuse, hbm, launch = (float(abs(value)) for value in values)
    return GpuFigures(
        multiprocessors=MULTIPROCESSORS[chip],
        sustained_share=1.0,  # what is fitted was measured in bursts
        fp8_share=1.0,
        peak_share=round(peak, 3),
        tile_start=round(100 * start),
        tile_reuse=round(10 * reuse, 1),
        hbm_share=round(hbm, 3),
        launch_seconds=round(1e-6 * launch, 8),
    )


def errors(found: GpuFigures, system: System, rows: list[Product]) -> list[float]:
    """The relative error of each row: predicted over measured, minus 1."""
    return [gpu_product_seconds(found, system, r.m, r.k, r.n, dtype="f16") / r.seconds - 1 for r in rows]


def mean_abs(values: Sequence[float]) -> float:
    return statistics.fmean(map(abs, values))


def search(loss: Callable[[Sequence[float]], float], start: Sequence[float]) -> Sequence[float]:
    """Where a loss is least, from a start."""
    return minimize(loss, start, method="Nelder-Mead", options={"maxfev": 300, "xatol": 1e-3, "fatol": 1e-5}).x


def fit_products(chip: str, rows: list[Product]) -> GpuFigures:
    """The constants with the least mean |error|."""
    system = parse_system(f"{chip}:1")
    return figures(search(lambda x: mean_abs(errors(figures(x, chip), system, rows)), (0.78, 1, 2.5, 0.85, 5)), chip)


def link_errors(found: LinkFigures, rows: list[Reduction]) -> list[float]:
    return [(found.start_seconds + row.ideal_seconds / found.share) / row.seconds - 1 for row in rows]


def fit_links(rows: list[Reduction]) -> LinkFigures:
    """The constants with the least mean |error| over the rows that are not too small."""
    large = [row for row in rows if row.nbytes >= LEAST_BYTES]

    def made(x: Sequence[float]) -> LinkFigures:
        return LinkFigures(round(float(abs(x[0])) * 1e-5, 7), round(float(abs(x[1])), 3))

    return made(search(lambda x: mean_abs(link_errors(made(x), large)), (4, 0.7)))


def report_products(chip: str, rows: list[Product]) -> GpuFigures:
    """Fit, and print the errors by kind, held out and by tokens."""
    system, found = parse_system(f"{chip}:1"), fit_products(chip, rows)
    print(f"{chip}: {len(rows)} products, mean |error| {mean_abs(errors(found, system, rows)):.1%}")
    for op in ("qkv", "o", "up", "down"):
        inside, outside = ([r for r in rows if (r.op == op) == held] for held in (True, False))
        held_out = mean_abs(errors(fit_products(chip, outside), system, inside))
        print(f"  {op:<5} {mean_abs(errors(found, system, inside)):6.1%}   held out {held_out:6.1%}")
    for low, high in ((1, 64), (128, 512), (1024, 4096)):
        part = errors(found, system, [r for r in rows if low <= r.m <= high])
        print(f"  {low:>4} to {high} tokens {mean_abs(part):6.1%}, bias {statistics.fmean(part):+.1%}")
    flat = statistics.median(2 * r.m * r.k * r.n / r.seconds for r in rows if r.m >= 1024)
    constant = [2 * r.m * r.k * r.n / flat / r.seconds - 1 for r in rows if r.m >= 1024]
    print(f"  a constant rate would err by {mean_abs(constant):.1%} from 1024 tokens on")
    return found


def report_links(chip: str, rows: list[Reduction]) -> LinkFigures:
    """Fit, and print the errors by degree."""
    found = fit_links(rows)
    for degree in sorted({row.degree for row in rows}):
        for name, some in (
            ("from 1 MiB", [r for r in rows if r.degree == degree and r.nbytes >= LEAST_BYTES]),
            ("below", [r for r in rows if r.degree == degree and r.nbytes < LEAST_BYTES]),
        ):
            full_rate = mean_abs([r.ideal_seconds / r.seconds - 1 for r in some])
            error = mean_abs(link_errors(found, some))
            print(f"  all-reduce over {degree}, {name:<10} {error:6.1%}   at full rate {full_rate:6.1%}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    data = json.loads(args.file.read_text())
    source = "github.com/microsoft/vidur, commit 7d47513, data/profiling (MIT); fitted by benchmarks/gpu_products.py"
    made = {
        "source": source,
        "multiprocessors": MULTIPROCESSORS,
        "sustained_share": SUSTAINED_SHARES,
        "fp8_share": FP8_SHARES,
        "products": {},
        "links": {},
    }
    for theirs, chip in CHIPS.items():
        constants = asdict(report_products(chip, products(data, theirs)))
        for name in ("multiprocessors", "sustained_share", "fp8_share"):
            del constants[name]
        links = report_links(chip, reductions(data, theirs))
        print(f"  {constants}\n  {links}")
        made["products"][chip], made["links"][chip] = constants, asdict(links)
    if args.write:
        (DATA / "gpu_products.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
