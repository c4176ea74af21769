"""How wrong the planner is on published runs: nothing is fitted on them, they judge.

    .venv/bin/python benchmarks/published_runs.py FILE... [--json]

A FILE is JSON with a list `records`, each with model, hardware, parallelism, batch and what was measured. The error of
a row is that of its step time; a source's is the mean over its rows, and source-balanced the mean over sources. Beside
it stands the baseline of one MFU for each kind of chip, the median of the rows themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from published_rows import (
    Row,
    Setting,
    defaults,
    framework_of,
    measured_seconds,
    model_flops_seconds,
    read_setting,
    read_system,
)
from published_serving import Timed, time_layer, time_serving

from meshwright.errors import MeshwrightError
from meshwright.planning.cost.memory import step_memory
from meshwright.planning.prediction import predict

GIB = 2**30

TRAINING = ("train", "layer_microbench")
"""Kinds of rows that measure training."""


@dataclass(frozen=True)
class Scored:
    """A row with its measured and predicted figures. setting: the run; None for rows of serving and of a layer."""

    row: Row
    setting: Setting | None
    source: str
    framework: str
    measured: float | None
    predicted: float
    baseline: float
    peak_bytes: int
    fits: bool

    @property
    def error(self) -> float:
        """The relative error of the predicted step time, positive where it is too long."""
        assert self.measured
        return self.predicted / self.measured - 1


def main() -> None:
    """Score each file and print what comes out."""
    parser = argparse.ArgumentParser(description="How wrong the planner is on published runs.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, of several files one under each name"
    )
    parser.add_argument("--rows", action="store_true", help="print every row too")
    args = parser.parse_args()
    reports = {}
    for file in args.files:
        scored, refused = score(json.loads(file.read_text())["records"])
        if args.rows:
            print("\n".join(map(_line, filter(lambda item: item.measured, scored))))
        reports[file.name] = summarise(scored, refused)
    if args.json:
        print(json.dumps(reports if len(reports) > 1 else next(iter(reports.values())), indent=2))
        return
    for name, report in reports.items():
        print(*([f"\n{name}"] if len(reports) > 1 else []), show(report), sep="\n")


def _line(item: Scored) -> str:
    """A row in one line, with what it does not say."""
    taken = ", ".join(defaults(item.row))
    return f"{item.error:+7.1%}  {item.measured:9.3f} s  {item.predicted:9.3f} s  {item.row['id']}  {taken}"


def score(
    rows: list[Row], change: Callable[[Setting], Setting] = lambda setting: setting
) -> tuple[list[Scored], list[dict[str, str]]]:
    """Every row that can be expressed, scored, and the others with the reason.

    change: a change of what ran, before it is priced.
    """
    mfu = _mfu_by_chip(rows)
    scored, refused = [], []
    for row in rows:
        setting = None
        try:
            if row["kind"] == "train":
                setting = change(read_setting(row))
                record = predict(setting.workload, setting.mesh, setting.system, setting.strategy)
                peak, fits = _peak(row, setting), bool(record.fits)
                timed = Timed(measured_seconds(row) or 0.0, record.step_seconds or 0.0, peak, fits)
            else:
                timed = time_layer(row) if row["kind"] == "layer_microbench" else time_serving(row)
        except (MeshwrightError, KeyError, TypeError) as error:
            reason = str(error) if isinstance(error, MeshwrightError) else f"the row lacks a figure: {error!r}"
            refused.append({"id": row["id"], "kind": row["kind"], "reason": reason})
            continue
        baseline = model_flops_seconds(row) / mfu.get(row["hardware"]["chip"], 0.4)  # of training alone
        scored.append(
            Scored(
                row=row,
                setting=setting,
                source=_source(row),
                framework=framework_of(row, read_system(row)),
                measured=timed.measured or None,
                predicted=timed.predicted,
                baseline=baseline,
                peak_bytes=timed.peak_bytes,
                fits=timed.fits,
            )
        )
    return scored, refused


def summarise(scored: list[Scored], refused: list[dict[str, str]]) -> dict[str, Any]:
    """The figures of a file."""
    timed = [item for item in scored if item.measured and item.row["kind"] in TRAINING]
    core = [item for item in timed if item.row["core"]]
    served = [item for item in scored if item.row["kind"] not in TRAINING]
    return {
        "core": errors(core, lambda item: item.error),
        "all": errors(timed, lambda item: item.error),
        "frameworks": errors(timed, lambda item: item.error, by=lambda item: item.framework),
        "serving": errors(served, lambda item: item.error),
        "baseline": {
            name: errors(part, lambda item: item.baseline / (item.measured or 1.0) - 1)
            for name, part in (("core", core), ("all", timed))
        },
        "ranking": ranking(scored),
        "ratios": ratios(scored),
        "memory": errors(
            [item for item in scored if _measured_peak(item.row)],
            lambda item: item.peak_bytes / _measured_peak(item.row) - 1,
        ),
        "refused": refused,
        "defaults": Counter(name for item in scored for name in defaults(item.row)),
    }


def errors(
    items: list[Scored], error: Callable[[Scored], float], by: Callable[[Scored], str] = lambda item: item.source
) -> dict[str, Any]:
    """Mean absolute error and signed bias, by source (or another name) and balanced over sources.

    Of all rows also the median error, and the share of them within 10%.
    """
    by_source: dict[str, list[float]] = defaultdict(list)
    for item in items:
        by_source[by(item)].append(error(item))
    sizes = [abs(error(item)) for item in items]
    found = {
        source: {"rows": len(values), "mean_abs_error": _mean(map(abs, values)), "bias": _mean(values)}
        for source, values in by_source.items()
    }
    return {
        "rows": len(items),
        "mean_abs_error": _mean(sizes),
        "median_abs_error": statistics.median(sizes) if sizes else 0.0,
        "within_10_percent": _mean(size <= 0.1 for size in sizes),
        "source_balanced_mean_abs_error": _mean(part["mean_abs_error"] for part in found.values()),
        "source_balanced_bias": _mean(part["bias"] for part in found.values()),
        "by_source": found,
    }


def ratios(scored: list[Scored]) -> dict[str, Any]:
    """How far predicted ratios of step times are from measured ones, as natural logarithms, over pairs of rows.

    Pairs are of one rank group on the same hardware: what a choice between two meshes is made of.
    """
    timed = [item for item in scored if item.measured and item.row.get("rank_group")]
    errors = [
        abs(math.log((one.predicted / other.predicted) / ((one.measured or 1.0) / (other.measured or 1.0))))
        for one, other in combinations(timed, 2)
        if (one.row["rank_group"], one.row["hardware"]) == (other.row["rank_group"], other.row["hardware"])
    ]
    return {"pairs": len(errors), "median_abs_error": statistics.median(errors) if errors else None}


def ranking(scored: list[Scored]) -> dict[str, Any]:
    """For each rank group, how well the predicted order is the measured one; rows are ordered by MFU.

    regret: how much slower the predicted first is than the measured first. out_of_memory_recall: of the rows that ran
    out of memory, the share predicted not to fit; None where there are none.
    """
    groups: dict[str, list[Scored]] = defaultdict(list)
    for item in scored:
        if item.row.get("rank_group"):
            groups[item.row["rank_group"]].append(item)
    found = {name: figures for name, items in groups.items() if (figures := _group(items))}
    return {
        "groups": found,
        "mean_spearman": _mean(group["spearman"] for group in found.values()),
        "mean_regret": _mean(group["regret"] for group in found.values()),
        "out_of_memory_recall": _recall(scored),
    }


def show(report: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = [f"{'':30} {'rows':>5} {'mean |error|':>13} {'bias':>8} {'median':>8} {'within 10%':>10}"]
    for title, part in (
        ("core", report["core"]),
        ("all", report["all"]),
        ("by framework", report["frameworks"]),
        ("serving", report["serving"]),
        ("memory", report["memory"]),
    ):
        if not part["rows"]:
            continue
        balanced = part["source_balanced_mean_abs_error"], part["source_balanced_bias"]
        if title == "by framework":
            lines.append(f"{title:30} {part['rows']:5}")
        else:
            spread = f"{part['median_abs_error']:8.1%} {part['within_10_percent']:10.0%}"
            balanced = f"{balanced[0]:13.1%} {balanced[1]:+8.1%} {spread}"
            lines.append(f"{title + ', source-balanced':30} {part['rows']:5} {balanced}")
        for source, by in part["by_source"].items():
            lines.append(f"  {source:28} {by['rows']:5} {by['mean_abs_error']:13.1%} {by['bias']:+8.1%}")
    constant = report["baseline"]["core"]
    lines.append(f"{'constant MFU, core':30} {constant['rows']:5} {constant['source_balanced_mean_abs_error']:13.1%}")
    ranks = report["ranking"]
    if (recall := ranks["out_of_memory_recall"]) is not None:
        lines.append(f"runs out of memory that are predicted not to fit: {recall:.0%}")
    lines.append(f"ranking: Spearman {ranks['mean_spearman']:.2f}, regret {ranks['mean_regret']:.1%}, mean of groups")
    lines += [
        f"  {name:28} {g['rows']:5} {g['spearman']:13.2f} {g['regret']:8.1%}" for name, g in ranks["groups"].items()
    ]
    pairs = report["ratios"]
    if pairs["pairs"]:
        error = f"median |error| {pairs['median_abs_error']:.2%}, {pairs['pairs']} pairs"
        lines.append(f"ratios of two runs on the same chips: {error}")
    taken = ", ".join(f"{name} {count}" for name, count in report["defaults"].most_common())
    lines.append(f"rows that do not say, so that a default is taken: {taken}")
    lines.append(f"refused: {len(report['refused'])}")
    lines += [f"  {item['id']}: {item['reason']}" for item in report["refused"]]
    return "\n".join(lines)


def _peak(row: Row, setting: Setting) -> int:
    """The predicted peak memory of the stage whose peak a row has."""
    is_first = row["measured"].get("peak_of") == "first stage"
    kind = setting.system.chip.kind
    return step_memory(setting.workload, setting.mesh, setting.strategy, kind=kind, is_first_stage=is_first)["peak"]


def _measured_peak(row: Row) -> float:
    """The peak memory of a row in bytes; 0 where it has none."""
    measured = row["measured"]
    return (measured.get("peak_memory_gib") or 0) * GIB or (measured.get("peak_memory_gb") or 0) * 1e9


def _mfu_by_chip(rows: list[Row]) -> dict[str, float]:
    """The median MFU of the rows of each chip."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "train" and (seconds := measured_seconds(row)):
            found[row["hardware"]["chip"]].append(model_flops_seconds(row) / seconds)
    return {chip: statistics.median(values) for chip, values in found.items()}


def _source(row: Row) -> str:
    """The short name of a row's source: the last part of its address."""
    address = urlparse(row["source"]["url"])
    return address.path.rstrip("/").rpartition("/")[2] or address.netloc


def _group(items: list[Scored]) -> dict[str, Any] | None:
    """The figures of one group; None where fewer than two of its rows have a time."""
    timed = [item for item in items if item.measured]
    if len(timed) < 2:
        return None
    measured = [(item.measured or 0.0) / model_flops_seconds(item.row) for item in timed]
    predicted = [item.predicted / model_flops_seconds(item.row) for item in timed]
    chosen = measured[predicted.index(min(predicted))]
    return {
        "rows": len(timed),
        "spearman": _pearson(_ranks(measured), _ranks(predicted)),
        "regret": chosen / min(measured) - 1,
    }


def _recall(scored: list[Scored]) -> float | None:
    """The share of the rows that ran out of memory which are predicted not to fit."""
    failed = [item for item in scored if item.row["measured"].get("oom")]
    return _mean(not item.fits for item in failed) if failed else None


def _ranks(values: list[float]) -> list[float]:
    """The rank of each value; equal ones share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def _pearson(left: list[float], right: list[float]) -> float:
    """The correlation of two lists; 0 where one is constant."""
    if len(set(left)) < 2 or len(set(right)) < 2:
        return 0.0
    return statistics.correlation(left, right)


def _mean(values: Iterable[float]) -> float:
    """The mean; 0 of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


if __name__ == "__main__":
    main()
