"""Parse expressions of the notation; an error is a NotationError that points at the character.

    expression := (product | calls) { arrow (array | collective [arrow array]) }
    product    := array { times array } [ (arrow | "=") array ["(partial result)"] ]       times: @ · × .
    calls      := function subscript "(" (array | calls) ")"       function: AllGather ReduceScatter AllReduce AllToAll
    collective := ("AG" | "RS" | "AR" | "A2A" | "Reduce-Scatter" ["(RS)"], … | function) ["over"] axes
    array      := (name "[" [dim { "," dim }] "]" | dim { dim }) ["{U" subscript "}"]
    dim        := word [subscript]
    subscript  := "_" axes
    axes       := word | "{" word { "," word } "}"

The subscript of a reduce-scatter may end with the dim that it shards, `ReduceScatter_{X,K}`, and that of an all-to-all
with both dims, `AllToAll_{X,I->J}`; without them, the result determines the dims.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from meshwright.description.notation.array import FUNCTION_NAMES, SHORT_NAMES, ShardedArray
from meshwright.description.notation.array_parser import read_array, read_axes, resolve, with_unreduced
from meshwright.description.notation.expression import Chain, Einsum, Expression, Stage, check_stage
from meshwright.description.notation.moves import exchanged, gathered, reduced, scattered
from meshwright.description.notation.tokens import Reader, Token
from meshwright.errors import MeshwrightError
from meshwright.record import Kind
from meshwright.units import parse_count

_KINDS: dict[str, Kind] = {**SHORT_NAMES, **FUNCTION_NAMES}


def parse(text: str, *, axes: Collection[str] | None = None) -> Expression:
    """Parse an array, an einsum or a chain. axes: the axes of the mesh; None without a mesh.

    >>> str(parse("B M_x @ M_x E = B E (partial result) -> RS over x -> B E_x"))
    'B M_x @ M_x E = B E{U_x} -> RS over x -> B E_x'
    """
    reader = Reader(text, axes)
    operands: list[ShardedArray] = []
    stages = _calls(reader) if _at_function(reader) else _product(reader, operands)
    while stages and reader.accept("arrow"):
        _stage(reader, stages)
    reader.expect("end", "-> or the end")
    if not stages:
        return reader.build(0, Einsum, tuple(operands))
    start = reader.build(0, Einsum, tuple(operands), stages[0].result) if operands else stages[0].result
    return reader.build(0, Chain, start, tuple(stages[1:])) if len(stages) > 1 else start


def parse_numbers(text: str) -> dict[str, int]:
    """Parse degrees of mesh axes or sizes of dims, whole numbers of at least 1: `X=4,Y=2`, `B=64Ki,D=8192`."""
    reader = Reader(text, None)
    numbers: dict[str, int] = {}
    while True:
        name = reader.expect("word", "a name, as in X=4,Y=2,")
        if name.text in numbers:
            raise reader.mistake(f"{name.text} is given twice", name.position)
        reader.expect("=", f"= and a number after {name.text}")
        number = reader.expect("number", "a whole number")
        # `8k` and `8Ki` are two tokens.
        end = number.position + len(number.text)
        unit = reader.take().text if reader.token.kind == "word" and reader.token.position == end else ""
        try:
            value = parse_count(number.text + unit)
        except MeshwrightError:
            value = 0
        if not 1 <= value <= 10**18:
            wrong = f"{name.text}={number.text}{unit}; it is a whole number from 1, as 4096, 8k or 8Ki"
            raise reader.mistake(wrong, number.position)
        numbers[name.text] = value
        if not reader.accept(","):
            reader.expect("end", ", or the end")
            return numbers


@dataclass(frozen=True)
class _Call:
    """A collective in function notation, such as `AllToAll_{X,I->J}`.

    words: the words of its subscript. dims: the two dims of an all-to-all; () if the subscript has none.
    """

    kind: Kind
    position: int
    words: tuple[Token, ...]
    dims: tuple[str, ...] = ()


def _product(reader: Reader, operands: list[ShardedArray]) -> list[Stage]:
    """Read the start of an expression: an array, or an einsum, whose operands are appended to `operands`.

    Return a list of one `Stage` with the array, or with the einsum's result. The list is empty if the text has an
    einsum without its result.
    """
    first = read_array(reader)
    while reader.accept("times"):
        operands.append(read_array(reader))
    if not operands:
        return [Stage(None, (), first)]
    operands.insert(0, first)
    if not reader.accept("arrow", "="):
        return []
    if _at_maxtext_collective(reader):
        raise reader.mistake("the product's own result comes first, as in C[I, K]{U_X} or B E", reader.token.position)
    position = reader.token.position
    result = read_array(reader)
    reader.build(position, Einsum, tuple(operands), result)
    if reader.accept("("):
        result = reader.build(position, with_unreduced, result, _read_partial(reader, operands, result))
    return [Stage(None, (), result)]


def _read_partial(reader: Reader, operands: list[ShardedArray], result: ShardedArray) -> tuple[str, ...]:
    """Read MaxText's `(partial result)` after its opening parenthesis.

    Return the axes to add to the result's `unreduced`: those that shard a summed dim.
    """
    position = reader.token.position
    reader.accept("local")
    for word in ("partial", "result", ")"):
        if not reader.accept(word):
            raise reader.mistake("only (partial result) may be in parentheses after an array", reader.token.position)
    summed = [d for array in operands for d in array.dims if d not in result.dims]
    axes = dict.fromkeys(axis for dim in summed for array in operands for axis in array.axes_of(dim))
    if not axes:
        raise reader.mistake("the result is not partial: no mesh axis splits a summed dim", position)
    return tuple(axis for axis in axes if axis not in result.unreduced)


def _calls(reader: Reader) -> list[Stage]:
    """Read nested calls such as `AllGather_X(ReduceScatter_{Y,K}(C[I_X, K]{U_Y})) -> C[I, K_Y]`.

    Return the innermost array as a `Stage`, then a stage for each call, innermost first.
    """
    calls: list[_Call] = []
    while _at_function(reader):
        calls.append(_call(reader))
        reader.expect("(", "(")
    stages = [Stage(None, (), read_array(reader))]
    while calls:
        reader.expect(")", ")")
        call = calls.pop()
        wanted = read_array(reader) if not calls and reader.accept("arrow") else None
        words, dims = list(call.words), call.dims
        # In a reduce-scatter of several words, the last one is a dim if the operand has a dim of that name.
        if call.kind == "reduce-scatter" and len(words) > 1 and words[-1].text in stages[-1].result.dims:
            dims = (words.pop().text,)
        axes = tuple(axis for word in words for axis in resolve(reader, word.text, word.position))
        _add_collective(reader, stages, call.kind, axes, dims, wanted, call.position)
    return stages


def _call(reader: Reader) -> _Call:
    """Read a call up to its opening parenthesis: `ReduceScatter_{X,K}` or `AllToAll_{X,I->J}`."""
    token = reader.take()
    name, _, rest = token.text.partition("_")
    if rest:
        return _Call(_KINDS[name], token.position, (Token("word", rest, token.position + len(name) + 1),))
    reader.expect("{", f"the mesh axes of {name}, as in {name}_X,")
    words = [reader.expect("word", "a mesh axis")]
    while reader.accept(","):
        words.append(reader.expect("word", "a mesh axis or a dim"))
    dims: tuple[str, ...] = ()
    if reader.accept("arrow"):
        dims = (words.pop().text, reader.expect("word", "the dim to split").text)
    reader.expect("}", "}")
    if not words or (dims and _KINDS[name] != "all-to-all"):
        raise reader.mistake(
            f"{name} takes mesh axes, as in {name}_X; I->J only in AllToAll_{{X,I->J}}", token.position
        )
    return _Call(_KINDS[name], token.position, tuple(words), dims)


def _stage(reader: Reader, stages: list[Stage]) -> None:
    """Read the stage after an arrow, `RS over x -> B E_x` or an array to reshard to, and append it to `stages`."""
    position = reader.token.position
    if not _at_maxtext_collective(reader):
        stage = Stage(None, (), read_array(reader))
        reader.build(position, check_stage, stages[-1].result, stage)
        stages.append(stage)
        return
    kind = _KINDS[reader.take().text]
    reader.accept("over")
    axes = read_axes(reader)
    wanted = read_array(reader) if reader.accept("arrow") else None
    _add_collective(reader, stages, kind, axes, (), wanted, position)


def _add_collective(
    reader: Reader,
    stages: list[Stage],
    kind: Kind,
    axes: tuple[str, ...],
    dims: tuple[str, ...],
    wanted: ShardedArray | None,
    position: int,
) -> None:
    """Append a collective to the stages of a chain.

    The operand of a reduce-scatter or an all-reduce must be a partial sum. If the text does not mark it as unreduced
    over `axes`, it is marked here.

    Args:
        reader: the reader of the text.
        stages: the stages so far; the last one's result is the operand.
        kind: the kind of collective.
        axes: the mesh axes of the collective.
        dims: the dim that a reduce-scatter shards, or source and target of an all-to-all; () if the call has none.
        wanted: the result that the text states, if any.
        position: where the collective is in the text, for errors.
    """
    before = stages[-1].result
    if kind in ("reduce-scatter", "all-reduce"):
        missing = tuple(axis for axis in axes if axis not in before.unreduced)
        before = reader.build(position, with_unreduced, before, missing)
        stages[-1] = replace(stages[-1], result=before)
    result = reader.build(position, _outcome, before, kind, axes, dims, wanted)
    stage = Stage(kind, axes, result)
    reader.build(position, check_stage, before, stage)
    stages.append(stage)


def _outcome(
    before: ShardedArray, kind: Kind, axes: tuple[str, ...], dims: tuple[str, ...], wanted: ShardedArray | None
) -> ShardedArray:
    """Return the array after a collective: `wanted` if the text states one. Raises if `wanted` contradicts `dims`.

    dims: as in `_add_collective`.
    """
    if kind == "all-gather":
        return wanted or gathered(before, axes)
    if kind == "all-reduce":
        return wanted or reduced(before, axes)
    if not dims and wanted:
        return wanted
    if not dims:
        raise MeshwrightError(f"the dim that {', '.join(axes)} will split is missing; write the result after ->")
    result = scattered(before, axes, dims[0]) if kind == "reduce-scatter" else exchanged(before, axes, *dims)
    if wanted and not wanted.has_sharding_of(result):
        raise MeshwrightError(f"the collective leaves {result}, not {wanted}")
    return wanted or result


def _at_function(reader: Reader) -> bool:
    """Whether a collective in function notation, such as `AllGather_X(`, comes next."""
    return reader.token.text.partition("_")[0] in FUNCTION_NAMES and reader.following.kind in ("(", "{")


def _at_maxtext_collective(reader: Reader) -> bool:
    """Whether a collective in MaxText's notation, such as `RS over x`, comes next."""
    return reader.token.text in _KINDS and reader.following.kind != "["
