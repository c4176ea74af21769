"""Run an app on a port with uvicorn: start-up, readiness, signals and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
import uvloop
from starlette.types import ASGIApp

from meshwright.errors import MeshwrightError
from meshwright.serving.http.app import make_app
from meshwright.serving.http.connection import limited_protocol
from meshwright.serving.http.errors import CLOSE, ApiError
from meshwright.serving.http.middleware import shutting_down
from meshwright.serving.http.service import ServerState, Service
from meshwright.support.signals import handled_signals

SECONDS_IDLE = 60
"""Keep-alive time of a connection without a request.

OpenAI's clients close idle connections after 5 s. If the server closed one first, just as a request arrives on it, the
request would fail.
"""

SECONDS_TO_CLOSE = 5
"""Seconds that clients have at shutdown to read the rest of their responses."""


def serve_http(
    service: Service,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    grace_seconds: float = 30.0,
    start: Callable[[], None] = lambda: None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM or SIGINT, in the main thread.

    After a signal, new requests get 503; accepted ones are completed, or end with an error after `grace_seconds`. A
    second signal ends the process at once.

    Args:
        service: the engine, tokenizer and limits.
        host: the address to listen on.
        port: the port; 0 for a free one.
        grace_seconds: time for accepted requests to finish.
        start: loads and compiles the model; runs in a thread while `/health` answers 200 and `/ready` 503. Its
            exceptions end the server and are raised here.
        on_ready: called with the URL once requests are answered; runs in a thread. Its exceptions end the server too.

    Raises:
        MeshwrightError: the address cannot be listened on.
        Exception: the error that `Service.fail` was called with.
    """
    app, async_engine = make_app(service)
    serve_app(
        HttpServer(
            service,
            app,
            async_engine.fail,
            host=host,
            port=port,
            grace_seconds=grace_seconds,
            start=start,
            on_ready=on_ready,
        )
    )


def serve_app(server: HttpServer) -> None:
    """Run a server until SIGTERM or SIGINT, in the main thread. A second signal ends the process at once."""
    # The first signal never ends the process at once, even if the server is already stopping for another reason.
    was_signalled = False

    def handle(number: int, _: object) -> None:
        nonlocal was_signalled
        if was_signalled:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        was_signalled = True
        server.stop()

    with handled_signals((signal.SIGTERM, signal.SIGINT), handle):
        server.run()


class HttpServer:
    """An app on a port; it listens as soon as it is constructed.

    Args:
        service: the limits of requests, and the server's state (ready, draining, failed), which this class updates.
        app: the ASGI app.
        fail: ends all open requests with an error.
        host, port, grace_seconds, start, on_ready: as in `serve_http`.
        close: called at the end, in the server's event loop.
    """

    def __init__(
        self,
        service: ServerState,
        app: ASGIApp,
        fail: Callable[[ApiError], None],
        *,
        host: str,
        port: int,
        grace_seconds: float,
        start: Callable[[], None] = lambda: None,
        on_ready: Callable[[str], None] = lambda url: None,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._service, self._app, self._fail, self._close = service, app, fail, close
        self._grace_seconds = grace_seconds
        self._start = start
        self._on_ready = on_ready
        self._socket = _listen(host, port)
        service.host = host
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._socket.getsockname()[1]}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self.is_stopping = False

    def run(self) -> None:
        """Serve until `stop` is called."""
        config = uvicorn.Config(
            self._app,
            http=limited_protocol(self._service.limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=SECONDS_IDLE,
            timeout_graceful_shutdown=SECONDS_TO_CLOSE,
        )
        self._service.on_stop = self.stop
        # Errors of clients are in their responses, not in the log.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        server = _Uvicorn(config)

        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            serving = asyncio.ensure_future(server.serve(sockets=[self._socket]))
            try:
                await self._until_stopped()
                self._service.is_draining = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._grace_seconds):
                        while self._service.num_active:
                            await asyncio.sleep(0.02)
                self._fail(shutting_down())
            except Exception as error:  # Open requests get an error response before it ends the server.
                self._fail(ApiError(f"the engine failed: {error}", status=503, code="failed", headers=CLOSE))
                raise
            finally:
                server.should_exit = True
                await serving
                if self._close is not None:
                    await self._close()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())

    def stop(self) -> None:
        """Begin to shut down. Can be called from any thread and from signal handlers."""
        self.is_stopping = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(self._stop.set)

    async def _until_stopped(self) -> None:
        """Run `start` in a thread, then accept requests until `stop` is called. Raise the error of either, if any."""
        started = asyncio.get_running_loop().create_future()
        # A daemon thread, not one of a pool: `stop` must not wait for a compilation.
        threading.Thread(target=self._run_start, args=(started,), name="start", daemon=True).start()
        stopped = asyncio.ensure_future(self._stop.wait())
        if self.is_stopping:  # `stop` was called before the loop existed.
            self._stop.set()
        await asyncio.wait((started, stopped), return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            started.result()
            self._service.is_ready = True
            threading.Thread(target=self._run_on_ready, name="on_ready", daemon=True).start()
        await stopped
        if self._service.failure is not None:
            raise self._service.failure

    def _run_start(self, started: asyncio.Future[None]) -> None:
        error: BaseException | None = None
        try:
            self._start()
        except BaseException as raised:  # Raised again by `run`.
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop is closed: `stop` came first.
            started.get_loop().call_soon_threadsafe(_set, started, error)

    def _run_on_ready(self) -> None:
        try:
            self._on_ready(self.url)
        except Exception as error:
            self._service.fail(error)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, which raise the signal again after a shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _set(future: asyncio.Future[None], error: BaseException | None) -> None:
    if not future.done():
        future.set_result(None) if error is None else future.set_exception(error)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a host and port; a `MeshwrightError` if that is not possible."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        # Use strerror, because Python adds the address to some messages; name resolution has its own error numbers.
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else getattr(error, "strerror", error)
        raise MeshwrightError(
            f"cannot listen on {host}:{port}: {reason}; --port 0 picks a free port, --host 127.0.0.1 is this machine"
        ) from None
