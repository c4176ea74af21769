"""Tokenise units of work in several processes.

The processes run their own program (`worker.py`). They are not started by `multiprocessing`, which would run a user's
script that calls `meshwright.train` again in each process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO, Any

from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import Rule
from meshwright.execution.data.encoding import Encoder
from meshwright.execution.data.shards import Unit
from meshwright.execution.data.store import Shard


def run_units(
    units: Sequence[Unit], encoder: Encoder, rule: Rule, directory: Path, *, processes: int
) -> Generator[tuple[Unit, Shard]]:
    """Make the shards of units in `processes` processes; yield (unit, shard) once a shard is complete, in any order.

    The processes end with this process, or when the generator is closed.

    Raises:
        MeshwrightError: a process raised it, or ended.
    """
    left: queue.SimpleQueue[Unit] = queue.SimpleQueue()
    for unit in units:
        left.put(unit)
    done: queue.SimpleQueue[tuple[Unit, Any]] = queue.SimpleQueue()
    job = pickle.dumps((encoder, rule, directory))
    workers = [_start() for _ in range(processes)]
    threads = [threading.Thread(target=_feed, args=(worker, job, left, done), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for _ in units:
            unit, shard = done.get()
            if isinstance(shard, Exception):
                raise shard
            yield unit, shard
    finally:
        for worker in workers:
            worker.kill()
        for worker, thread in zip(workers, threads, strict=True):
            thread.join()
            worker.wait()


def _start() -> subprocess.Popen[bytes]:
    # Otherwise the library `tokenizers` would start a thread per core in every process.
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "meshwright.execution.data.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _feed(
    worker: subprocess.Popen[bytes],
    job: bytes,
    left: queue.SimpleQueue[Unit],
    done: queue.SimpleQueue[tuple[Unit, Any]],
) -> None:
    """Have a process tokenise units of `left`, one at a time; add (unit, its `Shard` or an exception) to `done`.

    job: the pickled (encoder, rule, directory), which is sent before the first unit.
    """
    assert worker.stdin
    assert worker.stdout
    with worker.stdin, worker.stdout:
        with contextlib.suppress(OSError):  # The process has ended, which the first unit reports.
            send(worker.stdin, job)
        while True:
            try:
                unit = left.get_nowait()
            except queue.Empty:
                return
            try:
                send(worker.stdin, pickle.dumps(unit))
                answer = receive(worker.stdout)
            except OSError:
                answer = None
            if answer is None:
                done.put((unit, MeshwrightError(f"a process that tokenises ended with code {worker.wait()}")))
                return
            done.put((unit, pickle.loads(answer)))


def send(target: IO[bytes], data: bytes) -> None:
    """Write a message: its size in 8 bytes, then its data."""
    target.write(struct.pack("<Q", len(data)) + data)
    target.flush()


def receive(source: IO[bytes]) -> bytes | None:
    """Return the next message; None if the other side has ended."""
    if len(head := source.read(8)) < 8:
        return None
    (size,) = struct.unpack("<Q", head)
    return data if len(data := source.read(size)) == size else None
