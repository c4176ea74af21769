"""Metrics as TensorBoard events, in the folder `tensorboard/` of the run directory.

TensorBoard's own file writer is not used, because its thread ends with a traceback if the disk is full for a moment.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

# Protocol buffers create their classes at import time, so type checkers do not find them.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from meshwright.support.files import append_bytes

FOLDER = "tensorboard"


class TensorBoardEvents:
    """Writes scalars. Steps are counted from 1, as they are printed.

    start: number of steps that earlier processes took. TensorBoard drops their events of later steps, which are
    repeated.
    """

    def __init__(self, directory: Path, start: int) -> None:
        (directory / FOLDER).mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{start}"
        self._records = RecordWriter(_AppendedFile(directory / FOLDER / name))
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._add(Event(wall_time=time.time(), step=start + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Add the values of a step, {tag: value}. NaN and infinity are omitted. time: seconds since 1970."""
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if math.isfinite(value)]
        self._add(Event(step=step, wall_time=time, summary=Summary(value=scalars)))

    def _add(self, event: Event) -> None:
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        """Do nothing: every event is already written."""


class _AppendedFile:
    """A file to which each record is appended completely or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, record: bytes) -> None:
        append_bytes(self._path, record)
