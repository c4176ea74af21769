"""Parse one array, `A[I_X, J_{dp,fsdp}]{U_Y}` or `B_x E`, and resolve its subscripts to mesh axes.

A subscript is one axis if the mesh has an axis of that name; else it is split into axes, longest match first. On a mesh
with axes X, Y and XY, `I_XY` means the axis XY, and `I_{X,Y}` the axes X and Y. Without a mesh, a subscript of capital
letters has one axis for each letter (`I_XY`), and any other subscript is one axis (`I_dp`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.tokens import Reader, Token


def parse_array(text: str, *, axes: Collection[str] | None = None) -> ShardedArray:
    """Parse a text that is one array. axes: the axes of the mesh; None without a mesh."""
    reader = Reader(text, axes)
    array = read_array(reader)
    reader.expect("end", "the end")
    return array


def read_array(reader: Reader) -> ShardedArray:
    """Read an array: either a name with dims in brackets, or dims separated by spaces."""
    first = reader.token
    array = _read_bracketed(reader) if reader.following.kind == "[" else _read_row(reader)
    brace = reader.accept("{")
    if brace:
        word = reader.expect("word", "U and a mesh axis, as in {U_X},")
        letter, _, rest = word.text.partition("_")
        if letter != "U" or "_" not in word.text:
            raise reader.mistake("braces after an array hold the axes it is unreduced over, as in {U_X}", word.position)
        axes = _read_subscript(reader, word, rest)
        reader.expect("}", "} after the unreduced axes")
        array = reader.build(brace.position, with_unreduced, array, axes)
    elif reader.token.kind == "[":
        raise reader.mistake(f"[ follows {first.text} only as its dims", reader.token.position)
    return array


def with_unreduced(array: ShardedArray, axes: tuple[str, ...]) -> ShardedArray:
    """Return the array with `axes` added to those over which it is unreduced."""
    return replace(array, unreduced=array.unreduced + axes)


def read_axes(reader: Reader) -> tuple[str, ...]:
    """Read mesh axes that have no underscore before them: `x`, `XY` or `{dp,fsdp}`."""
    if not reader.accept("{"):
        return _read_word_of_axes(reader)
    axes = _read_word_of_axes(reader)
    while reader.accept(","):
        axes += _read_word_of_axes(reader)
    reader.expect("}", "} after the mesh axes")
    return axes


def _read_word_of_axes(reader: Reader) -> tuple[str, ...]:
    word = reader.expect("word", "a mesh axis")
    return resolve(reader, word.text, word.position)


def resolve(reader: Reader, word: str, position: int) -> tuple[str, ...]:
    """Return the axes that a word of a subscript means, by the rules at the top of this file.

    position: the place of the word in the text, for errors.
    """
    if reader.axes is None:
        return tuple(word) if word.isalpha() and word.isupper() else (word,)
    found = (word,) if word in reader.axes else _split_into_axes(word, sorted(reader.axes, key=len, reverse=True))
    if found is None:
        has = f"the mesh has no axis {word}; its axes are {', '.join(reader.axes) or 'none'}"
        raise reader.mistake(has + _spaced(word, reader.axes), position)
    return found


def _spaced(word: str, axes: Collection[str]) -> str:
    """Return advice for an error if `word` is an axis followed by a dim, as in `B_xE`; else ''."""
    for axis in sorted(axes, key=len, reverse=True):
        dims = word.removeprefix(axis)
        if axis and dims != word and dims[0].isupper():
            return f"; put spaces between dims: _{axis} {dims}"
    return ""


def _split_into_axes(word: str, axes: list[str]) -> tuple[str, ...] | None:
    """Split a word into axis names, preferring names that come earlier in `axes`; None if that is impossible."""
    suffixes: dict[int, tuple[str, ...]] = {len(word): ()}  # By start: the axes of word[start:].
    for start in reversed(range(len(word))):
        for axis in axes:
            rest = suffixes.get(start + len(axis))
            if axis and rest is not None and word.startswith(axis, start):
                suffixes[start] = (axis, *rest)
                break
    return suffixes.get(0)


def _read_bracketed(reader: Reader) -> ShardedArray:
    """Read an array with its dims in brackets: `A[I_X, J]`."""
    name = reader.expect("word", "the name of an array")
    reader.expect("[", "[")
    array = reader.build(name.position, ShardedArray, name.text, (), ())
    while not reader.accept("]"):
        if array.dims:
            reader.expect(",", ", or ] after a dim")
        array = _with_dim(reader, array)
    return array


def _read_row(reader: Reader) -> ShardedArray:
    """Read an array as dims separated by spaces: `B M_x`."""
    array = _with_dim(reader, None)
    while reader.token.kind == "word":
        array = _with_dim(reader, array)
    return array


def _with_dim(reader: Reader, array: ShardedArray | None) -> ShardedArray:
    """Read a dim and append it to `array`, or start a new array with it; an error points at the dim."""
    word = reader.expect("word", "a dim" if array else "an array, as in A[I_X, J] or B_x E,")
    dim, _, rest = word.text.partition("_")
    axes = _read_subscript(reader, word, rest) if "_" in word.text else ()
    name, dims, split = (array.name, array.dims, array.axes) if array else ("", (), ())
    return reader.build(word.position, ShardedArray, name, (*dims, dim), (*split, axes))


def _read_subscript(reader: Reader, word: Token, rest: str) -> tuple[str, ...]:
    """Return the axes of a subscript. rest: the text of `word` after its underscore; if '', braces follow the word."""
    if rest:
        return resolve(reader, rest, word.position + len(word.text) - len(rest))
    if reader.token.kind != "{":
        raise reader.mistake(f"a mesh axis expected after {word.text}", word.position + len(word.text))
    return read_axes(reader)
