"""Text into one array, `A[I_X, J_{dp,fsdp}]{U_Y}` or `B_x E`, and the meaning of its subscripts.

A subscript is looked up whole among the axes of the mesh, else cut into known axes, the longest first; a mesh whose
axes are X, Y and XY reads `I_XY` as the third, and `I_{X,Y}` as the first two. Without a mesh, capital letters are an
axis each (`I_XY`) and any other word is one axis (`I_dp`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from meshwright.notation.array import ShardedArray
from meshwright.notation.tokens import Reader, Token


def parse_array(text: str, *, axes: Collection[str] | None = None) -> ShardedArray:
    """The one array that a text describes; `axes` are those of the mesh, None where there is none yet."""
    reader = Reader(text, axes)
    array = read_array(reader)
    reader.expect("end", "the end")
    return array


def read_array(reader: Reader) -> ShardedArray:
    """The array that stands next, with brackets and a name or as a row of dims."""
    first = reader.token
    array = _bracketed(reader) if reader.following.kind == "[" else _row(reader)
    brace = reader.accept("{")
    if brace:
        array = reader.build(brace.position, with_sum, array, _read_unreduced(reader))
    elif reader.token.kind == "[":
        raise reader.mistake(f"[ follows {first.text} only as its dims", reader.token.position)
    return array


def with_sum(array: ShardedArray, axes: tuple[str, ...]) -> ShardedArray:
    """The array marked as a sum still to be taken over `axes`, beside those it was marked with."""
    return replace(array, unreduced=array.unreduced + axes)


def read_axes(reader: Reader) -> tuple[str, ...]:
    """The mesh axes that stand next, without an underscore: `x`, `XY` or `{dp,fsdp}`."""
    if not reader.accept("{"):
        word = reader.expect("word", "a mesh axis")
        return resolve(reader, word.text, word.position)
    axes = resolve_word(reader)
    while reader.accept(","):
        axes += resolve_word(reader)
    reader.expect("}", "} after the mesh axes")
    return axes


def resolve_word(reader: Reader) -> tuple[str, ...]:
    """The axes of the word that stands next."""
    word = reader.expect("word", "a mesh axis")
    return resolve(reader, word.text, word.position)


def resolve(reader: Reader, word: str, position: int) -> tuple[str, ...]:
    """The axes that a word of a subscript means, by the rule at the top of this file."""
    if reader.axes is None:
        return tuple(word) if word.isalpha() and word.isupper() else (word,)
    found = (word,) if word in reader.axes else _cut(word, sorted(reader.axes, key=len, reverse=True))
    if found is None:
        raise reader.mistake(f"the mesh has no axis {word}; its axes are {', '.join(reader.axes) or 'none'}", position)
    return found


def _cut(word: str, axes: list[str]) -> tuple[str, ...] | None:
    """The known axes that a word is made of, None where it is not."""
    cuts: dict[int, tuple[str, ...]] = {len(word): ()}
    for start in reversed(range(len(word))):
        for axis in axes:
            rest = cuts.get(start + len(axis))
            if axis and rest is not None and word.startswith(axis, start):
                cuts[start] = (axis, *rest)
                break
    return cuts.get(0)


def _bracketed(reader: Reader) -> ShardedArray:
    """`A[I_X, J]`."""
    name = reader.expect("word", "the name of an array")
    reader.expect("[", "[")
    array = reader.build(name.position, ShardedArray, name.text, (), ())
    while not reader.accept("]"):
        if array.dims:
            reader.expect(",", ", or ] after a dim")
        array = _with_dim(reader, array)
    return array


def _row(reader: Reader) -> ShardedArray:
    """`B M_x`."""
    array = _with_dim(reader, None)
    while reader.token.kind == "word":
        array = _with_dim(reader, array)
    return array


def _with_dim(reader: Reader, array: ShardedArray | None) -> ShardedArray:
    """An array with the dim that stands next added to it, so that a mistake points at that dim."""
    word = reader.expect("word", "a dim" if array else "an array, as in A[I_X, J] or B_x E,")
    dim, _, rest = word.text.partition("_")
    axes = _read_subscript(reader, word, rest) if "_" in word.text else ()
    name, dims, split = (array.name, array.dims, array.axes) if array else ("", (), ())
    return reader.build(word.position, ShardedArray, name, (*dims, dim), (*split, axes))


def _read_subscript(reader: Reader, word: Token, rest: str) -> tuple[str, ...]:
    """The axes after the underscore of a word, which ends in it where braces follow."""
    if rest:
        return resolve(reader, rest, word.position + len(word.text) - len(rest))
    if reader.token.kind != "{":
        raise reader.mistake(f"a mesh axis expected after {word.text}", word.position + len(word.text))
    return read_axes(reader)


def _read_unreduced(reader: Reader) -> tuple[str, ...]:
    """The axes of `{U_X}`, its brace passed."""
    word = reader.expect("word", "U and a mesh axis, as in {U_X},")
    letter, _, rest = word.text.partition("_")
    if letter != "U" or "_" not in word.text:
        raise reader.mistake("braces after an array hold the axes it is unreduced over, as in {U_X}", word.position)
    axes = _read_subscript(reader, word, rest)
    reader.expect("}", "} after the unreduced axes")
    return axes
