"""An engine over several processes: process 0 has the requests, and sends each step to the other processes.

All processes call `Runner.run` with the same steps in the same order, so that their devices run one program. Process 0
sends the steps over a TCP connection to each other process. `execution.processes` detects lost processes.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwright.description.step.parameter_tree import leaves
from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.sampling import Sampling
from meshwright.serving.engine.adapters import SlotWeights
from meshwright.serving.engine.programs import Shape
from meshwright.serving.engine.runner import RowChange, Work
from meshwright.serving.engine.scheduler import PageCopy
from meshwright.support.field_types import nested
from meshwright.support.signals import handled_signals

ADDRESS_BYTES = 512
"""Size of the message by which process 0 broadcasts its address and a secret, with a JAX collective."""

SECONDS_TO_CONNECT = 60.0
"""How long process 0 waits for the other processes to connect, after all have loaded the model."""

ARRAYS = ("packed", "mask", "targets")
"""The array fields of `Work`."""

STOP = b"stop\n"
"""Message of an ending process to process 0, which then drains the server."""


class Leader:
    """Process 0's connections to the other processes. Create it on process 0 while the others call `connect`.

    Args:
        host: host name at which the other processes reach this machine; None for its fully qualified name.

    Raises:
        MeshwrightError: a process did not connect.
    """

    def __init__(self, host: str | None) -> None:
        secret = secrets.token_hex(16)
        is_near = host in ("localhost", "127.0.0.1")
        with socket.create_server(("127.0.0.1" if is_near else "", 0), backlog=1024) as listener:
            _broadcast(f"{secret} {listener.getsockname()[1]} {host or socket.getfqdn()}")
            self._connections = list(_accepted(listener, secret, jax.process_count() - 1))

    def send(self, work: Work | SlotWeights) -> None:
        """Send a step, or an adapter to load, to the other processes."""
        frame = encode_work(work)
        for connection in self._connections:
            connection.sendall(struct.pack(">Q", len(frame)) + frame)

    def watch(self, on_stop: Callable[[], None]) -> None:
        """Call `on_stop`, in a thread, for each other process that receives a signal to end."""

        def listen(connection: socket.socket) -> None:
            with contextlib.suppress(OSError):
                if connection.recv(len(STOP)):
                    on_stop()

        for connection in self._connections:
            threading.Thread(target=listen, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Tell the other processes to end."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack(">Q", 0))


def connect() -> socket.socket:
    """Return a connection to process 0. Called by all other processes.

    Raises:
        MeshwrightError: process 0 cannot be reached.
    """
    secret, port, host = _broadcast("").split()
    try:
        connection = socket.create_connection((host, int(port)), timeout=SECONDS_TO_CONNECT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        connection.sendall(secret.encode())
    except OSError as error:
        raise MeshwrightError(
            f"process {jax.process_index()} did not reach process 0 at {host}:{port}"
            f" ({(error.strerror or str(error)).lower()}); firewalls between processes must let them through"
        ) from None
    return connection


def follow(connection: socket.socket, run: Callable[[Work | SlotWeights], object]) -> None:
    """Call `run` with each step and each adapter that process 0 sends, until process 0 tells this process to end.

    Raises:
        MeshwrightError: process 0 is gone.
    """
    while size := struct.unpack(">Q", _read(connection, 8))[0]:
        run(decode_work(_read(connection, size)))


@contextlib.contextmanager
def signals_passed_on(connection: socket.socket) -> Iterator[None]:
    """Inside the context, the first SIGTERM or SIGINT makes process 0 drain and end the server.

    A second signal ends this process.
    """

    def pass_on(_: int, __: object) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(STOP)

    with handled_signals((signal.SIGTERM, signal.SIGINT), pass_on, once=True):
        yield


def encode_work(work: Work | SlotWeights) -> bytes:
    """Encode a step, or an adapter, for `decode_work`: a line of JSON, then the bytes of its arrays."""
    if isinstance(work, SlotWeights):
        return _frame({"slot": work.slot}, dict(leaves(work.factors)))
    arrays = {name: array for name in ARRAYS if (array := getattr(work, name)) is not None}
    head = {
        "kind": work.kind,
        "shape": [getattr(work.shape, field.name) for field in fields(Shape)],
        "copies": work.copies,
        "changes": [[*change._replace(sampling=asdict(change.sampling))] for change in work.changes],  # type: ignore
    }
    return _frame(head, arrays)


def _frame(head: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    head["arrays"] = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    return b"".join([json.dumps(head).encode(), b"\n", *(array.tobytes() for array in arrays.values())])


def decode_work(frame: bytes) -> Work | SlotWeights:
    """Return the step, or the adapter, that `encode_work` encoded."""
    at = frame.index(b"\n") + 1
    head, arrays = json.loads(frame[:at]), {}
    for name, dtype, shape in head["arrays"]:
        array = np.frombuffer(frame, dtype, count=int(np.prod(shape)), offset=at).reshape(shape)
        arrays[name], at = array, at + array.nbytes
    if "slot" in head:
        return SlotWeights(head["slot"], nested(arrays))
    rows, length, entries, num_chosen = head["shape"]
    return Work(
        kind=head["kind"],
        shape=Shape(rows, length, tuple(entries), num_chosen),
        copies=tuple(PageCopy(*copy) for copy in head["copies"]),
        changes=tuple(
            RowChange(row, Sampling(**sampling), prompt, made, bias)
            for row, sampling, prompt, made, bias in head["changes"]
        ),
        **arrays,
    )


def _broadcast(line: str) -> str:
    """Return the `line` of process 0, on every process."""
    padded = np.frombuffer(line.encode().ljust(ADDRESS_BYTES), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode().strip()


def _accepted(listener: socket.socket, secret: str, count: int) -> Iterator[socket.socket]:
    """Yield the connections of the `count` other processes. Connections that do not send the secret are ignored."""
    until, num_found = time.monotonic() + SECONDS_TO_CONNECT, 0
    while num_found < count:
        listener.settimeout(max(0.01, until - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise MeshwrightError(
                f"{count - num_found} of {count} other processes did not reach port {listener.getsockname()[1]} of"
                f" process 0 within {SECONDS_TO_CONNECT:.0f} s; firewalls between processes must let them through"
            ) from None
        connection.settimeout(5.0)
        with contextlib.suppress(OSError, MeshwrightError):
            if hmac.compare_digest(_read(connection, len(secret)), secret.encode()):
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                num_found += 1
                yield connection


def _read(connection: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes from a connection."""
    parts = bytearray()
    while len(parts) < size:
        if not (received := connection.recv(min(size - len(parts), 1 << 20))):
            raise MeshwrightError("process 0 is gone")
        parts += received
    return bytes(parts)
