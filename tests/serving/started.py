"""A server on a port of this machine, in a thread, for tests of HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fake_engine import FakeEngine

from meshwright.serving.http.app import make_app
from meshwright.serving.http.server import HttpServer
from meshwright.serving.http.service import Service


@dataclass
class Started:
    """A server that takes requests."""

    url: str
    service: Service
    server: HttpServer
    thread: threading.Thread
    errors: list[Exception]
    """What the server ended with."""

    @property
    def engine(self) -> FakeEngine:
        """The engine of `started`."""
        assert isinstance(self.service.engine, FakeEngine)
        return self.service.engine


def http_server(service: Service, **options) -> HttpServer:
    """A server of a service, which does not run yet."""
    app, async_engine = make_app(service)
    return HttpServer(service, app, async_engine.fail, **options)


@contextlib.contextmanager
def serving(
    service: Service, *, grace_seconds: float = 5.0, start: Callable[[], None] = lambda: None
) -> Iterator[Started]:
    """A server of a service; stopped at the end."""
    ready = threading.Event()
    server = http_server(
        service, host="127.0.0.1", port=0, grace_seconds=grace_seconds, start=start, on_ready=lambda url: ready.set()
    )
    errors: list[Exception] = []

    def run() -> None:
        try:
            server.run()
        except Exception as error:
            errors.append(error)
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(180)
    if errors:
        raise errors[0]
    try:
        yield Started(server.url, service, server, thread, errors)
    finally:
        server.stop()
        thread.join(15)
        assert not thread.is_alive()


@contextlib.contextmanager
def started(engine: FakeEngine, *, grace_seconds: float = 5.0, context: int = 512, **options) -> Iterator[Started]:
    """A server over a fake engine; stopped at the end."""
    service = Service(
        engine=engine, model="fake/model", context=context, tokenizer=engine.tokenizer, stats=engine.stats, **options
    )
    with serving(service, grace_seconds=grace_seconds) as found:
        yield found
