"""Simulate a compiled program on one device: a schedule in time, live buffers, a trace."""

from meshwright.simulate.buffers import Buffer, read_buffers
from meshwright.simulate.events import COMPUTE, Event
from meshwright.simulate.perfetto import trace, write_trace
from meshwright.simulate.schedule import Schedule, simulate

__all__ = [
    "COMPUTE",
    "Buffer",
    "Event",
    "Schedule",
    "read_buffers",
    "simulate",
    "trace",
    "write_trace",
]
