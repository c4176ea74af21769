"""`meshwright COMMAND …`: finds the command's file, reads its arguments, runs it; a user's mistake ends with code 2."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from meshwright.errors import MeshwrightError

COMMANDS = {
    "plan": "from a model, chips and a batch to a mesh: memory, collectives, step time, and why",
    "verify": "compile the train step of a plan with the real XLA compiler, and compare it with the plan",
    "inspect": "what any compiled program really does: collectives by axis, memory, flops, and what is wrong with it",
    "train": "train a model on a mesh, from 8 simulated devices up",
    "generate": "write text with a model that was trained",
    "matmul": "what a sharded product costs: its case, its collectives, every way to do it",
    "collective": "what one collective takes on a fabric, and what it does to real numbers",
    "chips": "the chips there are: peaks, memory, links, slices, and where each figure is from",
    "show": "what each device holds of a sharded array, as a picture",
    "show pipeline": "a pipeline in time: what each stage does in each slot, and where it waits",
    "demo": "the whole story on this machine: plan, verify, train, measure, sample, and a TPU slice that is not there",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 a difference was found, 2 the call was wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else 2
    if words[0] in ("--version", "version"):
        from meshwright import __version__

        print(f"meshwright {__version__}")
        return 0
    # Of the commands that begin alike, the one of two words.
    two = " ".join(words[:2])
    name, rest = (two, words[2:]) if two in COMMANDS else (words[0], words[1:])
    try:
        if name not in COMMANDS:
            raise MeshwrightError(f"no command {name!r}; commands are {', '.join(COMMANDS)}")
        # Only the command's own file is imported: `plan` answers before JAX would have loaded.
        module = importlib.import_module(f"meshwright.cli.{name.replace(' ', '_')}")
        return _run(module, name, rest)
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0  # The reader of a pipe has seen enough.


def _run(module: ModuleType, name: str, words: list[str]) -> int:
    """Read the command's arguments as its dataclass declares them, and run it."""
    import tyro

    from meshwright.cli.words import canonical, check_words

    words = canonical(words)
    args, kinds, hints = module.Args, {}, {}
    if name == "plan":
        from meshwright.cli.plan_args import HINTS, KINDS, args_of

        args, kinds = args_of(words), KINDS
        hints = HINTS.get(args, {})
    check_words(words, args, kinds=kinds, hints=hints)
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    try:
        read = tyro.cli(args, args=words, prog=f"meshwright {name}", config=config)
    except SystemExit as left:
        if not left.code:
            print("\n".join(["", "examples", *(f"  {line}" for line in module.EXAMPLES)]))
        raise
    return module.run(read)


def _help() -> str:
    """What there is."""
    lines = [f"  {name:<15}{what}" for name, what in COMMANDS.items()]
    return "\n".join(
        ["usage: meshwright COMMAND …", "", *lines, "", "meshwright COMMAND --help says what a command takes."]
    )


if __name__ == "__main__":
    sys.exit(main())
