"""Simulate a compiled program on one device: a schedule in time, live buffers, a trace.

Ops take the compiler's own cycle estimates where it gives them, else the roofline's time. Collectives are priced on the
fabric, each set of links a lane; loops are simulated once in their steady state. `liveness` and `aliasing` find live
buffers. Needs programs of default effort: the TPU compiler's fast effort gives counts and bytes, not the schedule that
will run.
"""
