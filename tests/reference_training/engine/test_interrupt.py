from __future__ import annotations

import os
import signal
import threading

import pytest

from ebmguard.reference_training.engine import interrupt as interrupt_module
from ebmguard.reference_training.engine.interrupt import DeferredInterrupt

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.mark.parametrize("first", SIGNALS)
def test_the_first_signal_waits_and_a_second_ctrl_c_does_not(monkeypatch, first):
    now = 100.0
    monkeypatch.setattr(interrupt_module.time, "monotonic", lambda: now)
    before = [signal.getsignal(number) for number in SIGNALS]
    with DeferredInterrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), first)
        assert interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)  # the echo of a launcher
        now += 1.1
        for number in SIGNALS[1:]:  # a scheduler says it again, and then kills
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_does_nothing_in_another_thread():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with DeferredInterrupt() as interrupt:
            seen.append((interrupt.requested, signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, True)]


def test_a_signal_that_is_ignored_stays_ignored():
    """As nohup has it: the run goes on when the terminal is gone."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with DeferredInterrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupt.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
