"""Each fault does what it says, at its step, once, on a loop that is real, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ebmguard.samplers import ReplayBuffer
from tests.faults.injector import FaultInjector, Injected
from tests.parts import Energy, langevin
from tests.runs import frozen, randomness

AT, N_STEPS, BATCH = 3, 8, 6


class Loop:
    """A training loop of an EBM, which writes down what each of its steps saw."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.f = Energy()
        self.generator = torch.Generator().manual_seed(2)
        self.buffer = ReplayBuffer(20, (2,), reinit_rate=0.0, generator=self.generator)
        groups = [{"params": self.f.net[i].parameters(), "lr": 0.5 / (1 + i)} for i in (0, 2)]
        self.optimizer = torch.optim.SGD(groups)
        self.sample: Any = self.draw
        self.samples: list[Tensor] = []
        self.energies: list[Tensor] = []
        self.plain: list[Tensor] = []
        self.starts: list[Tensor] = []
        self.rates: list[list[float]] = []
        self.optimizer.register_step_post_hook(lambda optimizer, *_: self.rates.append(self.lr))

    @property
    def lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def draw(self, f: Energy) -> Tensor:
        start, rows = self.buffer.sample(BATCH)
        self.starts.append(self.buffer.samples.clone())
        end = langevin(f, start)
        self.buffer.write(rows, end)
        return end

    def train(self, n: int = N_STEPS) -> Loop:
        for _ in range(n):
            samples = self.sample(self.f)
            self.samples.append(samples)
            energies = self.f(samples)
            self.energies.append(energies.detach())
            self.plain.append(self.f.net(samples).squeeze(-1).detach())
            self.optimizer.zero_grad()
            (energies.mean() - self.f(torch.zeros(BATCH, 2)).mean()).backward()
            self.optimizer.step()
        return self

    def state(self) -> Any:
        return frozen([self.f, self.buffer, self.generator, self.lr]), randomness()


FAULTS: dict[str, Any] = {
    "nan_sample": lambda faults, loop: faults.nan_sample(AT, row=2),
    "frozen_sampler": lambda faults, loop: faults.frozen_sampler(AT, steps=2),
    "energy_spike": lambda faults, loop: faults.energy_spike(AT, loop.f, factor=100.0),
    "corrupt_buffer": lambda faults, loop: faults.corrupt_buffer(AT, loop.buffer, row=7),
    "exploding_lr": lambda faults, loop: faults.exploding_lr(
        AT, loop.optimizer, factor=10.0, steps=2
    ),
}


def armed(name: str, **options: Any) -> tuple[Loop, FaultInjector]:
    loop, faults = Loop(), FaultInjector(**options)
    loop.sample = faults.sampler(loop.sample)
    FAULTS[name](faults, loop)
    return loop, faults


@pytest.mark.parametrize("name", FAULTS)
def test_it_comes_once_also_where_its_step_comes_again_and_is_on_record(name, caplog):
    steps = iter([*range(AT + 1), *range(AT + 4)])
    loop, faults = armed(name, step=steps.__next__)
    loop.train(2 * AT + 5)
    assert faults.records == [Injected(name, AT)]
    assert f"injected fault {name} at step {AT}" in caplog.text
    plain = Loop().train(2 * AT + 5)
    assert torch.equal(loop.generator.get_state(), plain.generator.get_state())
    assert loop.state() != plain.state()


@pytest.mark.parametrize("name", FAULTS)
def test_before_its_step_and_behind_the_block_it_leaves_no_trace(name):
    loop, faults = armed(name)
    with faults:
        loop.train(AT)
    assert faults.records == []
    assert loop.state() == Loop().train(AT).state()
    assert not loop.f._forward_hooks
    assert not loop.optimizer._optimizer_step_pre_hooks
    assert len(loop.optimizer._optimizer_step_post_hooks) == 1  # the loop's own


def test_nan_in_one_entry_of_one_sample():
    loop = armed("nan_sample")[0].train()
    bad = [torch.isnan(samples).nonzero().tolist() for samples in loop.samples]
    assert bad[: AT + 1] == [[]] * AT + [[[2, 0]]]
    # What the sampler itself has written is whole: only its result is not.
    assert torch.isfinite(loop.starts[AT + 1]).all()


def test_frozen_sampler_returns_the_same_samples_and_thaws():
    loop = armed("frozen_sampler")[0].train()
    same = [torch.equal(a, b) for a, b in zip(loop.samples, loop.samples[1:], strict=False)]
    assert same == [i in (AT, AT + 1) for i in range(N_STEPS - 1)]
    # Copies: what a loop does to its samples in place stays its own.
    assert len({samples.data_ptr() for samples in loop.samples}) == N_STEPS


def test_energy_spike_multiplies_the_outputs_of_one_step_and_stays_out_of_the_sampler():
    loop = armed("energy_spike")[0].train()
    factors = [
        float((f / plain).mean()) for f, plain in zip(loop.energies, loop.plain, strict=True)
    ]
    assert factors == pytest.approx([100.0 if i == AT else 1.0 for i in range(N_STEPS)])
    assert torch.equal(loop.samples[AT], Loop().train().samples[AT])


def test_corrupted_row_is_there_before_the_sampler_draws():
    loop = armed("corrupt_buffer")[0].train(AT + 1)
    assert torch.isfinite(loop.starts[AT - 1]).all()
    assert torch.isnan(loop.starts[AT]).nonzero().tolist() == [[7, 0], [7, 1]]


def test_exploding_lr_for_some_steps_of_every_group():
    loop = armed("exploding_lr")[0].train()
    usual = Loop().lr
    # The loop's hook came first, and so sees the rates of the step itself.
    exploded = [10 * lr for lr in usual]
    assert loop.rates == [exploded if i in (AT, AT + 1) else usual for i in range(N_STEPS)]
    assert loop.lr == usual


def test_exploding_lr_leaves_what_another_hook_has_set():
    loop, _ = armed("exploding_lr")

    def restore(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.125

    loop.optimizer.register_step_post_hook(restore)
    loop.train(AT + 1)
    assert loop.lr == [0.125, 0.125]
