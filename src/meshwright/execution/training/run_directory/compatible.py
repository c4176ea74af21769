"""Compare a checkpoint with the run that resumes from it. Each difference is an error, or a note if it is allowed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.execution.training.run_directory.run import RunConfig, config_from_data
from meshwright.support.field_types import not_a_choice

ALLOWED = ("data", "dtype", "optimizer", "tokenizer")
"""Kinds of differences that `--allow` accepts. A different model is always an error."""

OF_KIND = {"param_dtype": "dtype", "moment_dtype": "dtype", "master_weights": "dtype", "optimizer": "optimizer"}
"""{option that determines the arrays of a checkpoint: the kind of difference with which `--allow` accepts a new value}.

Other options that determine the arrays can never change.
"""

_NOTED = (
    "workload.batch", "workload.seq_len", "workload.compute_dtype", "workload.objective", "workload.z_loss", "seed",
    "data.", "optimizer.", "preference.", "strategy.dropout", "strategy.gradient_dtype", "strategy.matmul_dtype",
    "strategy.on_bad_step",
)  # fmt: skip
"""Prefixes of the paths of config fields that do not affect arrays, but change how the run continues."""


class Difference(NamedTuple):
    """A config field or checksum whose value in the run differs from that in its checkpoint."""

    kind: str  # One of `ALLOWED`, or "model".
    name: str  # Path of the field, or "the data", "the tokenizer".
    now: Any  # Its value in the run.
    then: Any  # Its value in the checkpoint.

    def __str__(self) -> str:
        if self.kind in ("data", "tokenizer"):
            return f"{self.name} has the checksum {self.now}, and had {self.then} when the checkpoint was written"
        return f"{self.name} is {self.now!r} in config.json, and {self.then!r} in the checkpoint"


def read_allowed(text: str | Collection[str] | None) -> frozenset[str]:
    """Return the allowed kinds of differences, from a text such as `optimizer,data` or a collection of names.

    Raises:
        MeshwrightError: a name is unknown.
    """
    names = text.split(",") if isinstance(text, str) else (text or ())
    for name in names:
        if name not in ALLOWED:
            raise MeshwrightError(not_a_choice("allow", name, ALLOWED))
    return frozenset(names)


def config_differences(config: RunConfig, checkpoint: Mapping[str, Any]) -> list[Difference]:
    """Return the differences in config fields that determine the arrays of a checkpoint or their meaning.

    checkpoint: the config in the checkpoint, as plain data.
    """
    before, after = (_arrays_of(each.to_json()) for each in (config_from_data(checkpoint), config))
    return [
        Difference(OF_KIND.get(path.rpartition(".")[2], "model"), path, after.get(path), before.get(path))
        for path in after | before
        if after.get(path) != before.get(path)
    ]


def other_settings(config: RunConfig, checkpoint: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting that differs from the checkpoint's config and is not in `config_differences`."""
    before, after = (_flat(each.to_json(), "") for each in (config_from_data(checkpoint), config))
    return [
        f"{path} is {now!r}, and was {before.get(path)!r} when the checkpoint was written"
        for path, now in after.items()
        if path.startswith(_NOTED) and now != before.get(path)
    ]


def identity_differences(identity: Mapping[str, str], checkpoint: Mapping[str, str] | None) -> list[Difference]:
    """Return the differences between checksums of data and tokenizer.

    identity, checkpoint: {"data" or "tokenizer": checksum}, of the run and of the checkpoint, in which a checksum may
    be missing.
    """
    return [
        Difference(name, f"the {name}", now[:12], then[:12])
        for name, now in identity.items()
        if (then := (checkpoint or {}).get(name)) is not None and then != now
    ]


def check_allowed(differences: Collection[Difference], allowed: Collection[str], where: str) -> list[str]:
    """Return a line for each allowed difference; raise one `MeshwrightError` that lists all others.

    where: the beginning of the error's message.
    """
    refused = [each for each in differences if each.kind not in allowed]
    if refused:
        kinds = sorted({each.kind for each in refused})
        hint = "put it back, or start a new run"
        if "model" not in kinds:
            hint += f"; --allow {','.join(kinds)} continues with it"
        raise MeshwrightError(f"{where}: {'; '.join(map(str, refused))}; {hint}")
    afresh = {"optimizer": "; its moments begin afresh"}
    return [f"{each}: allowed{afresh.get(each.kind, '')}" for each in differences]


def _arrays_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {path: value} of the config fields that determine the arrays of a checkpoint or their meaning."""
    found = _flat(config["workload"]["model"], "workload.model.")
    found |= {f"workload.{name}": config["workload"][name] for name in ("param_dtype", "frozen")}
    return found | {f"strategy.{name}": config["strategy"][name] for name in OF_KIND if name in config["strategy"]}


def _flat(data: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return {path: value} of the leaves of nested mappings."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found
