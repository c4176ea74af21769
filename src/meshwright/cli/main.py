"""`meshwright COMMAND …`: import the command's module, parse its arguments and run it.

Mistakes, interruptions and failed writes are reported in one line on stderr; exit codes tell how the command ended.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType

from meshwright.errors import MeshwrightError, TemporaryError, did_you_mean
from meshwright.support.signals import handled_signals, not_ignored

COMMANDS = {
    "plan": "find the best mesh for a model, chips and a batch: memory, collectives, step time, and why",
    "verify": "compile the step of a plan with the real XLA compiler, and compare it with the plan",
    "inspect": "report what any compiled program does: collectives by axis, memory, flops, and its mistakes",
    "fix": "print a diff with the fewest sharding constraints that make your function compile to its plan",
    "tokenize": "convert files to a token store that runs read directly: JSON lines, Parquet, Arrow, text, chats",
    "train": "train a model on a mesh, from 8 simulated devices up",
    "launch": "train as several processes, here under a supervisor, or as a job of Slurm, Kubernetes or Cloud TPU",
    "report": "write one HTML page about runs: curves, predicted and measured figures, memory, devices, goodput",
    "generate": "generate text with a trained model, from a run or a Hugging Face directory, and print the speed",
    "serve": "serve a model over HTTP with OpenAI's API, with continuous batching",
    "export": "write a run as a Hugging Face directory that transformers loads, or such a directory in another dtype",
    "eval": "score a model: loss and perplexity of texts, or accuracy on multiple-choice questions",
    "bench-serve": "measure a server with OpenAI's API under load: latency, throughput, goodput; compare with a plan",
    "matmul": "show the case of a sharded matmul, its collectives, and the predicted time of each implementation",
    "collective": "predict the time of one collective on a fabric, and run it on small numbers",
    "chips": "list the known chips: peaks, memory, links, slices, and the source of each figure",
    "devices": "list the devices of this machine: kind, coordinates, processes, memory",
    "show": "draw each device's part of a sharded array",
    "show pipeline": "draw a pipeline over time: the work of each stage in each slot, and its idle slots",
    "learn": "eleven lessons on sharding with graded exercises: print one, write it as a notebook, grade it",
    "demo": "run the main workflow on this machine: plan, verify, train, measure, generate; plan an absent TPU slice",
    "completion": "install the completion of commands and options for your shell: bash, zsh or fish",
}

SHOWS = ("show", "show pipeline")
"""Two commands whose options users confuse: an error about an option of the other one names that command."""

SEVERAL_KINDS = ("plan", "verify")
"""Commands with several kinds of arguments: their modules have `KINDS`, `HINTS` and `args_of`."""

EXTRAS = {
    **dict.fromkeys(("tokenize", "train", "demo"), ("train",)),
    **dict.fromkeys(("generate", "eval", "export"), ("train", "serve")),
    **dict.fromkeys(("serve", "bench-serve"), ("serve",)),
}
"""The pip extras that a command needs; of several, any one is enough. Others need only the base installation."""

EXIT_CODES = {
    0: "done",
    1: "a check failed (a plan does not fit or is too late, --tolerance, findings with --check, a fix is not proved, a"
    " loss is NaN), or a temporary state: another process trains in the directory, or did not join",
    2: "wrong input: one line on stderr has the reason and the correction",
    130: "interrupted with Ctrl-C",
    143: "ended by SIGTERM; a training saves within its grace period and ends with 0",
}
"""Meanings of the exit codes, for all commands."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM, treated as an interruption, so that child processes of a command, e.g. a compiling one, are ended."""


class _Stopped(KeyboardInterrupt):
    """SIGTERM to a training: a supervisor's request to stop, which is not a failure."""


_ENDS: dict[int, tuple[type[KeyboardInterrupt], int, str]] = {
    signal.SIGINT: (KeyboardInterrupt, 130, "interrupted; the same command begins again"),
    signal.SIGTERM: (_Terminated, 143, "ended by SIGTERM; the same command begins again"),
}
"""For each signal: the exception to raise, the exit code and the line to print."""

_STOP = (_Stopped, 0, "stopped by SIGTERM before the first step; the same command begins again")
"""Exception, exit code and line for SIGTERM before a training starts. After its start, see `training.interrupt`."""


def _interrupt(number: int, frame: FrameType | None, *, is_stop: bool = False) -> None:
    """Raise the signal's exception; during imports, when nothing has started, end the process at once.

    An extension interrupted while it is imported aborts the process, or loses the interruption.
    """
    kind, code, line = _STOP if is_stop else _ENDS[number]
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, f"{line}\n".encode())
            os._exit(code)
        frame = frame.f_back
    raise kind


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return one of `EXIT_CODES`."""
    try:
        with handled_signals(not_ignored(_ENDS), _interrupt):
            return _guarded(argv)
    finally:
        if argv is None:
            # At exit Python would search all objects that a plan's search has kept for cycles, which takes seconds.
            gc.freeze()


def _guarded(argv: Sequence[str] | None) -> int:
    """Run one command and return its exit code; report in one line whatever ends it early."""
    # stdout is flushed at the end, since only then a failed write of the result is noticed.
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except MeshwrightError as error:
        return _fail(f"error: {error}", 1 if isinstance(error, TemporaryError) else 2)
    except KeyboardInterrupt as interrupt:
        _, code, line = next(end for end in (*_ENDS.values(), _STOP) if end[0] is type(interrupt))
        return _fail(line, code)
    except BrokenPipeError:
        _drop_output()
        return 0  # The reader closed the pipe, as `head` does: no error.
    except OSError as error:
        if error.filename is not None:
            return _fail(f"error: cannot use {error.filename}: {error.strerror}", 2)
        _drop_output()
        return _fail(f"error: cannot write the output: {error.strerror or error}", 2)
    except MemoryError:
        return _fail("error: this needs more memory than the machine has; take smaller sizes", 2)


def _main(words: list[str]) -> int:
    """Run the command that the words of the command line name; return its exit code."""
    from meshwright.cli.waiting import waiting
    from meshwright.support.encoding import write_ascii_where_needed

    write_ascii_where_needed()
    if words == ["help", "models"]:
        from meshwright.description.families.load import RESNETS
        from meshwright.description.families.registry import PRESETS

        print("\n".join((*PRESETS, *RESNETS)))
        return 0
    if words and words[0] in ("help", "-h", "--help"):
        if (name := " ".join(words[1:])) not in ("", *COMMANDS):
            raise MeshwrightError(_no_command(name))
        words = [*words[1:], "--help"]
    if not words or words[0] == "--help":
        print(_help())
        return 0 if words else 2
    if words[0] in ("--version", "-V", "version"):
        if words[1:]:
            raise MeshwrightError(f"{words[0]} takes nothing behind it; leave {words[1]!r} out")
        from meshwright import __version__

        print(f"meshwright {__version__}")
        return 0
    # If two commands begin with the same word, prefer the one with two words.
    two = " ".join(words[:2])
    name, rest = (two, words[2:]) if two in COMMANDS else (words[0], words[1:])
    if name not in COMMANDS:
        raise MeshwrightError(_no_command(name))
    if name == "train" and signal.getsignal(signal.SIGTERM) is _interrupt:
        signal.signal(signal.SIGTERM, functools.partial(_interrupt, is_stop=True))
    if name == "plan":
        # A plan's search keeps many objects, without cycles: collecting cycles would take a tenth of its time.
        gc.disable()
    try:
        # Only the command's own file is imported: `plan` answers before JAX would have loaded.
        with waiting(f"loading {name}"):
            module = command_module(name)
        return _run(module, name, rest)
    except ModuleNotFoundError as error:
        from meshwright.support.extras import missing_extra

        raise missing_extra(name, error) or error from None
    finally:
        gc.enable()


def command_module(name: str) -> ModuleType:
    """Return the module of a command, one of `COMMANDS`; it has `EXAMPLES`, `Args` and `run`."""
    module = importlib.import_module(f"meshwright.cli.{name.replace(' ', '.').replace('-', '_')}")
    return importlib.import_module(f"{module.__name__}.command") if hasattr(module, "__path__") else module


def _run(module: ModuleType, name: str, words: list[str]) -> int:
    """Parse a command's arguments as its dataclass declares them, and run it; return its exit code."""
    from meshwright.cli.typed import check_all_read, watch
    from meshwright.cli.words.read import canonical, read_words

    words = canonical(words)
    args, kinds, hints = module.Args, {}, {}
    if name in SEVERAL_KINDS:
        args, kinds = module.args_of(words), module.KINDS
        hints = module.HINTS.get(args, {})
    if name in SHOWS:
        kinds = {one: command_module(one).Args for one in SHOWS}
    if {"-h", "--help"} & set(words):
        from meshwright.cli.words.help import help_text

        print(help_text(args, name, module.EXAMPLES))
        return 0
    read, typed = read_words(words, args, kinds=kinds, hints=hints)
    if name in EXTRAS:
        from meshwright.support.extras import require_extra

        require_extra(name, *EXTRAS[name])
    if "on" in typed:
        from meshwright.description.hardware.system import cloud_note

        text = next(group.on for group in (read, *vars(read).values()) if hasattr(group, "on"))
        if note := cloud_note(text):  # a Cloud TPU name, such as v4-32, that counts cores
            print(f"note: {note}", file=sys.stderr)
    watched = watch(read, typed)
    code = module.run(watched)
    check_all_read(watched)
    return code


def _no_command(name: str) -> str:
    """Return the error message for an unknown command."""
    from difflib import get_close_matches

    hint = did_you_mean(get_close_matches(name, COMMANDS, n=1))
    return f"no command {name!r}; {hint}commands are {', '.join(COMMANDS)}"


def _help() -> str:
    """Return the help of all commands."""
    from meshwright.pictures.text import wrap

    lines = [line for name, what in COMMANDS.items() for line in wrap(what, first=f"  {name:<15}", then=" " * 17)]
    codes = [line for code, what in EXIT_CODES.items() for line in wrap(what, first=f"  {code:<5}", then=" " * 7)]
    counts = wrap(
        "Counts may be written as 4096, 64k (thousands), 64Ki (of 1024), 4M; chips as v5p:4x4x4, h100:64, 2*v6e:16x16"
        " (two slices) or as Cloud names them, v5p-512."
    )
    last = "meshwright COMMAND --help says what a command takes."
    return "\n".join(["usage: meshwright COMMAND …", "", *lines, "", "exit codes", *codes, "", *counts, last])


def _fail(line: str, code: int) -> int:
    """Print the reason why a command ended, in one line on stderr; return its exit code."""
    with contextlib.suppress(OSError):  # If stderr is closed, the exit code still reports it.
        print(line, file=sys.stderr, flush=True)
    return code


def _drop_output() -> None:
    """Discard stdout's buffer: Python would fail to write it again at exit."""
    with contextlib.suppress(OSError, ValueError):  # stdout may not be a file, as in tests.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
