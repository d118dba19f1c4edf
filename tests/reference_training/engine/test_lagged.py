"""Numbers on their way to the host: none is lost, none is doubled, and their order stays."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from ebmguard.reference_training.engine.lagged import LAG, LaggedNumbers


def test_on_a_cpu_there_is_no_lag():
    lagged = LaggedNumbers()
    for step in range(3):
        numbers = torch.tensor([step + 0.5, float("inf")])
        assert lagged.put(step, numbers) == [(step, [step + 0.5, float("inf")])]
    assert lagged.drain() == []


class Arrival:
    """An event of a copy that has arrived only when somebody waited for it."""

    def __init__(self, host):
        self.host = host

    def synchronize(self):
        self.host.fill_(self.host[0] + 100)


def test_a_number_is_read_after_its_copy_has_arrived_and_in_order():
    lagged = LaggedNumbers()
    hosts = [torch.tensor([float(step)]) for step in range(4)]
    # As `put` leaves them on a GPU, where the values are not there yet.
    lagged._queue = deque((step, host, Arrival(host)) for step, host in enumerate(hosts))
    assert lagged._read(LAG) == [(0, [100.0]), (1, [101.0])]
    assert hosts[2].item() == 2  # nobody waited for the later ones
    assert lagged.drain() == [(2, [102.0]), (3, [103.0])]
    assert lagged.drain() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_numbers_come_two_steps_later():
    lagged = LaggedNumbers()
    found = []
    for step in range(5):
        numbers = torch.full((2,), float(step), device="cuda")
        found += lagged.put(step, numbers)
        numbers.fill_(-1)  # the caller's memory may be used again
        assert [at for at, _ in found] == list(range(max(0, step + 1 - LAG)))
    found += lagged.drain()
    assert found == [(step, [step, step]) for step in range(5)]
