from __future__ import annotations

import os
import signal
import threading

import pytest

from ebmguard.reference_training.interrupt import DeferredInterrupt


def test_first_ctrl_c_waits_and_the_second_does_not():
    before = signal.getsignal(signal.SIGINT)
    with DeferredInterrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


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
