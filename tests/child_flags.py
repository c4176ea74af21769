"""The compiler options of the tests for child processes that ask for a number of devices themselves."""

import os

CHILD_FLAGS = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
"""XLA_FLAGS as `conftest.py` sets it, without its number of devices; read before any test changes the variable."""
