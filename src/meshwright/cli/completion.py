"""`meshwright completion SHELL`: install the completion of commands, options and choices for a shell."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from meshwright.cli.main import COMMANDS, SEVERAL_KINDS, command_module
from meshwright.cli.typed import check_all_read
from meshwright.cli.words.options import Option, declared_options
from meshwright.errors import MeshwrightError
from meshwright.options.declare import option, positional
from meshwright.pictures.text import wrap
from meshwright.support.files import write_error, write_file

EXAMPLES = (
    "meshwright completion bash",
    "meshwright completion zsh",
    "meshwright completion fish",
    "meshwright completion bash --print",
)


@dataclass(frozen=True)
class Args:
    """Install shell completion of commands, options and choices, in your home directory."""

    shell: Annotated[Literal["bash", "zsh", "fish"], positional("SHELL")]
    """bash, zsh or fish."""
    print: Annotated[bool, option()] = False
    """Print the script instead of installing it."""


def run(args: Args) -> int:
    """Write the script, or print it."""
    shell, is_printed = args.shell, args.print
    check_all_read(args)
    text = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()
    if is_printed:
        print(text, end="")
        return 0
    path, then = _place(shell)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from None
    write_file(path, text)
    print("\n".join(wrap(f"wrote {path}; {then}")))
    return 0


def _place(shell: str) -> tuple[Path, str]:
    """Return the file in which a shell looks for completions, and a text on what the user does next."""
    home = Path.home()
    if not os.environ.get("HOME", "x") or not home.is_dir():
        raise MeshwrightError(f"the home directory {str(home)!r} is not there; --print prints the script")
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    if shell == "bash":
        path = data / "bash-completion/completions/meshwright"
        return path, f"new shells have it (without the bash-completion package: source {shlex.quote(str(path))})"
    if shell == "fish":
        return config / "fish/completions/meshwright.fish", "new shells have it"
    path = home / ".zfunc/_meshwright"
    return path, "have in .zshrc, before compinit: fpath+=~/.zfunc; autoload -Uz compinit; compinit"


def _words() -> Iterator[tuple[str, dict[str, Option]]]:
    """Yield (name, options by name) of every command; `plan` and `verify` have the options of all their kinds."""
    for name in COMMANDS:
        module = command_module(name)
        options = dict(declared_options(module.Args))
        for kind in module.KINDS.values() if name in SEVERAL_KINDS else ():
            options |= declared_options(kind)
        yield name, options


_BASH = """\
# Completion of meshwright, made by `meshwright completion bash`.
_meshwright() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words=
    [[ $command == show && ${COMP_WORDS[2]} == pipeline && $COMP_CWORD -gt 2 ]] && command="show pipeline"
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "COMMANDS" -- "$word"))
        return
    fi
    case "$command $before" in
CHOICES
    esac
    if [[ -z $words && $word == -* ]]; then
        case "$command" in
OPTIONS
        esac
    fi
    [[ $command == show && $COMP_CWORD -eq 2 ]] && words="$words pipeline"
    [[ $command == completion && $COMP_CWORD -eq 2 ]] && words="$words bash zsh fish"
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [[ -n $words ]] || COMPREPLY=($(compgen -f -- "$word"))
}
complete -o filenames -F _meshwright meshwright
"""


def _bash() -> str:
    """Return the script for bash."""
    choices, options = [], []
    for name, known in _words():
        options.append(f'            "{name}") words="{" ".join([*known, "--help"])}" ;;')
        choices += [
            f'        "{name} {word}") words="{" ".join(found.choices)}" ;;'
            for word, found in known.items()
            if found.choices
        ]
    first = " ".join(name for name in COMMANDS if " " not in name)
    return (
        _BASH.replace("COMMANDS", first).replace("CHOICES", "\n".join(choices)).replace("OPTIONS", "\n".join(options))
    )


def _zsh() -> str:
    """Return the script for zsh, which loads the bash script."""
    return f"#compdef meshwright\nautoload -Uz bashcompinit && bashcompinit\n{_bash()}"


def _fish() -> str:
    """Return the script for fish."""
    lines = ["# Completion of meshwright, made by `meshwright completion fish`."]
    for name, what in COMMANDS.items():
        if " " not in name:
            lines.append(f"complete -c meshwright -n __fish_use_subcommand -f -a {name} -d {shlex.quote(what)}")
    lines.append("complete -c meshwright -n '__fish_seen_subcommand_from show' -a pipeline")
    for name, known in _words():
        # fish tests for one word: the options of `show pipeline` are completed after `pipeline`.
        seen = f"-n '__fish_seen_subcommand_from {name.split()[-1]}'"
        for word, found in known.items():
            if word.startswith("--"):
                values = f" -x -a '{' '.join(found.choices)}'" if found.choices else ""
                needs = "" if found.takes == "none" or values else " -r"
                lines.append(f"complete -c meshwright {seen} -l {word[2:]}{needs}{values}")
    return "\n".join(lines) + "\n"
