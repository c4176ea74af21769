"""Get the step that `plan` or `fix` plans, with its arguments: from a function that returns both, or from a script."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from meshwright.description.hardware.system import parse_system
from meshwright.errors import MeshwrightError
from meshwright.proof.inspection.script import read_script, simulate_devices

if TYPE_CHECKING:
    from meshwright.proof.inspection.meshes import Call

T = TypeVar("T")


class ProgramOptions(Protocol):
    """The options of a command that plans a function."""

    @property
    def model(self) -> str:
        """`MODULE:FUNCTION` or a script."""
        ...

    @property
    def on(self) -> str | None:
        """The hardware."""
        ...

    @property
    def mesh(self) -> str | None:
        """The mesh; None to search for the best."""
        ...

    @property
    def compiled(self) -> str:
        """The number of layouts to compile."""
        ...


def program_options(args: ProgramOptions) -> dict[str, Any]:
    """Return the keywords of `plan_program`, and prepare this process for importing the function, before JAX starts.

    A script gets as many simulated devices as the hardware has devices.
    """
    if args.on is None:
        raise MeshwrightError(f"{args.model} needs hardware: --on (on=…), as v5e:4x4")
    if not args.compiled.isdecimal():
        raise MeshwrightError(f"--compiled is {args.compiled!r}; it is a whole number, 0 to compile none")
    system = parse_system(args.on)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Only scripts run here; child processes compile.
    sys.path.insert(0, os.getcwd())  # As with `python -m`.
    script = read_script(args.model)
    if script is not None and not script.takes_nothing():
        simulate_devices(system.num_devices)
    return {"on": system, "mesh": args.mesh, "num_compiled": int(args.compiled)}


def take_call(name: str, take: Callable[[Call], T], rewrite: Callable[..., Any] | None = None) -> T:
    """Get a user's step with its arguments, pass them to `take` as a `Call`, and return its result.

    Args:
        name: `MODULE:FUNCTION` of a function without arguments that returns a step and the tuple of its arguments, or
            a script, as for `meshwright inspect`.
        take: called with the `Call`; for a script, inside the script where it calls its step.
        rewrite: changes the source of the user's modules (`sources`); None to import them unchanged.
    """
    from meshwright.proof.program_plans.sources import read_source, sources

    script = read_script(name)
    with nullcontext() if rewrite is None else sources(rewrite), _mesh_errors(name):
        if script is None or script.takes_nothing():
            return take(_call_of_function(name))
        from meshwright.proof.inspection.run_script import run_script

        script.parsed()  # Report a syntax error in one line.
        source = None if rewrite is None else rewrite(script.file, read_source(script.file))
        taken = run_script(script, take, source)
        print(f"{taken.name}: {taken.note}", file=sys.stderr)
        return taken.result


@contextmanager
def _mesh_errors(name: str) -> Iterator[None]:
    """Context that turns JAX's error for a constraint without a mesh into a one-line message."""
    try:
        yield
    except RuntimeError as error:
        if "requires a non-empty mesh" not in str(error):
            raise
        raise MeshwrightError(
            f"{name} has sharding constraints without a mesh; plan it without them, or set one with jax.set_mesh"
        ) from error


def _call_of_function(name: str) -> Call:
    """Import and call `MODULE:FUNCTION`; return the step and the arguments that the function returns, as a `Call`."""
    from meshwright.proof.compiler.load import load_function
    from meshwright.proof.inspection.meshes import Call

    build = load_function(name)
    wrong = f"{name} is a function without arguments that returns a step and the tuple of its arguments"
    try:
        step, step_args = build()
        step_args = tuple(step_args)
    except (TypeError, ValueError) as error:
        raise MeshwrightError(f"{wrong}: {error}") from error
    if not callable(step):
        raise MeshwrightError(f"{wrong}; it returned a {type(step).__name__} first")
    return Call(step, step_args)
