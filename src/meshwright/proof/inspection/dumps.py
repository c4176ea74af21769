"""Inspect a compiled program given as HLO text, as XLA dumps it or JAX prints it."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.text import with_argument_shardings
from meshwright.errors import MeshwrightError
from meshwright.proof.inspection.baseline import NOTHING_ACCEPTED, Accepted
from meshwright.proof.inspection.context import Rules
from meshwright.proof.inspection.inspection import Inspection, read_inspection
from meshwright.record import Collective

_OPTIMIZED = re.compile(r"(.*)\.(?:\w+_)?after_optimizations\.txt")


def inspect_text(
    text: str,
    *,
    mesh: Mapping[str, int],
    on: str | None = None,
    name: str = "",
    rules: Rules | None = None,
    expected: Sequence[Collective] | None = None,
    state: Sequence[str] | None = None,
    accepted: Accepted = NOTHING_ACCEPTED,
) -> Inspection:
    """Inspect a compiled program from HLO text alone, as printed by `compiled.as_text()` or dumped by XLA.

    mesh: every axis and its degree in device order, outermost first. on: the program's hardware, for times. Memory and
    the partitioner's decisions are not in the text.
    """
    system = parse_system(on) if on else None
    is_scheduled = "is_scheduled=true" in text[:4096] and system is not None and system.chip.kind != "cpu"
    return read_inspection(
        name,
        text,
        mesh,
        hardware=on or "",
        system=system,
        is_scheduled=is_scheduled,
        rules=rules,
        expected=expected,
        state=state,
        accepted=accepted,
    )


def read_dump(file: Path) -> str:
    """Return the HLO text of a file, which may be gzipped. Raises if it cannot be read."""
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise MeshwrightError(f"cannot read {file} as HLO text: {error}") from None


def dump_with_shardings(file: Path) -> str:
    """Return the HLO text of a file, with the arguments' shardings.

    From jaxlib 0.12 on (checked with 0.12.0.1), XLA's dump of the optimized module has no shardings. They are read from
    the dump before optimization, whose file name differs in its end.
    """
    text, found = read_dump(file), _OPTIMIZED.fullmatch(file.name)
    before = file.with_name(f"{found[1]}.before_optimizations.txt") if found else None
    if before is None or not before.is_file():
        return text
    module = parse_hlo(read_dump(before))
    parameters = sorted(module.computations[module.entry].parameters.items())
    return with_argument_shardings(text, [one.attributes.get("sharding", "") for _, one in parameters])
