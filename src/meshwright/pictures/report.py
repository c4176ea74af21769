"""The HTML page of one or more runs: curves, predicted | compiled | measured, memory, devices, goodput, data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from html import escape
from pathlib import Path
from typing import Any

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.errors import MeshwrightError
from meshwright.execution.training.run_directory.run import Row, RunConfig, read_config, read_json_lines, read_metrics
from meshwright.execution.training.run_record import measured, measured_steps
from meshwright.execution.training.watch.goodput import ACCOUNTS, goodput, read_restarts
from meshwright.execution.training.watch.log import read_compiled
from meshwright.execution.training.watch.profile import Profile, find_profile
from meshwright.pictures.curves import RUN_COLOURS, curves
from meshwright.pictures.document import Section, html_table, legend, render
from meshwright.pictures.rows import BANDWIDTH_COLUMNS, PROFILE_COLUMNS, bandwidth_rows, imbalance, profile_rows
from meshwright.pictures.sections import BarSegment, draw_bars, memory_section
from meshwright.proof.program_plans.fit.config import FitConfig, read_fit_config
from meshwright.proof.verification.profiles import AxisBandwidth, axis_bandwidths, compare_profile
from meshwright.record import Record
from meshwright.support.field_types import check_value
from meshwright.support.files import check_output, write_file
from meshwright.units import show_bytes, show_estimate, show_percent, show_rate, show_seconds


@dataclass(frozen=True)
class Chart:
    """A chart of a quantity over steps. path: the keys of its value in a row of `metrics.jsonl`. show: formats it."""

    title: str
    path: tuple[str, ...]
    show: Callable[[float], str]


@dataclass(frozen=True)
class Run:
    """A training run, read from its directory."""

    name: str
    directory: Path
    subject: str
    """The trained model or function, its mesh and hardware, as text."""
    steps: int
    """The number of steps of the whole run, also those that it has yet to do."""
    hardware: str
    axes: Sequence[tuple[str, int, str]]
    """(name, degree, what it splits) of each mesh axis larger than 1."""
    predicted: Record
    usable_bytes: float | None
    """Memory of a device that a program can use; None for simulated devices."""
    measured: Record
    profile: Profile | None
    """The profile of some of the run's steps; None if there is none."""
    bandwidths: Sequence[AxisBandwidth]
    """The bandwidth of the profile's collectives, by mesh axes."""
    charts: Sequence[Chart]
    next_step: str
    """A command that shows more about the step, as HTML."""
    rows: Sequence[Row]
    """The rows of `metrics.jsonl`, one per step."""
    restarts: Sequence[Mapping[str, Any]]
    """The rows of `restarts.jsonl`, one per restart."""
    compiled: Record | None
    bad_steps: Sequence[Mapping[str, Any]]
    """The rows of `bad_steps.jsonl`."""

    @property
    def goodput(self) -> dict[str, float]:
        """How the run's time was used: seconds by category (`watch.goodput.ACCOUNTS`), such as `compiling`."""
        return goodput(self.rows, self.restarts)


def report(runs: str | Path | Sequence[str | Path], output: str | Path | None = None) -> str:
    """Return a self-contained HTML page about one or several runs. Several runs are drawn in the same charts.

    Args:
        runs: the directory of a run, or several.
        output: also write the page to this file.

    Raises:
        MeshwrightError: a directory is not that of a run or has no step yet, or the file cannot be written.
    """
    check_value("runs", runs, str | Path | Sequence[str | Path])
    several = [runs] if isinstance(runs, (str, Path)) else list(runs)
    if not several:
        raise MeshwrightError("there is no run to report; give the directory of one")
    if output is not None:
        if (suffix := Path(output).suffix.lower()) not in ("", ".html", ".htm"):
            raise MeshwrightError(f"a report is an HTML page, as report.html, and not a {suffix} file: {output}")
        check_output(Path(output))
    directories = [Path(run) for run in several]
    # A run's name is that of its directory; if two have the same name, it is the path.
    is_unique = len({path.name for path in directories}) == len(directories)
    page = report_page([_read_run(path, path.name if is_unique else str(path)) for path in directories])
    if output is not None:
        write_file(Path(output), page)
    return page


def _read_run(directory: Path, name: str) -> Run:
    config = read_fit_config(directory) or read_config(directory)
    if not (rows := read_metrics(directory)):
        raise MeshwrightError(f"{directory} has no step in its metrics.jsonl yet")
    of_kind = _fit_fields(config, rows) if isinstance(config, FitConfig) else _train_fields(directory, config, rows)
    return Run(
        name=name or str(directory),
        directory=directory,
        steps=config.steps,
        hardware=config.hardware,
        rows=rows,
        restarts=read_restarts(directory),
        compiled=read_compiled(directory),
        bad_steps=[data for _, data in read_json_lines(directory / "bad_steps.jsonl", {"step", "why"})],
        **of_kind,
    )


def _train_fields(directory: Path, config: RunConfig, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the fields of `Run` that differ between kinds of runs, for a run of `meshwright train`."""
    profile, plan, workload = find_profile(directory, config), config.plan, config.workload
    placed = lay_mesh(plan.system, config.mesh.layout)
    shape = f"{workload.batch} × {workload.seq_len} tokens a step, {workload.compute_dtype}"
    tasks = dict.fromkeys(name for row in rows for name in row.get("eval_tasks", {}))
    verify = escape(f"meshwright verify {directory}")
    return {
        "subject": f"{workload.model.name}, {shape}, {config.mesh} on {config.hardware}",
        "axes": [(axis, degree, _AXES[axis]) for axis, degree in config.mesh.degrees.items() if degree > 1],
        "predicted": plan.predicted,
        "usable_bytes": plan.system.usable_bytes if plan.system.chip.kind != "cpu" else None,
        "measured": measured(config, rows, profile),
        "profile": profile[0],
        "bandwidths": axis_bandwidths(plan.predicted, profile[0], placed) if profile[0] else (),
        "charts": [
            *_CHARTS,
            *(Chart(f"Accuracy of {name}", ("eval_tasks", name, "acc"), show_percent) for name in tasks),
        ],
        "next_step": f"`{verify}` compiles the step; --profile 10:15 measures its collectives.",
    }


def _fit_fields(config: FitConfig, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the fields of `Run` that differ between kinds of runs, for a run of `meshwright.fit`."""
    here = [row for row in rows if (row["mesh"], row["hardware"]) == (config.mesh_text, config.hardware)]
    splits = {axis: [name for name, axes in config.table.items() if axis in axes] for axis in config.mesh}
    stored = {axis: ["the state between steps"] * (axis in config.store) for axis in config.mesh}
    return {
        "subject": f"step {config.program}, {config.mesh_text} on {config.hardware}",
        "axes": [
            (axis, degree, ", ".join(splits[axis] + stored[axis]) or "nothing")
            for axis, degree in config.mesh.items()
            if degree > 1
        ],
        "predicted": config.predicted or Record(origin="predicted", mesh=config.mesh, hardware=config.hardware),
        "usable_bytes": config.usable_bytes,
        "measured": measured_steps(here, config.mesh, config.hardware),
        "profile": None,
        "bandwidths": (),
        "charts": [*(Chart(name, (name,), _plain) for name in config.metrics), _INPUT],
        "next_step": "`mw.inspect(step, state, batch)` compiles the step and names its collectives.",
    }


def report_page(runs: Sequence[Run]) -> str:
    """Return the HTML page about some runs."""
    colours = {run.name: RUN_COLOURS[index % len(RUN_COLOURS)] for index, run in enumerate(runs)}
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    lines = [f"{run.name}: {run.subject}" for run in runs]
    sections = [
        _overview(runs),
        Section("Curves", legend(colours) * (len(runs) > 1) + _curves(runs, colours)),
        _goodput(runs),
        *(section for run in runs for section in _run_sections(run, is_alone=len(runs) == 1)),
    ]
    return render(title, lines, sections)


def _overview(runs: Sequence[Run]) -> Section:
    """Return a section with a table of the runs: progress, loss and speed of each."""
    columns = ("run", "steps", "loss", "held-out loss", "tokens/s", "MFU", "step", "predicted", "goodput")
    cells = []
    for run in runs:
        seconds = run.goodput
        total = sum(seconds.values())
        evaluated = [row["eval_loss"] for row in run.rows if row.get("eval_loss") is not None]
        cells.append(
            (
                run.name,
                f"{run.rows[-1]['step'] + 1:,} of {run.steps:,}",
                _or_dash(run.rows[-1].get("loss"), "{:.4f}".format),
                _or_dash(evaluated[-1] if evaluated else None, "{:.4f}".format),
                _or_dash(run.measured.tokens_per_second, lambda rate: show_rate(rate, "tok/s")),
                _or_dash(run.measured.shown_mfu, show_percent),
                _or_dash(run.measured.step_seconds, show_seconds),
                _or_dash(run.predicted.step_seconds, show_seconds),
                show_percent(seconds["steps"] / total) if total else "–",
            )
        )
    return Section("Runs", html_table(columns, cells))


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return "–" if value is None else show(value)


def _plain(value: float) -> str:
    return f"{value:.4g}"


_INPUT = Chart("Waiting for input, of a step", ("input_share",), show_percent)

_CHARTS = (
    Chart("Loss, nats a token", ("loss",), _plain),
    Chart("Held-out loss, nats a token", ("eval_loss",), _plain),
    Chart("Learning rate", ("learning_rate",), _plain),
    Chart("Norm of the gradients", ("grad_norm",), _plain),
    Chart("Tokens a second", ("tokens_per_second",), lambda value: f"{value:,.0f}"),
    Chart("MFU", ("mfu",), show_percent),
    _INPUT,
    Chart("Busiest expert over the mean", ("experts_max_over_mean",), _plain),
)
"""The charts of a run of `meshwright train`; a chart without values is not drawn."""


def _curves(runs: Sequence[Run], colours: Mapping[str, str]) -> str:
    """Return the charts as HTML, one for each quantity that a run has; colours: the colour of each run, by its name."""
    figures = []
    for chart in dict.fromkeys(chart for run in runs for chart in run.charts):
        series = {run.name: (colours[run.name], _points(run.rows, chart.path)) for run in runs if chart in run.charts}
        if not any(value for _, points in series.values() for _, value in points):
            continue
        if drawn := curves(series, chart.show, title=f"{chart.title} over steps"):
            figures.append(f'<figure class="chart"><figcaption>{escape(chart.title)}</figcaption>{drawn}</figure>')
    return f'<div class="charts">{"".join(figures)}</div>'


def _points(rows: Sequence[Row], path: tuple[str, ...]) -> list[tuple[float, float]]:
    """Return (step, value) of the field at `path` of each row; steps are counted from 1.

    For speeds, the first step of each process is left out, because it includes warm-up.
    """
    field = path[0]
    is_speed = field in ("tokens_per_second", "mfu", "input_share")
    found = []
    for row in rows:
        if is_speed and "startup_seconds" in row:
            continue
        value: Any = reduce(lambda found, name: found.get(name, {}), path, row)
        if field == "input_share" and "input_seconds" in row:
            value = row["input_seconds"] / row["step_seconds"]
        if isinstance(value, int | float) and math.isfinite(value):
            found.append((row["step"] + 1.0, float(value)))
    return found


def _goodput(runs: Sequence[Run]) -> Section:
    """Return a section on how the runs' time was used: a bar for each run and a table, by category (`Run.goodput`)."""
    found = {run.name: run.goodput for run in runs}
    timed = {name: seconds for name, seconds in found.items() if sum(seconds.values())}
    if not timed:
        return Section("Where the time went", "")
    drawn = draw_bars(
        {
            f"{name}  {show_seconds(sum(seconds.values()))}": [
                BarSegment(share, account, f"{account}: {show_seconds(share)}")
                for account, share in seconds.items()
                if share
            ]
            for name, seconds in timed.items()
        },
        None,
    )
    cells = [
        (account, *(_share(seconds, account) for seconds in timed.values()), what)
        for account, what in ACCOUNTS.items()
        if any(seconds[account] for seconds in timed.values())
    ]
    columns = ("", *(timed if len(timed) > 1 else ["seconds"]), "what it is")
    restarts = [
        f"{run.name} was resumed {len(run.restarts)} time{'s' * (len(run.restarts) > 1)};"
        f" {sum(restart['lost_steps'] for restart in run.restarts):,} steps were taken again."
        for run in runs
        if run.restarts
    ]
    said = "".join(f"<p>{escape(line)}</p>" for line in restarts)
    return Section("Where the time went", drawn + said + html_table(columns, cells, text=(0, len(columns) - 1)))


def _share(seconds: Mapping[str, float], account: str) -> str:
    share = seconds[account]
    return f"{show_seconds(share)}  {show_percent(share / sum(seconds.values()))}" if share else "–"


def _run_sections(run: Run, *, is_alone: bool) -> list[Section]:
    """Return the sections of the page that are on one run. is_alone: whether titles leave out the only run's name."""
    of = "" if is_alone else f"{run.name}: "
    records = {"predicted": run.predicted} if run.predicted.memory_bytes else {}
    if run.compiled is not None:
        records["compiled"] = run.compiled
    if run.measured.memory_bytes:
        records["measured"] = run.measured
    memory = memory_section(records, run.usable_bytes)
    return [
        Section(f"{of}Predicted, compiled, measured", _quantities(run)),
        Section(f"{of}Mesh", _mesh(run)),
        Section(f"{of}Memory of a device", memory.body),
        Section(f"{of}Devices", _devices(run)),
        Section(f"{of}Tasks", _tasks(run.rows)),
        Section(f"{of}Data", _data(run.rows)),
        Section(f"{of}Bad steps", _bad_steps(run)),
    ]


def _quantities(run: Run) -> str:
    """Return a table of step time, rates and memory peak as HTML, predicted | compiled | measured.

    With a profile, also tables of collectives and of bandwidths.
    """
    planned, found = run.predicted, run.measured
    rows = [
        ("step", _or_dash(planned.step_seconds, show_seconds), "–", _or_dash(found.step_seconds, show_seconds)),
        (
            "tokens a second",
            _or_dash(planned.tokens_per_second, lambda rate: show_rate(rate, "tok/s")),
            "–",
            _or_dash(found.tokens_per_second, lambda rate: show_rate(rate, "tok/s")),
        ),
        ("MFU", _or_dash(planned.shown_mfu, show_percent), "–", _or_dash(found.shown_mfu, show_percent)),
        (
            "memory peak",
            _or_dash(planned.memory_bytes.get("peak"), show_bytes),
            _or_dash(run.compiled.memory_bytes.get("peak") if run.compiled else None, show_bytes),
            _or_dash(found.memory_bytes.get("peak"), show_bytes),
        ),
    ]
    body = html_table(("", "predicted", "compiled", "measured"), rows)
    if run.profile is None:
        body += "".join(f"<p>{escape(note)}</p>" for note in found.notes)
        return body + f'<p class="quiet">{run.next_step}</p>'
    first, last = run.profile.steps
    said = f"Collectives of steps {first} to {last}: bytes a device and step, then what a step spends in them."
    table = html_table(PROFILE_COLUMNS, profile_rows(compare_profile(planned, run.profile)), text=(0, 1, 2))
    rates = html_table(BANDWIDTH_COLUMNS, bandwidth_rows(run.bandwidths), text=(0, 1))
    return f"{body}<p>{said}</p>{table}<p>What a device sends in a step, and its rate while it sends.</p>{rates}"


_AXES = {
    "dp": "copies of the model, each with its share of the batch",
    "fsdp": "shards of parameters and optimizer; the batch too",
    "tp": "heads and the mlp of each layer",
    "sp": "positions of a sequence",
    "ep": "experts",
    "pp": "stages of layers",
}


def _mesh(run: Run) -> str:
    if not run.axes:
        return f"<p>one device of {escape(run.hardware)}</p>"
    degrees = [(axis, str(degree), splits) for axis, degree, splits in run.axes]
    return html_table(("axis", "degree", "splits"), degrees, text=(0, 2))


def _devices(run: Run) -> str:
    """Return a bar of each device's time in the profiled steps, and a sentence on the imbalance, as HTML."""
    if run.profile is None or not run.profile.devices:
        return ""
    drawn = {}
    for name, use in sorted(run.profile.devices.items(), key=lambda item: int(item[0])):
        idle = max(0.0, use["step_seconds"] - use["busy_seconds"])
        work = max(0.0, use["busy_seconds"] - use["collective_seconds"])
        parts = {"ops": work, "collectives": use["busy_seconds"] - work, "idle": idle}
        drawn[f"device {name}"] = [
            BarSegment(seconds, part, f"{part}: {show_seconds(seconds)}") for part, seconds in parts.items() if seconds
        ]
    return draw_bars(drawn, None) + f"<p>{escape(imbalance(run.profile))}</p>"


def _tasks(rows: Sequence[Row]) -> str:
    """Return a table of the results of each evaluation task at its last evaluation, as HTML."""
    last = {name: (row["step"] + 1, figures) for row in rows for name, figures in row.get("eval_tasks", {}).items()}
    cells = [
        (
            name,
            f"{figures['questions']:,}",
            show_estimate(figures["acc"], figures["acc_stderr"]),
            show_estimate(figures["acc_norm"], figures["acc_norm_stderr"]),
            f"{step:,}",
        )
        for name, (step, figures) in last.items()
    ]
    return html_table(("task", "questions", "acc", "acc_norm", "after step"), cells)


def _data(rows: Sequence[Row]) -> str:
    """Return tables of tokens and documents by source, and of truncated or skipped records, as HTML."""
    tokens: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    for row in rows:
        for name, size in row.get("sources", {}).items():
            tokens[name] += size["tokens"]
            documents[name] += size.get("documents", 0)
    total = sum(tokens.values())
    cells = [
        (name, f"{count:,}", show_percent(count / total), f"{documents[name]:,}" if documents[name] else "–")
        for name, count in tokens.most_common()
    ]
    body = html_table(("source", "tokens", "share", "documents"), cells)
    bad = next((row["bad_data"] for row in reversed(rows) if row.get("bad_data")), {})
    left_out = [(name, kind, f"{count:,}") for name, kinds in bad.items() for kind, count in kinds.items()]
    return body + html_table(("source", "cut or left out", "records"), left_out, text=(0, 1))


def _bad_steps(run: Run) -> str:
    skipped = {row["step"] for row in run.rows if row.get("skipped")}
    cells = [
        (str(bad["step"] + 1), str(bad["why"]), "left out" if bad["step"] in skipped else "") for bad in run.bad_steps
    ]
    return html_table(("step", "why", ""), cells, text=(1, 2))
