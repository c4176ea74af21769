"""Run a script until it calls a jitted function, and return that call: scripts need no change to be inspected.

`jax.jit` and `jax.pmap` are replaced while the script runs; Flax and Equinox use them, so their functions are recorded
too. The script runs on the devices of this process, with real values; it ends at the chosen call.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.core import Tracer

from meshwright.errors import MeshwrightError, did_you_mean, near_names
from meshwright.proof.compiler.worker import error_text
from meshwright.proof.inspection.meshes import Call
from meshwright.proof.inspection.script import Script
from meshwright.support.replaced import replaced
from meshwright.units import show_flops

T = TypeVar("T")

_MOST_CALLS = 1000
"""A script whose jitted functions have no matmul is stopped after this many calls of one function."""

_MOST_FRAMES = 8
"""Frames between a library's wrapper of a jitted function and the function: 3 in Equinox 0.13, 2 in Flax 0.12."""


class Taken(NamedTuple, Generic[T]):
    """The result of `run_script`: the result of its `take`, the called function's name, and how the call was chosen."""

    result: T
    name: str
    note: str


def run_script(script: Script, take: Callable[[Call], T], source: ast.Module | str | None = None) -> Taken[T]:
    """Run a script, and pass one call of a jitted function to `take`, at the place of that call.

    If `script` names a function, its first call is chosen. Otherwise it is a call of the function with the most matmul
    flops, or of the last function if none has matmuls: the second call, whose arguments have steady-state shardings, or
    the only one.

    Args:
        script: the script.
        take: called with the chosen call at the place where the script makes it, so inside the script's `jax.set_mesh`
            and other contexts. Its errors are raised here.
        source: text or syntax tree to run in place of the script's text.

    Raises:
        MeshwrightError: the script fails before the call, or makes none.
    """
    source = source or script.parsed()
    recorder = _Recorder(script.name, take)
    failed = None
    main = ModuleType("__main__")
    main.__file__ = str(script.file)
    with ExitStack() as stack:
        stack.enter_context(_running(main, script))
        stack.enter_context(recorder.recording())
        stack.enter_context(redirect_stdout(sys.stderr))
        recorder.names = vars(main)
        try:
            exec(compile(source, str(script.file), "exec"), vars(main))
        except _Cut:
            pass
        except SystemExit as error:
            failed = f"exit code {error.code}" if error.code else None
        except Exception as error:  # A script may raise anything.
            failed = error_text(error).partition("\n")[0]
        # A process that ends while its simulated devices compute may crash.
        for array in jax.live_arrays():
            with suppress(Exception):  # of the script's own computation, or of an array deleted meanwhile
                array.block_until_ready()
    if recorder.chosen is None or (failed and not recorder.chosen.flops and recorder.failed is not recorder.chosen):
        ended = f"failed here ({failed})" if failed else "ran to its end"
        raise MeshwrightError(f"{script.file} {ended}, and {recorder.missing()}")
    if isinstance(recorder.taken, Exception):
        raise recorder.taken
    assert recorder.taken is not None
    note = f"; then the script failed here, which changes nothing in this report: {failed}" if failed else ""
    return Taken(recorder.taken, recorder.chosen.name, recorder.told(script.file) + note)


class _Cut(BaseException):
    """Raised to end a script at the chosen call. It is not an `Exception`, so that the script does not catch it."""


class _Function:
    """A jitted function of a script, and how often it was called. flops: those of its matmuls in one call."""

    def __init__(self, jitted: Any) -> None:
        self.code = getattr(inspect.unwrap(jitted), "__code__", jitted)
        self.name = getattr(jitted, "__name__", type(jitted).__name__)
        self.count = 0
        self.flops = 0


class _Recorder(Generic[T]):
    """Records calls of jitted functions, and ends the script at the chosen one, which is passed to `take`.

    wanted: the name of the function to choose; '' for the one with the most matmul flops.
    """

    def __init__(self, wanted: str, take: Callable[[Call], T]) -> None:
        self.wanted, self.take = wanted, take
        self.names: Mapping[str, Any] = {}
        self.functions: list[_Function] = []
        self.chosen: _Function | None = None
        self.failed: _Function | None = None
        self.taken: T | Exception | None = None
        self.is_recording = self.is_done = False
        self._thread = threading.local()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which calls of `jax.jit` and `jax.pmap`, and of the functions that they return, are recorded."""
        self.is_recording = True
        with ExitStack() as stack:
            for name in ("jit", "pmap"):
                stack.enter_context(replaced(jax, name, self._recorded(getattr(jax, name))))
            # Scripts for several hosts call it first; here one process represents all of them.
            stack.enter_context(replaced(jax.distributed, "initialize", lambda *_, **__: None))
            yield
        self.is_recording = False

    def _recorded(self, jit: Any) -> Any:
        """Wrap `jax.jit` or `jax.pmap` so that the calls of the functions that it returns are recorded."""

        @functools.wraps(jit)
        def recorded(*args: Any, **options: Any) -> Any:
            made = jit(*args, **options)
            if not hasattr(made, "lower"):
                return lambda function: self._add(made(function))
            return self._add(made)

        return recorded

    def _add(self, jitted: Any) -> Any:
        self.functions.append(_Function(jitted))
        return _Recorded(jitted, self.functions[-1], self)

    def run(self, recorded: _Recorded, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call from the script itself, and run it. Calls inside jitted functions are not recorded.

        method: the jitted function, or its `lower`.
        """
        is_inside = not self.is_recording or getattr(self._thread, "is_inside", False)
        if is_inside or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return method(*args, **kwargs)
        self._thread.is_inside = True
        try:
            self.record(recorded, Call(recorded.jitted, args, kwargs), is_call=method is recorded.jitted)
            return method(*args, **kwargs)
        except Exception:
            self.failed = recorded.function
            raise
        finally:
            self._thread.is_inside = False

    def record(self, recorded: _Recorded, call: Call, *, is_call: bool) -> None:
        """Record a call. Pass it to `take` if it is the best so far; end the script if no better call is expected.

        is_call: False if the function is only lowered: calls of its compiled program are not recorded.
        """
        if self.is_done:
            raise _Cut
        function = recorded.function
        if function.count == 0 and not self.wanted:
            function.flops = _flops(call)
            # A function that is jitted again in each iteration of a loop, as in `jax.jit(step)(state)`, is one.
            alike = (one for one in self.functions if one.code is function.code and one.flops == function.flops)
            function = recorded.function = next((one for one in alike if one.count), function)
        function.count += 1
        if self.wanted:
            is_last = self.wanted == function.name or self.names.get(self.wanted) is recorded
            is_best = is_last
        else:
            is_best = function.flops >= max(one.flops for one in self.functions) and function.count <= 2
            is_step = is_best and function.flops > 0
            is_last = (is_step and (function.count == 2 or not is_call)) or function.count == _MOST_CALLS
        if is_best:
            self.chosen = function
            try:
                self.taken = self.take(_wrapped_call() or call)
            except Exception as error:  # raised when the script has ended, which might catch it
                self.taken = error
        if is_last:
            self.is_done = True
            raise _Cut

    def missing(self) -> str:
        """Return the error text: the named function was not called, and the functions that were."""
        called = list(dict.fromkeys(one.name for one in self.functions if one.count))
        others = list(dict.fromkeys(one.name for one in self.functions if not one.count))
        if not self.wanted:
            return f"called no jitted function; it jits {', '.join(others)}" if others else "called no jitted function"
        near = did_you_mean(near_names(self.wanted, [*called, *others]))
        return f"called no jitted function {self.wanted}; {near}it called {', '.join(called) or 'none'}"

    def told(self, file: Path) -> str:
        """Return the note on the chosen call of the script `file`, and on the other jitted functions that it called."""
        assert self.chosen is not None
        one = self.chosen
        told = f"{file}: {one.name} at its call {one.count}"
        if self.wanted:
            return told
        why = (
            f"most flops in matmuls, {show_flops(one.flops)} on all devices"
            if one.flops
            else "no jitted function has matmuls"
        )
        others = list(dict.fromkeys(other.name for other in self.functions if other.name != one.name))
        rest = f"; others: {', '.join(others[:6])}; {file}:NAME takes one of them" if others else ""
        return f"{told} ({why}){rest}"


class _Recorded:
    """A jitted function that records its calls."""

    def __init__(self, jitted: Any, function: _Function, recorder: _Recorder[Any]) -> None:
        functools.update_wrapper(self, jitted, updated=())
        self.__wrapped__ = getattr(jitted, "__wrapped__", jitted)
        self.jitted, self.function, self.recorder = jitted, function, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.recorder.run(self, self.jitted, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower the function, which counts as a call: scripts that compile ahead of time call the result."""
        return self.recorder.run(self, self.jitted.lower, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "_jit_info":  # by which a function that JAX made itself is known
            raise AttributeError(name)
        return getattr(self.jitted, name)

    def __reduce__(self) -> Any:
        # A copy of a function that calls this one, for another mesh, calls the jitted function itself.
        return _same, (self.jitted,)


def _wrapped_call() -> Call | None:
    """Return the call of the enclosing wrapper, e.g. of `nnx.jit`, when a jitted function is called; else None.

    The wrapper can be lowered for other devices; the function that it passes to `jax.jit` may depend on its context.
    """
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        name, here, frame = frame.f_code.co_name, frame.f_locals, frame.f_back
        wrapper, args = here.get("self"), here.get("args")
        is_wrapper = callable(getattr(wrapper, "lower", None)) and not isinstance(wrapper, _Recorded)
        if name == "__call__" and is_wrapper and isinstance(args, tuple):
            return Call(wrapper, args, here.get("kwargs", {}))
        if frame is None:
            break
    return None


def _same(jitted: Any) -> Any:
    return jitted


def _flops(call: Call) -> int:
    """Return the flops of a call's matmuls; 0 if tracing fails: the call itself will raise the error."""
    try:
        return _matmul_flops(call.function.trace(*call.args, **call.kwargs).jaxpr.jaxpr)
    except Exception:
        return 0


def _matmul_flops(jaxpr: Any) -> int:
    """Return the flops of a jaxpr's matmuls and convolutions on all devices; of a `while` those of one iteration."""
    flops = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            sizes = eqn.invars[0].aval.shape
            flops += 2 * eqn.outvars[0].aval.size * math.prod(sizes[dim] for dim in contracted)
        elif eqn.primitive.name == "conv_general_dilated":
            kernel, features = eqn.invars[1].aval, eqn.params["dimension_numbers"].rhs_spec[0]
            flops += 2 * eqn.outvars[0].aval.size * kernel.size // kernel.shape[features]
        else:
            called = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda one: hasattr(one, "eqns"))
            inner = [_matmul_flops(getattr(one, "jaxpr", one)) for one in called if hasattr(one, "eqns")]
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            times *= eqn.params["mesh"].size if eqn.primitive.name == "shard_map" else 1
            flops += times * (max(inner, default=0) if eqn.primitive.name == "cond" else sum(inner))
    return flops


@contextmanager
def _running(main: ModuleType, script: Script) -> Iterator[None]:
    """Context in which a script can run as `python FILE ARGUMENTS…` runs it; it does not run the script itself.

    `sys.argv` has the script's arguments, `sys.path` begins with its directory, and `main` is the module `__main__`.
    """
    own = sys.modules["__main__"]
    with ExitStack() as stack:
        stack.enter_context(replaced(sys, "argv", [str(script.file), *script.words]))
        stack.enter_context(replaced(sys, "path", [str(script.file.parent.resolve()), *sys.path]))
        stack.callback(sys.modules.__setitem__, "__main__", own)
        sys.modules["__main__"] = main
        stack.enter_context(jax.set_mesh(jax.sharding.get_mesh()))  # restores it if the script sets another
        yield
