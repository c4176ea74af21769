"""Simulate a compiled program on one device: a schedule in time, live buffers, a trace."""
