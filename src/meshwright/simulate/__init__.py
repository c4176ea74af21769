"""Simulate a compiled program on one device: a schedule in time, live buffers, HBM traffic, a trace."""

from meshwright.simulate.buffers import Buffer, Memory, read_buffers
from meshwright.simulate.events import COMPUTE, Event, Repeat
from meshwright.simulate.hbm import count_hbm_bytes
from meshwright.simulate.schedule import Schedule, simulate
from meshwright.simulate.trace import trace, write_trace

__all__ = [
    "COMPUTE",
    "Buffer",
    "Event",
    "Memory",
    "Repeat",
    "Schedule",
    "count_hbm_bytes",
    "read_buffers",
    "simulate",
    "trace",
    "write_trace",
]
