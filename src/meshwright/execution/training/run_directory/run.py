"""A run directory: `config.json` (settings), `metrics.jsonl` (a line per step), `checkpoints/`, a lock while it runs.

docs/run_directory.md describes each file.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.description.families.registry import workload_from_data
from meshwright.description.hardware.system import System, parse_system
from meshwright.description.step.strategy import DEFAULT, Strategy, strategy_from_data
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.training.data.config import DataConfig
from meshwright.execution.training.preference.loss import Preference
from meshwright.execution.training.run_directory.saving import Saving
from meshwright.execution.training.update.optimizer import Optimizer, optimizer_from_data
from meshwright.execution.training.watching import EvaluationConfig, WatchConfig
from meshwright.mesh import MeshShape
from meshwright.options.values import read_mesh
from meshwright.planning.plan import Plan, make_plan
from meshwright.support.field_types import check_fields, from_data
from meshwright.support.files import append_line, write_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = dict[str, Any]
"""Measurements of one step, by name: an object in `metrics.jsonl`."""


class RunStoppedError(MeshwrightError):
    """A run that had started cannot continue. The message has the reason and the last checkpoint.

    signal: the signal that stopped the run after a checkpoint; None for another reason.
    """

    def __init__(self, line: str, signal: int | None = None) -> None:
        super().__init__(line)
        self.signal = signal


class NotFiniteError(MeshwrightError):
    """Loss, gradients or parameters are NaN or infinite, or gradients are too large."""


MAX_SEED = 2**32 - 1
"""The largest seed that NumPy and Grain accept."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run, as stored in `config.json`."""

    workload: Workload
    mesh: MeshShape
    hardware: str
    optimizer: Optimizer
    steps: int
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    saving: Saving = field(default_factory=Saving)
    evaluating: EvaluationConfig = field(default_factory=EvaluationConfig)
    watching: WatchConfig = field(default_factory=WatchConfig)
    preference: Preference = field(default_factory=Preference)
    """The loss of preference pairs, for the objective `dpo`."""
    strategy: Strategy = DEFAULT
    hardware_file: str | None = None
    """TOML file that describes the chip; None for a chip that meshwright knows."""
    memory_headroom: float | None = None
    """Fraction added to the predicted memory peak before it is compared with a device's memory; None for none."""
    adapter: str | None = None
    """PEFT directory of the initial adapters; None if adapters are initialised randomly or there are none."""
    weights: str | None = None
    """Hugging Face directory of the initial weights; None if they are initialised randomly."""
    source: str | None = None
    """Name of the model of a new run: preset, file or directory; None if it was given as an object."""
    tokenizer: str | None = None
    """Hugging Face directory of the tokenizer; None if text is read as bytes."""

    def __post_init__(self) -> None:
        check_fields(self)
        seed = self.seed
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= MAX_SEED:
            raise MeshwrightError(f"seed is {seed!r}; it is a whole number from 0 to {MAX_SEED}")
        if self.steps < 1:
            raise MeshwrightError(f"steps is {self.steps}; it is a whole number from 1")

    @property
    def system(self) -> System:
        """The chips and memory headroom that `hardware` and related fields describe."""
        system = parse_system(self.hardware, hardware_file=self.hardware_file)
        return replace(system, memory_headroom=self.memory_headroom)

    @property
    def plan(self) -> Plan:
        """The plan of the run's step."""
        return make_plan(self.workload, self.mesh, self.system, self.strategy)

    @property
    def draws(self) -> bool:
        """Whether a step needs random numbers: for dropout in layers or at the inputs of adapters."""
        return self.strategy.dropout > 0 or self.workload.lora_dropout > 0

    def to_json(self) -> dict[str, Any]:
        """Return the config as plain data, as in `config.json`."""
        return json.loads(json.dumps(asdict(self)))


def begin_run(directory: Path, config: DataclassInstance, start: int) -> None:
    """Write the config of a run that starts after `start` steps, and remove the metrics of later steps.

    config: a `RunConfig`, or the config of a run of `meshwright.fit`.
    """
    rows = [row for row in read_metrics(directory) if row["step"] < start]
    write_file(directory / "config.json", json.dumps(asdict(config), indent=2) + "\n")
    write_file(directory / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def read_config(directory: Path) -> RunConfig:
    """Read the config of a run; a `MeshwrightError` if the directory has none, or an invalid one."""
    path = directory / "config.json"
    if not path.is_file():
        if copy := find_config_copy(directory):
            raise MeshwrightError(f"{path} is missing; {copy}")
        raise MeshwrightError(
            f"no run in {str(directory)!r}: it has no config.json; `meshwright train MODEL … -o {directory} --resume`"
            " begins one"
        )
    if _config_has(directory, "program"):
        raise MeshwrightError(
            f"{directory} is a run of mw.fit, whose step is a Python function: `meshwright report` reads it, and"
            " mw.fit(…, resume=True) continues with it"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict) and "workload" in data and "seed" not in data:
            raise ValueError("seed is missing, which decides the order of the data")
        config = config_from_data(data)
        read_mesh(config.mesh, config.system.num_devices)
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        line = f"{path} is not the config of a run: {str(error).splitlines()[0]}"
        copy = find_config_copy(directory)
        raise MeshwrightError(f"{line}; {copy}" if copy else line) from None
    return config


def find_config_copy(directory: Path) -> str:
    """Return a sentence on how to restore config.json from the run's last checkpoint; empty if it has no checkpoint."""
    copies = [path for path in directory.glob("checkpoints/*/config/metadata") if path.parts[-3].isdigit()]
    if not copies:
        return ""
    last = max(copies, key=lambda path: int(path.parts[-3]))
    command = shlex.join(["cp", str(last), str(directory / "config.json")])
    return f"checkpoint {last.parts[-3]} has a copy of it: `{command}`"


def holds_run(directory: Path) -> bool:
    """Whether the `config.json` in a directory is of a run of `meshwright.train`: not of a model, not of `fit`."""
    return _config_has(directory, "workload")


def _config_has(directory: Path, field: str) -> bool:
    try:
        return field in json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def config_from_data(data: Any) -> RunConfig:
    """Return a config from the data of `RunConfig.to_json`, also of earlier versions of meshwright."""
    if isinstance(data, dict):
        data = dict(data)
        if isinstance(data.get("data"), list):
            data["data"] = {"sources": data["data"]}
        if isinstance(of_data := data.get("data"), dict) and not isinstance(fields := of_data.get("fields"), list):
            data["data"] = of_data | {"fields": [fields] if fields else []}
        if "save_every" in data:
            data["saving"] = {"every": data.pop("save_every")}
    return from_data(RunConfig, data, readers=_READERS)


_READERS = {Workload: workload_from_data, Strategy: strategy_from_data, Optimizer: optimizer_from_data}


def append_metrics(directory: Path, row: Row) -> None:
    """Append measurements of a step to `metrics.jsonl`; NaN and infinity become null."""
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
    append_line(directory / "metrics.jsonl", json.dumps(plain))


def read_metrics(directory: Path) -> list[Row]:
    """Return the rows of `metrics.jsonl`, one per step.

    A later line of the same step adds measurements (evaluation, checkpoint time), or replaces those of a repeated step.
    A last line that a killed process left incomplete is skipped.

    Raises:
        MeshwrightError: any other line is not a row of metrics.
    """
    path = directory / "metrics.jsonl"
    rows: dict[int, Row] = {}
    for place, line in read_json_lines(path, {"step"}):
        row = rows.get(line["step"], {}) | line
        if problem := _row_problem(row):
            raise MeshwrightError(f"{place}: this is not a line of metrics: {problem}")
        rows[line["step"]] = row
    return list(rows.values())


def read_json_lines(path: Path, fields: Set[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return (file and line number as text, object) for each line of a file; empty if there is no file.

    A last line that a killed process left incomplete is skipped.

    Raises:
        MeshwrightError: any other line is not a JSON object with `fields`.
    """
    if not path.is_file():
        return []
    found = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    for number, line in enumerate(lines[:-1], start=1):
        if (data := _read_line(line, fields)) is None:
            raise MeshwrightError(f"{path}, line {number}: {_no_line(line)}")
        found.append((f"{path}, line {number}", data))
    return found


def repair_lines(directory: Path, on_note: Callable[[str], None]) -> None:
    """Remove damaged lines from the files to which a run appends. A damaged file is kept under another name.

    These files contain measurements only, so the run can continue. Later lines of a damaged step are removed too.

    on_note: called with a line for each damaged file.
    """
    for name in ("metrics.jsonl", "restarts.jsonl", "bad_steps.jsonl"):
        path = directory / name
        if not path.is_file():
            continue
        *lines, rest = path.read_bytes().split(b"\n")
        found = [(line, data) for line in lines if (data := _read_line(line, _FIELDS[name])) is not None]
        if name == "metrics.jsonl":
            rows: dict[int, Row] = {}
            for _, data in found:
                rows[data["step"]] = rows.get(data["step"], {}) | data
            found = [(line, data) for line, data in found if not _row_problem(rows[data["step"]])]
        if len(found) < len(lines):
            kept = path.with_name(f"{name}.damaged")
            path.replace(kept)
            write_file(path, b"\n".join([*(line for line, _ in found), rest]))
            on_note(f"{path}: {len(lines) - len(found)} damaged lines are left out; the file as it was is {kept}")


_FIELDS = {"metrics.jsonl": {"step"}, "restarts.jsonl": {"lost_seconds", "down_seconds"}, "bad_steps.jsonl": {"step"}}
"""{file to which a run appends: the fields that each line must have}."""


def _read_line(line: bytes, fields: Set[str]) -> dict[str, Any] | None:
    """Return the JSON object on a line; None if the line is not an object with these fields."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not data.keys() >= fields:
        return None
    if "step" in fields and not (type(data["step"]) is int and data["step"] >= 0):
        return None
    return data


def _no_line(line: bytes) -> str:
    return f"this is not a line of metrics, {line[:40].decode(errors='replace')!r}"


_MEASURED = {"step", "mesh", "hardware", "step_seconds", "memory_peak_bytes"}
"""Fields that every row has."""

_BY_NAME: dict[str, tuple[str, ...]] = {
    "sources": ("tokens",),
    "eval_tasks": ("questions", "acc", "acc_stderr", "acc_norm", "acc_norm_stderr"),
    "bad_data": (),
}
"""{field of a row that has an object of numbers for each source or task: the numbers that each object must have}."""


def _row_problem(row: Row) -> str:
    """Return why a row is invalid: a missing field, or a value of the wrong type. Empty if the row is valid."""
    if missing := sorted(_MEASURED - row.keys()):
        return f"{missing[0]} is missing"
    for name, value in row.items():
        if isinstance(value, str) is not (wants_text := name in ("mesh", "hardware")):
            return f"{name} is {repr(value)[:40]}; it is {'a text' if wants_text else 'a number'}"
    for name, fields in _BY_NAME.items():
        figures = row.get(name, {})
        if not isinstance(figures, dict) or not all(_has_numbers(one, fields) for one in figures.values()):
            return f"{name} is {repr(figures)[:40]}; it has an object of numbers for each name"
    if not isinstance(seconds := row["step_seconds"], int | float) or seconds <= 0:
        return f"step_seconds is {repr(seconds)[:40]}; it is a number above 0"
    return ""


def _has_numbers(figures: object, fields: tuple[str, ...]) -> bool:
    """Whether a value is an object that has these fields and only numbers, or null for a number that was not finite."""
    if not isinstance(figures, dict) or not figures.keys() >= set(fields):
        return False
    return all(isinstance(value, int | float | None) for value in figures.values())
