"""Simulate a compiled program on one device: a schedule in time, live buffers, a trace.

An op takes the compiler's own cycle estimate if there is one, else its roofline time. Collectives are timed on the
fabric, with a lane for each set of links; loops are simulated once in their steady state. `liveness` and `aliasing`
find live buffers. Programs must be compiled with default effort: the TPU compiler's fast effort gives counts and bytes,
not the schedule that will run.
"""
