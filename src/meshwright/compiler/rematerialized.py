"""Values that the partitioner gathers whole on every device because it knows no better way, from its warnings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.compiler.program import CompiledProgram
from meshwright.hlo import Spec, parse_hlo, parse_hlo_sharding, scope_of

_WARNING = re.compile(
    r"Involuntary full rematerialization\. The compiler (?:cannot|was not able to) go from sharding (\{.*?\})"
    r" to (?:sharding )?(\{.*?\}) (?:efficiently |without doing a full rematerialization of the tensor )?"
    r"for HLO operation:? %?([\w.\-]+) = (\w+)\[([\d,]*)\]"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]++|\\.)*+)"')


@dataclass(frozen=True, kw_only=True)
class Rematerialized:
    """A value that goes from one sharding to another by being whole on every device in between.

    op: its scopes and primitive. array: its shape on one device before. before, after: in mesh axes, or as the compiler
    writes them where no axes say them.
    """

    op: str
    source: str
    array: str
    before: str
    after: str


def read_rematerialized(program: CompiledProgram, mesh: Mapping[str, int]) -> tuple[Rematerialized, ...]:
    """The involuntary full rematerializations that a compiler warned of, each once, in the order it did.

    mesh: every axis and its degree, outermost first. XLA gathers such a value with all-gathers over every axis.
    """
    if not _WARNING.search(program.messages):
        return ()
    module = parse_hlo(program.propagated) if program.propagated else None
    named = {one.name: one.source for one in module.instructions()} if module else {}
    under = {one.op_name: one.source for one in module.instructions() if one.source} if module else {}
    return tuple(dict.fromkeys(_read(program.messages, mesh, named, under)))


def _read(
    messages: str, mesh: Mapping[str, int], named: Mapping[str, str], under: Mapping[str, str]
) -> Iterator[Rematerialized]:
    """Each warning; sources by the name of the instruction, or by its op_name."""
    for line in messages.splitlines():
        found = _WARNING.search(line)
        if found is None:
            continue
        before, after, name, dtype, dims = found.groups()
        path = _OP_NAME.search(line)
        op_name = path[1] if path else ""
        rank = len(dims.split(",")) if dims else 0
        yield Rematerialized(
            op=scope_of(op_name) or name,
            source=under.get(op_name) or named.get(name, ""),
            array=f"{dtype}[{dims}]",
            before=_words(before, parse_hlo_sharding(before, rank, mesh)),
            after=_words(after, parse_hlo_sharding(after, rank, mesh)),
        )


def _words(text: str, spec: Spec | None) -> str:
    """A sharding in mesh axes where it has them."""
    return text if spec is None else str(spec)
