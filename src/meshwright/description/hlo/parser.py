"""Parse HLO text, as the CPU, TPU and GPU compilers print it, into a module.

The text is read once, by position, with regular expressions that cannot backtrack: time is linear in the size of any
text. The grammar is that of xla/hlo/parser/hlo_parser.cc and xla/hlo/ir/hlo_instruction.cc (github.com/openxla/xla), as
far as printed programs use it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshwright.description.hlo.module import CALL_KEYS, Computation, Instruction, Module
from meshwright.description.hlo.shapes import ShapeReader
from meshwright.errors import MeshwrightError

_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?=[({])[^\n]*\{[ \t]*\n")
_INSTRUCTION = re.compile(r"\s*(ROOT\s+)?%?([^\s=(){},]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_END = re.compile(r"\s*\}([^\n]*)")
_BLANK = re.compile(r"(?:[ \t\r]*\n)*")

_OPERAND = re.compile(r"%([^\s,()]+)")
_BRACKETED = re.compile(r"\{[^{}]*\}|\[[^\[\]]*\]|\([^()]*\)|/\*[^*]*\*/")
_PLAIN_TEXT = re.compile(r"[^()\"\n]*+(?=\))")
_KEY = re.compile(r",\s*([a-zA-Z_][\w\-]*)=")
_PLAIN_VALUE = re.compile(r"[\w.%+\->:]++(?=[,\n]|$)")

_STRING = r'"(?:[^"\\]++|\\.)*+"?'
_BRACES = re.compile(_STRING + r"|[{}]", re.DOTALL)
_BRACKETS = re.compile(_STRING + r"|[\[({]|[\])}]|[,\n]", re.DOTALL)
_PARENS = re.compile(_STRING + r"|[()]", re.DOTALL)

_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]++|\\.)*+)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_INLINE_FILE = re.compile(r'\bsource_file="((?:[^"\\]++|\\.)*+)"')
LIBRARIES = re.compile(r"(?:site|dist)-packages/")
"""Files of installed packages."""
OUTSIDE = re.compile(r"\bmeshwright/proof/")
"""Our code that traces users' functions. A stack frame in it, and the frames that called it, are not the user's."""
_INLINE_LINE = re.compile(r"\bsource_line=(\d+)")


def parse_hlo(text: str) -> Module:
    """Parse the module that `compiled.as_text()` or an HLO dump prints.

    Raises MeshwrightError if the text is not HLO, or ends before its module does.
    """
    return _Parser(text).module()


class _Parser:
    """A recursive-descent parser: a position in a text, and methods that read from there, advance it or raise."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.read_shape = ShapeReader(text)
        self.sources: Mapping[str, str] = {}

    def module(self) -> Module:
        """Read the header, source tables, then every computation. Raises if the text is not a complete HLO module."""
        name, attributes = self.header()
        self.sources = self.tables()
        computations: dict[str, Computation] = {}
        entry = ""
        while (found := self.match(_COMPUTATION)) is not None:
            computation = self.computation(found[2])
            computations[computation.name] = computation
            entry = computation.name if found[1] else entry
            self.skip_blank()
        if self.position < len(self.text):
            raise self.error("neither a computation nor an instruction")
        if not entry:
            raise MeshwrightError(f"HLO module {name} has no ENTRY computation; the text is cut short")
        module = Module(name=name, attributes=attributes, computations=computations, entry=entry)
        place = {name: number for number, name in enumerate(module.computations)}
        for instruction in module.instructions():
            for name in instruction.called(*CALL_KEYS):
                if place.get(name, len(place)) >= place[instruction.computation]:
                    raise MeshwrightError(
                        f"HLO instruction {instruction.name} calls {name}, which is not printed above it"
                    )
        return module

    def header(self) -> tuple[str, Mapping[str, str]]:
        """Read the module's name and attributes. Raises if the text is not an HLO module's; StableHLO is named."""
        self.skip_blank()
        found = self.match(re.compile(r"HloModule ([^\s,]+)"))
        if found is None:
            begins = self.text.strip()[:40].split("\n")[0]
            if begins.startswith("module"):
                raise MeshwrightError(
                    "this is StableHLO, what lowered.as_text() prints; an HLO module is what compiled.as_text() prints"
                )
            raise MeshwrightError(
                f"not HLO text: it begins with {begins!r}; compiled.as_text() begins with 'HloModule'"
            )
        attributes = self.attributes()
        self.skip_blank()
        return found[1], attributes

    def tables(self) -> Mapping[str, str]:
        """Read the tables before the computations; return file:line by stack frame id."""
        tables: dict[str, dict[str, str]] = {}
        title = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ [^\n]*\n)*+)\n*")
        while (found := self.match(title)) is not None:
            tables[found[1]] = dict(line.split(" ", 1) for line in found[2].split("\n") if line)
        self.skip_blank()
        files = {key: value.strip('"') for key, value in tables.get("FileNames", {}).items()}
        locations = {
            key: f"{files.get(_field(value, 'file_name_id'), '?')}:{_field(value, 'line')}"
            for key, value in tables.get("FileLocations", {}).items()
        }
        frames = tables.get("StackFrames", {})
        return {key: _place(key, frames, locations) for key in frames}

    def computation(self, name: str) -> Computation:
        """Read the instructions up to the closing brace.

        Raises:
            MeshwrightError: a line is not an instruction, or an operand is defined in no line above.
        """
        instructions: dict[str, Instruction] = {}
        root = ""
        while (found := self.match(_INSTRUCTION)) is not None:
            instruction = self.instruction(found[2], name)
            for operand in instruction.operands:
                if operand not in instructions and (element := _element(operand, name, instructions)):
                    instructions[operand] = element
                if operand not in instructions:
                    raise MeshwrightError(
                        f"HLO instruction {instruction.name} takes {operand}, which no line above it makes"
                    )
            instructions[instruction.name] = instruction
            root = instruction.name if found[1] else root
        if self.match(_END) is None:
            raise self.error(f"neither an instruction nor the end of computation {name}")
        if not instructions:
            raise MeshwrightError(f"HLO computation {name} has no instruction")
        return Computation(name=name, instructions=instructions, root=root or next(reversed(instructions)))

    def instruction(self, name: str, computation: str) -> Instruction:
        """Read the rest of an instruction after `name = `."""
        shape, self.position = self.read_shape(self.position)
        opcode = self.match(_OPCODE)
        if opcode is None:
            raise self.error(f"instruction {name} has no opcode")
        text = self.parenthesis()
        attributes = self.attributes()
        metadata = attributes.get("metadata", "")
        op_name = _OP_NAME.search(metadata) if metadata else None
        return Instruction(
            name=name,
            computation=computation,
            shape=shape,
            opcode=opcode[1],
            text=text,
            operands=() if opcode[1] in ("constant", "parameter", "iota") else _operands(text),
            attributes=attributes,
            op_name=op_name[1] if op_name else "",
            source=self.source(metadata),
        )

    def parenthesis(self) -> str:
        """Read the text in an opcode's parentheses, and move past the closing one."""
        start = self.position
        plain = _PLAIN_TEXT.match(self.text, start)
        end = plain.end() if plain else self.closing(_PARENS, start)
        self.position = end + 1
        return self.text[start:end]

    def attributes(self) -> Mapping[str, str]:
        """Read each `, key=value` up to the end of the instruction."""
        attributes: dict[str, str] = {}
        while (found := self.match(_KEY)) is not None:
            attributes[found[1]] = self.value()
        return attributes

    def value(self) -> str:
        """Read one attribute's value, up to a comma or line end outside brackets and strings."""
        start = self.position
        plain = _PLAIN_VALUE.match(self.text, start)
        if plain:
            self.position = plain.end()
        elif self.text.startswith("{", start):
            self.position = self.closing(_BRACES, start + 1) + 1
        else:
            self.position = self.value_end(start)
            # A mesh's device ids follow a comma inside the value: mesh['x'=2], device_ids=([2,4]T(1,0)) {'x'}.
            if self.text.startswith("mesh[", start) and self.text.startswith(", device_ids=", self.position):
                self.position = self.value_end(self.position + 2)
        return self.text[start : self.position]

    def value_end(self, start: int) -> int:
        """Return the position of the first comma or line end from `start` outside brackets."""
        depth = 0
        for token in _BRACKETS.finditer(self.text, start):
            if token[0] in "[({":
                depth += 1
            elif token[0] in "])}":
                depth -= 1
            elif token[0] in ",\n" and depth <= 0:
                return token.start()
        return len(self.text) if depth <= 0 else self.cut_short(start)

    def closing(self, tokens: re.Pattern[str], start: int) -> int:
        """Return the position of the bracket that closes the one just before `start`.

        tokens: a pattern that matches brackets and strings.
        """
        depth = 1
        for token in tokens.finditer(self.text, start):
            if token[0] in "({":
                depth += 1
            elif token[0] in ")}":
                depth -= 1
                if not depth:
                    return token.start()
        return self.cut_short(start)

    def source(self, metadata: str) -> str:
        """Return file:line of an instruction, from its metadata or from the stack frame that the metadata names."""
        if not metadata:
            return ""
        if found := _FRAME.search(metadata):
            return self.sources.get(found[1], "")
        file, line = _INLINE_FILE.search(metadata), _INLINE_LINE.search(metadata)
        return f"{file[1]}:{line[1]}" if file and line else ""

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match a pattern at the position and move past it; None if it does not match."""
        found = pattern.match(self.text, self.position)
        if found:
            self.position = found.end()
        return found

    def skip_blank(self) -> None:
        """Move past empty lines."""
        self.match(_BLANK)

    def error(self, reason: str) -> MeshwrightError:
        """Return an error that names the line of the current position."""
        number = self.text.count("\n", 0, self.position) + 1
        if "\n" not in self.text[self.position :].strip():  # It is the last line.
            return MeshwrightError(f"HLO text is cut short: it ends in line {number}, where there should be more")
        line = self.text[self.position :].lstrip()[:80].split("\n")[0]
        return MeshwrightError(f"HLO text line {number}: {reason}: {line!r}")

    def cut_short(self, start: int) -> int:
        """Raise for the bracket at `start`, which is never closed."""
        number = self.text.count("\n", 0, start) + 1
        raise MeshwrightError(f"HLO text is cut short: a bracket that opens in line {number} never closes")


def _element(operand: str, computation: str, instructions: Mapping[str, Instruction]) -> Instruction | None:
    """Return a new get-tuple-element for an operand printed as `tuple#1` (jaxlib 0.11).

    None if there is no such element.
    """
    whole, _, index = operand.rpartition("#")
    elements = instructions[whole].shape.elements if whole in instructions else ()
    if index not in map(str, range(len(elements))):
        return None
    return Instruction(
        name=operand,
        computation=computation,
        shape=elements[int(index)],
        opcode="get-tuple-element",
        text=f"%{whole}",
        operands=(whole,),
        attributes={"index": index},
        op_name="",
        source="",
    )


def _operands(text: str) -> tuple[str, ...]:
    """Return the names in an operand list: `%a, f32[2]{0} %b`, or `a, b` in dumps without percent signs."""
    if "%" in text:
        return tuple(_OPERAND.findall(text))
    names = _BRACKETED.sub("", text).split(",") if text else []
    return tuple(name.split()[-1] for name in names if name.strip())


def _place(frame: str, frames: Mapping[str, str], locations: Mapping[str, str]) -> str:
    """Return file:line of the first frame outside installed packages, from `frame` to its callers; else of `frame`.

    Args:
        frame: the id of the stack frame.
        frames: the text of each frame, by id.
        locations: file:line, by id.
    """
    first = ""
    while frame in frames:
        place = locations.get(_field(frames[frame], "file_location_id"), "")
        if OUTSIDE.search(place):
            break
        first = first or place
        if place and not LIBRARIES.search(place):
            return place
        # Parents are printed as id + 1; 1 means no parent (jaxlib 0.10.2).
        parent = int(_field(frames[frame], "parent_frame_id") or 1) - 1
        frame = str(parent) if parent < int(frame) else ""
    return first


def _field(text: str, key: str) -> str:
    found = re.search(rf"\b{key}=(\d+)", text)
    return found[1] if found else ""
