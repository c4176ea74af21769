"""`meshwright.serve`: serve a model over HTTP until a signal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack

from meshwright.errors import MeshwrightError
from meshwright.execution.processes.options import processes_of
from meshwright.options.given import given
from meshwright.options.keywords import ServeOptions
from meshwright.options.processes import ProcessArgs
from meshwright.options.serving import ServeArgs
from meshwright.support.extras import require_extra


def serve(
    model: str | Path, *, on_ready: Callable[[str], None] = lambda url: None, **options: Unpack[ServeOptions]
) -> None:
    """Serve a model over HTTP with OpenAI's API until SIGINT (Ctrl-C) or SIGTERM, in the main thread; then return.

    After the signal, new requests get 503, and accepted ones are answered within `grace` seconds.

    Args:
        model: a Hugging Face directory, or a run of `meshwright train`.
        on_ready: called with the server's URL once it answers requests, in its own thread, so that it can send
            requests. An exception that it raises ends the server and is raised here.
        options: those of `meshwright serve` (`ServeOptions`); only `on` is needed, and not for a run.

    Raises:
        MeshwrightError: an option is wrong, the model cannot be served on these devices, or the port is in use.
    """
    require_extra("serve", "serve")
    from meshwright.serving.server import ServerProgress, run_server

    if threading.current_thread() is not threading.main_thread():
        raise MeshwrightError("serve runs in the main thread, which alone gets the signals that end it; call it there")
    said = given(options, ServeOptions.__annotations__)
    process = {field.name: said.pop(field.name) for field in fields(ProcessArgs) if field.name in said}
    if process and said.get("replicas", 1) != 1:
        raise MeshwrightError(f"{next(iter(process))} has no effect with replicas; leave it out")
    for name in ("adapter_folder", "plan", "draft_model", "api_keys"):
        if isinstance(said.get(name), str):
            said[name] = Path(said[name])
    for name in ("adapter", "limit", "cors", "allowed_host"):
        said[name] = _words(name, said.get(name, ()))
    if isinstance(said.get("mesh"), Mapping):
        said["mesh"] = ",".join(_words("mesh", said["mesh"]))
    args = ServeArgs(Path(model) if isinstance(model, str) else model, **said)
    run_server(args, processes_of(ProcessArgs(**process)), ServerProgress(on_ready))


def _words(name: str, value: Any) -> tuple[str, ...]:
    """Return the values of an option that takes several texts, as a tuple of texts.

    value: one text, a sequence of texts, or a mapping, which becomes NAME=VALUE texts.
    """
    if isinstance(value, Mapping):
        return tuple(f"{key}={each}" for key, each in value.items())
    words = (str(value),) if isinstance(value, str | Path) else value
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise MeshwrightError(f"{name} is {value!r}; it is a text or a list of texts")
    return tuple(words)
