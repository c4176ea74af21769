"""Metrics as TensorBoard's events, in `tensorboard/` of the run directory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

# Protocol buffers make their classes as they are imported, where no type checker sees them.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

FLUSH_SECONDS = 10
"""The longest that an event is not in its file yet."""

FOLDER = "tensorboard"


class TensorBoardEvents:
    """Writes scalars. Steps are counted as screens count them: an event of step n is of the n-th step, from 1.

    Events of steps after `start` that an earlier process wrote are purged by readers: these steps are taken again.
    """

    def __init__(self, directory: Path, start: int) -> None:
        self._writer = EventFileWriter(str(directory / FOLDER), flush_secs=FLUSH_SECONDS)
        self._writer.add_event(Event(step=start + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Add the values of a step by their tags; what is no number (nan, inf) is left out."""
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if math.isfinite(value)]
        self._writer.add_event(Event(step=step, wall_time=time, summary=Summary(value=scalars)))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
