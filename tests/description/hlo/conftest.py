import signal

import pytest

LONGEST_SECONDS = 120


@pytest.fixture
def no_hang():
    """Fail where reading does not end: a square of a megabyte takes days, a pass over it under a second."""

    def stop(*_):
        pytest.fail(f"still reading after {LONGEST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
