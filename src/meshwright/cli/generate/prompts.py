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
    given = [name for name, value in ways.items() if value]
    if len(given) > 1:
        raise MeshwrightError(f"{given[0]} and {given[1]} both give prompts; leave one out")
    return ways[given[0]] if given else None


def read_prompts(source: Sequence[str] | Path) -> Sequence[Prompt]:
    """Return typed prompts, or the prompts of a file: one per line, in a .jsonl file one per object. Raise for none."""
    if not isinstance(source, Path):
        if not all(source):
            raise MeshwrightError("a prompt is empty; give at least one character to continue from")
        return source
    from meshwright.execution.models.inference.prompts import prompt_of
    from meshwright.execution.text.lines import json_lines, read_text

    if source.suffix == ".jsonl":
        found = []
        for place, data in json_lines(source):
            try:
                found.append(prompt_of(data))
            except MeshwrightError as error:
                raise MeshwrightError(f"{place}: {error}") from None
    else:
        found = [line for line in read_text(source).splitlines() if line.strip()]
    if not found:
        raise MeshwrightError(f"{source} has no prompt; it holds one a line")
    return found


def converse(model: LoadedModel, options: GenerateOptions) -> int:
    """Answer messages typed on the terminal, with the whole conversation as context; return exit code 0 at Ctrl-D."""
    messages: list[dict[str, str]] = []
    while True:
        try:
            message = input("> ")
        except EOFError:
            print()
            return 0
        if not message.strip():
            continue
        messages.append({"role": "user", "content": message})
        answer = ""
        for piece in model.stream(messages, **options):
            print(piece.text, end="", flush=True)
            answer += piece.text
        print()
        messages.append({"role": "assistant", "content": answer})
