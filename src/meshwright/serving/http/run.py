"""Run a service on a port until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
import uvloop
from starlette.types import ASGIApp

from meshwright.errors import MeshwrightError
from meshwright.serving.http.app import make_app
from meshwright.serving.http.errors import CLOSE, ApiError
from meshwright.serving.http.gate import shutting_down
from meshwright.serving.http.protocol import limited_protocol
from meshwright.serving.http.service import ServerState, Service
from meshwright.signals import handled_signals

SECONDS_IDLE = 60
"""How long a connection is kept for a next request. OpenAI's clients forget theirs after 5; one that the server closes
just as a request comes would be an error."""

SECONDS_TO_CLOSE = 5
"""How long clients may take to read the ends of their answers when the server stops."""


def serve_http(
    service: Service,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    grace_seconds: float = 30.0,
    start: Callable[[], None] = lambda: None,
    announce: Callable[[str], None] = lambda line: print(line, flush=True),
) -> None:
    """Serve until SIGTERM or SIGINT, in the main thread.

    From then on new requests get 503, and those that were let in are answered, or after `grace_seconds` end with an
    error. A second signal ends the process at once.

    Args:
        port: 0 picks a free one.
        start: what has to be done before requests are taken, as loading and compiling; it runs in a thread of its own
            while `/health` is answered and `/ready` says 503. What it raises ends the server, and is raised here.
        announce: gets the line `ready on http://HOST:PORT` once requests are taken.

    Raises:
        MeshwrightError: an address that cannot be listened on. What `Service.fail` was called with.
    """
    app, calls = make_app(service)
    serve_app(
        HttpServer(
            service, app, calls.fail, host=host, port=port, grace_seconds=grace_seconds, start=start, announce=announce
        )
    )


def serve_app(server: HttpServer) -> None:
    """Run a server until SIGTERM or SIGINT, in the main thread. A second one ends the process by it."""

    was_asked = False  # By a signal: what else stops a server does not make the first one the second.

    def handle(number: int, _: object) -> None:
        nonlocal was_asked
        if was_asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        was_asked = True
        server.stop()

    with handled_signals((signal.SIGTERM, signal.SIGINT), handle):
        server.run()


class HttpServer:
    """An app on a port, which it listens on from when it is made. See `serve_http`.

    fail: ends all requests with an error.
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
        announce: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._service, self._app, self._fail = service, app, fail
        self._grace_seconds = grace_seconds
        self._start = start
        self._announce = announce
        self._socket = _listen(host, port)
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._socket.getsockname()[1]}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self.is_stopping = False

    def run(self) -> None:
        """Serve until `stop`."""
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
        # What clients do wrong is their answer's to say.
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
            except Exception as error:  # Whatever it was, clients are told before it ends the server.
                self._fail(ApiError(f"the engine failed: {error}", status=503, code="failed", headers=CLOSE))
                raise
            finally:
                server.should_exit = True
                await serving

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())

    def stop(self) -> None:
        """Begin to shut down; from any thread, or a signal's handler."""
        self.is_stopping = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # It has stopped.
                self._loop.call_soon_threadsafe(self._stop.set)

    async def _until_stopped(self) -> None:
        """Start, take requests, and wait until told to stop."""
        started = asyncio.get_running_loop().create_future()
        # No thread of a pool: a stop does not wait for what is being compiled.
        threading.Thread(target=self._run_start, args=(started,), name="start", daemon=True).start()
        stopped = asyncio.ensure_future(self._stop.wait())
        if self.is_stopping:  # Before there was a loop to be told.
            self._stop.set()
        await asyncio.wait((started, stopped), return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            started.result()
            self._service.is_ready = True
            self._announce(f"ready on {self.url}")
        await stopped
        if self._service.failure is not None:
            raise self._service.failure

    def _run_start(self, started: asyncio.Future[None]) -> None:
        error: BaseException | None = None
        try:
            self._start()
        except BaseException as raised:  # Any, to be raised where the server was.
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop has ended: a stop came first.
            started.get_loop().call_soon_threadsafe(_set, started, error)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signals, which would end the process by them after a shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _set(future: asyncio.Future[None], error: BaseException | None) -> None:
    if not future.done():
        future.set_result(None) if error is None else future.set_exception(error)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        # Python adds the address to the words of some of them; names that are not found have numbers of their own.
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else getattr(error, "strerror", error)
        raise MeshwrightError(
            f"cannot listen on {host}:{port}: {reason}; --port 0 picks a free port, --host 127.0.0.1 is this machine"
        ) from None
