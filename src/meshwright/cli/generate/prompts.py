"""The prompts of `meshwright generate`: typed, from a file, or entered in a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from meshwright.execution.models.inference.loaded import LoadedModel, Prompt
    from meshwright.execution.models.inference.stream import GenerateOptions


def one_way(ways: Mapping[str, Any]) -> Any:
    """Return the value of the option that gives prompts, None if there is none; raise if several options give prompts.

    ways: the value of each such option, by its name.
    """
    said = [name for name, value in ways.items() if value]
    if len(said) > 1:
        raise MeshwrightError(f"{said[0]} and {said[1]} both give prompts; leave one out")
    return ways[said[0]] if said else None


def read_prompts(said: Sequence[str] | Path) -> Sequence[Prompt]:
    """Return typed prompts, or the prompts in a file: one per line, in a .jsonl file one per object."""
    if not isinstance(said, Path):
        if not all(said):
            raise MeshwrightError("a prompt is empty; give at least one character to continue from")
        return said
    from meshwright.execution.models.inference.prompts import prompt_of
    from meshwright.execution.text.lines import json_lines, read_text

    if said.suffix == ".jsonl":
        found = []
        for place, data in json_lines(said):
            try:
                found.append(prompt_of(data))
            except MeshwrightError as error:
                raise MeshwrightError(f"{place}: {error}") from None
    else:
        found = [line for line in read_text(said).splitlines() if line.strip()]
    if not found:
        raise MeshwrightError(f"{said} has no prompt; it holds one a line")
    return found


def converse(model: LoadedModel, options: GenerateOptions) -> int:
    """Answer messages typed on the terminal, with the whole conversation as context; return exit code 0 at Ctrl-D."""
    messages: list[dict[str, str]] = []
    while True:
        try:
            said = input("> ")
        except EOFError:
            print()
            return 0
        if not said.strip():
            continue
        messages.append({"role": "user", "content": said})
        answer = ""
        for piece in model.stream(messages, **options):
            print(piece.text, end="", flush=True)
            answer += piece.text
        print()
        messages.append({"role": "assistant", "content": answer})
