"""Handlers of signals come and go with their context."""

import os
import signal
import threading

import pytest

from meshwright.support.signals import handled_signals, not_ignored

NUMBERS = (signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture
def came():
    """The signals that came to the handlers there were before, which are those of `NUMBERS`."""
    found = []
    before = {number: signal.signal(number, lambda number, _: found.append(number)) for number in NUMBERS}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


def fail_after_signals(handled):
    with handled_signals(NUMBERS, lambda number, frame: handled.append((number, frame.f_code.co_name))):
        send(*NUMBERS, signal.SIGUSR1)
        raise KeyError


def test_handlers_of_before_come_back_after_the_context_and_after_an_error(came):
    handled = []
    with pytest.raises(KeyError):
        fail_after_signals(handled)
    assert handled == [(number, "send") for number in (*NUMBERS, signal.SIGUSR1)]
    assert came == []
    send(*NUMBERS)
    assert came == [*NUMBERS]


def test_the_second_of_a_signal_does_what_it_did_before(came):
    handled = []
    with handled_signals(NUMBERS, lambda number, _: handled.append(number), once=True):
        send(signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR2)
        assert (handled, came) == ([*NUMBERS], [signal.SIGUSR1])
    send(signal.SIGUSR2)
    assert came == [signal.SIGUSR1, signal.SIGUSR2]


def test_another_thread_changes_nothing(came):
    def run():
        with handled_signals(NUMBERS, lambda number, _: None):
            inside.append(signal.getsignal(signal.SIGUSR1))

    inside, before = [], signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [before]


def test_what_is_ignored_is_left_out(came):
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    assert not_ignored(NUMBERS) == [signal.SIGUSR1]
