"""Each fault does what it says, at its step, once, on a loop that is real, and leaves no trace."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.errors import ConfigError
from ebmguard.samplers import ReplayBuffer
from tests.faults.injector import FaultInjector, Injected
from tests.parts import Energy, langevin

AT = 3
N_STEPS = 8
BATCH = 6


class Loop:
    """A training loop of an EBM, which writes down what each of its steps saw."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.f = Energy()
        self.generator = torch.Generator().manual_seed(2)
        self.buffer = ReplayBuffer(20, (2,), reinit_rate=0.0, generator=self.generator)
        self.optimizer = torch.optim.SGD(
            [
                {"params": self.f.net[0].parameters(), "lr": 0.5},
                {"params": self.f.net[2].parameters(), "lr": 0.25},
            ]
        )
        self.sample: Any = self.draw
        self.samples: list[Tensor] = []
        self.energies: list[Tensor] = []
        self.starts: list[Tensor] = []
        self.rates: list[list[float]] = []
        self.optimizer.register_step_post_hook(self._note)

    def draw(self, f: nn.Module) -> Tensor:
        start, rows = self.buffer.sample(BATCH)
        self.starts.append(self.buffer.samples.clone())
        end = langevin(f, start)
        self.buffer.write(rows, end)
        return end

    def _note(self, optimizer: Any, *_: Any) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def step(self) -> None:
        samples = self.sample(self.f)
        self.samples.append(samples)
        self.energies.append(self.f(samples).detach())
        loss = self.f(samples).mean() - self.f(torch.zeros(BATCH, 2)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def train(self, n: int = N_STEPS) -> Loop:
        for _ in range(n):
            self.step()
        return self

    def state(self) -> list[Tensor]:
        return [
            *(p.detach() for p in self.f.parameters()),
            self.buffer.samples,
            self.generator.get_state(),
            torch.get_rng_state(),
        ]


def armed(arm: Any, **options: Any) -> tuple[Loop, FaultInjector]:
    loop = Loop()
    faults = FaultInjector(**options)
    loop.sample = faults.sampler(loop.sample)
    arm(faults, loop)
    return loop, faults


def spike_of(f: Energy) -> float:
    """What the hooks on a model multiply its output by."""
    x = torch.ones(1, 2)
    with torch.no_grad():
        return float(f(x) / f.net(x))


FAULTS: dict[str, Any] = {
    "nan_sample": lambda faults, loop: faults.nan_sample(AT, row=2),
    "frozen_sampler": lambda faults, loop: faults.frozen_sampler(AT, steps=2),
    "energy_spike": lambda faults, loop: faults.energy_spike(AT, loop.f, factor=100.0),
    "corrupt_buffer": lambda faults, loop: faults.corrupt_buffer(AT, loop.buffer, row=7),
    "exploding_lr": lambda faults, loop: faults.exploding_lr(
        AT, loop.optimizer, factor=10.0, steps=2
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_it_happens_once_is_on_record_and_leaves_the_generators_alone(name, caplog):
    plain = Loop().train()
    usual = torch.get_rng_state()
    loop, faults = armed(FAULTS[name])
    loop.train()
    (record,) = faults.records
    assert record == Injected(name, AT, record.what)
    assert record.what in caplog.text
    assert faults.pending == []
    assert torch.equal(torch.get_rng_state(), usual)
    assert torch.equal(loop.generator.get_state(), plain.generator.get_state())


@pytest.mark.parametrize("name", FAULTS)
def test_a_removed_injector_leaves_no_trace(name):
    plain = Loop().train()
    loop, faults = armed(FAULTS[name])
    with faults:
        loop.train(AT)
    loop.train(N_STEPS - AT)  # the wrapped sampler is still there, and is what it wraps
    assert faults.records == []
    assert faults.pending == [name]
    for own, other in zip(loop.state(), plain.state(), strict=True):
        assert torch.equal(own, other)
    assert not loop.f._forward_hooks
    assert not loop.optimizer._optimizer_step_pre_hooks
    assert len(loop.optimizer._optimizer_step_post_hooks) == 1  # the loop's own
    faults.remove()


@pytest.mark.parametrize("name", FAULTS)
def test_a_step_that_comes_again_brings_no_second_fault(name):
    now = 0
    loop, faults = armed(FAULTS[name], step=lambda: now)
    for now in [*range(AT + 1), *range(AT + 4)]:  # noqa: B007  read by the injector
        loop.step()
    assert [(record.fault, record.step) for record in faults.records] == [(name, AT)]


# -- each of them ------------------------------------------------------------------------------


def test_nan_in_one_entry_of_one_sample():
    loop, _ = armed(FAULTS["nan_sample"])
    loop.train()
    bad = [torch.isnan(samples).nonzero().tolist() for samples in loop.samples]
    assert bad[AT] == [[2, 0]]
    assert not any(bad[:AT])
    # What the sampler itself has written is whole: only its result is not.
    assert torch.isfinite(loop.starts[AT + 1]).all()


def test_samples_with_a_graph_keep_it():
    faults = FaultInjector()
    x = torch.randn(3, 2, requires_grad=True)
    draw = faults.sampler(lambda: 2 * x)
    faults.nan_sample(0, row=1)
    (slope,) = torch.autograd.grad(draw()[0].sum(), x)
    assert slope.tolist() == [[2, 2], [0, 0], [0, 0]]


def test_frozen_sampler_returns_the_same_samples_and_thaws():
    loop, _ = armed(FAULTS["frozen_sampler"])
    loop.train()
    same = [torch.equal(a, b) for a, b in zip(loop.samples, loop.samples[1:], strict=False)]
    assert same == [i in (AT, AT + 1) for i in range(N_STEPS - 1)]
    # Copies: what a loop does to its samples in place stays its own.
    assert len({samples.data_ptr() for samples in loop.samples}) == N_STEPS


def test_frozen_sampler_leaves_calls_of_another_size_alone():
    faults = FaultInjector()
    draw = faults.sampler(lambda n: torch.randn(n, 2))
    faults.frozen_sampler(0, steps=5)
    first = draw(3)
    assert draw(4).shape == (4, 2)
    assert torch.equal(draw(3), first)


def test_energy_spike_multiplies_the_outputs_of_one_step_and_their_gradients():
    loop, _ = armed(FAULTS["energy_spike"])
    loop.train(AT)
    before = [p.detach().clone() for p in loop.f.parameters()]
    loop.step()
    samples = loop.samples[AT]
    after = [p.detach().clone() for p in loop.f.parameters()]
    twin = Loop()
    with torch.no_grad():
        for p, value in zip(twin.f.parameters(), before, strict=True):
            p.copy_(value)
    torch.testing.assert_close(loop.energies[AT], 100 * twin.f(samples).detach())
    loss = 100 * (twin.f(samples).mean() - twin.f(torch.zeros(BATCH, 2)).mean())
    slopes = torch.autograd.grad(loss, list(twin.f.parameters()))
    for value, slope, moved, lr in zip(before, slopes, after, (0.5, 0.5, 0.25, 0.25), strict=True):
        torch.testing.assert_close(moved, value - lr * slope)


def test_energy_spike_is_over_after_its_step_and_stays_out_of_the_sampler():
    loop, _ = armed(FAULTS["energy_spike"])
    inside: list[float] = []
    draw = loop.draw

    def watched(f: nn.Module) -> Tensor:
        inside.append(spike_of(loop.f))
        return draw(f)

    faults = FaultInjector()
    loop.sample = faults.sampler(watched)
    faults.energy_spike(AT, loop.f, factor=100.0)
    ratios = []
    for _ in range(N_STEPS):
        loop.step()
        ratios.append(spike_of(loop.f))
    assert inside == [1.0] * N_STEPS
    assert ratios == pytest.approx([100.0 if i == AT else 1.0 for i in range(N_STEPS)])


def test_energy_spike_waits_for_the_loss_where_a_step_draws_twice():
    now = 0
    f = Energy()
    faults = FaultInjector(step=lambda: now)
    draw = faults.sampler(lambda: torch.ones(1, 2))
    faults.energy_spike(1, f, factor=10.0)
    ratios = []
    for now in range(3):  # noqa: B007  read by the injector
        draw(), draw()
        ratios.append(spike_of(f))
    assert ratios == pytest.approx([1.0, 10.0, 1.0])


def test_corrupted_row_is_there_before_the_sampler_draws():
    loop, _ = armed(FAULTS["corrupt_buffer"])
    loop.train(AT + 1)
    assert torch.isfinite(loop.starts[AT - 1]).all()
    bad = torch.isnan(loop.starts[AT]).all(1)
    assert bad.nonzero().tolist() == [[7]]
    assert torch.isnan(loop.starts[AT]).sum() == 2


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 1e6), (torch.uint8, 255)])
def test_corrupted_row_of_a_plain_tensor(dtype, value):
    buffer = torch.zeros(4, 3, dtype=dtype)
    faults = FaultInjector()
    faults.corrupt_buffer(0, buffer, row=1, value=value)
    faults.tick()
    assert buffer.sum(1).tolist() == [0, 3 * value, 0, 0]


def test_exploding_lr_for_some_steps_of_every_group():
    loop, _ = armed(FAULTS["exploding_lr"])
    loop.train()
    # The loop's hook came first, and so sees the rates of the step itself.
    usual, exploded = [0.5, 0.25], [5.0, 2.5]
    assert loop.rates == [exploded if i in (AT, AT + 1) else usual for i in range(N_STEPS)]
    assert [group["lr"] for group in loop.optimizer.param_groups] == usual


def test_exploding_lr_leaves_what_another_hook_has_set():
    loop, faults = armed(lambda faults, loop: None)

    def restore(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.125

    loop.optimizer.register_step_post_hook(restore)
    faults.exploding_lr(0, loop.optimizer)
    loop.step()
    assert [group["lr"] for group in loop.optimizer.param_groups] == [0.125, 0.125]


def test_exploding_lr_is_back_also_where_another_hook_has_kept_it():
    loop, _ = armed(lambda faults, loop: faults.exploding_lr(1, loop.optimizer, factor=10.0))
    kept: list[float] = []

    def halve(optimizer: Any, *_: Any) -> None:
        kept[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    def restore(optimizer: Any, *_: Any) -> None:
        for group, lr in zip(optimizer.param_groups, kept, strict=True):
            group["lr"] = lr

    # As a rollback's policy does: its hooks came later, and so it keeps what it finds exploded.
    loop.optimizer.register_step_pre_hook(halve)
    loop.optimizer.register_step_post_hook(restore)
    loop.train(4)
    assert loop.rates == [[0.25, 0.125], [2.5, 1.25], [0.25, 0.125], [0.25, 0.125]]
    assert [group["lr"] for group in loop.optimizer.param_groups] == [0.5, 0.25]


def test_exploding_lr_of_a_tensor():
    p = nn.Parameter(torch.zeros(1))
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([p], lr=rate)
    faults = FaultInjector()
    faults.exploding_lr(0, optimizer, factor=4.0)
    faults.tick()
    p.grad = torch.ones(1)
    optimizer.step()
    assert p.item() == pytest.approx(-2.0)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


# -- where it sits -----------------------------------------------------------------------------


class Drawn(NamedTuple):
    samples: Tensor
    rows: Tensor


@pytest.mark.parametrize("kind", [tuple, list, lambda parts: Drawn(*parts)])
def test_samplers_that_return_more_than_samples(kind):
    faults = FaultInjector()
    draw = faults.sampler(lambda: kind((torch.randn(3, 2), torch.arange(3))))
    faults.nan_sample(0)
    faults.frozen_sampler(1, steps=1)
    first, second, third = draw(), draw(), draw()
    assert type(first) is type(second) is type(third)
    assert torch.isnan(first[0]).sum() == 1
    assert torch.equal(third[0], second[0])
    assert torch.equal(third[1], torch.arange(3))


def test_steps_of_an_inline_sampler_are_told_by_the_loop():
    f = Energy()
    faults = FaultInjector()
    faults.energy_spike(1, f, factor=10.0)
    ratios = []
    for _ in range(3):
        faults.tick()
        ratios.append(spike_of(f))
    assert ratios == pytest.approx([1.0, 10.0, 1.0])


def test_the_guard_finds_the_model_behind_a_wrapped_method():
    class Chain(Energy):
        def draw(self) -> Tensor:
            return langevin(self, torch.zeros(4, 2))

    f = Chain()
    faults = FaultInjector()
    g = guard(None, faults.sampler(f.draw), beta_star=0.5, output_scale=2.0)
    faults.nan_sample(0)
    g.loss_fn(f(torch.zeros(4, 2)), f(g.sampler()))
    assert [alert.rule for alert in g.alerts] == ["nonfinite"]


def test_a_sampler_that_calls_itself_counts_once():
    faults = FaultInjector()

    def draw(n: int) -> Tensor:
        return torch.ones(1, 1) if n == 0 else wrapped(n - 1)

    wrapped = faults.sampler(draw)
    faults.nan_sample(1)
    assert not torch.isnan(wrapped(3)).any()
    assert torch.isnan(wrapped(3)).all()


# -- what cannot be meant ----------------------------------------------------------------------

F = Energy()
SGD = torch.optim.SGD(F.parameters(), lr=0.1)
BUFFER = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        (lambda x: x.nan_sample(-1), "at=-1"),
        (lambda x: x.nan_sample(True), "at=True"),
        (lambda x: x.nan_sample(1.0), "at=1.0"),
        (lambda x: x.nan_sample(0), "2 steps have begun"),
        (lambda x: x.nan_sample(5, row=-1), "row=-1"),
        (lambda x: x.frozen_sampler(5, steps=0), "steps=0"),
        (lambda x: x.energy_spike(5, F.forward), "model is a method"),
        (lambda x: x.energy_spike(5, F, factor=math.nan), "factor=nan"),
        (lambda x: x.energy_spike(5, F, factor="2"), "factor='2'"),
        (lambda x: x.corrupt_buffer(5, [1, 2]), "buffer is a list"),
        (lambda x: x.corrupt_buffer(5, torch.tensor(1.0)), "buffer is a Tensor"),
        (lambda x: x.corrupt_buffer(5, BUFFER, row=4), "the buffer has 4 rows"),
        (lambda x: x.corrupt_buffer(5, BUFFER.byte()), "torch.uint8"),
        (lambda x: x.corrupt_buffer(5, BUFFER.byte(), value=0.5), "torch.uint8"),
        (lambda x: x.exploding_lr(5, F), "optimizer is a Energy"),
        (lambda x: x.exploding_lr(5, SGD, factor=math.inf), "factor=inf"),
        (lambda x: x.exploding_lr(5, SGD, steps=0), "steps=0"),
        (lambda x: x.sampler(BUFFER), "cannot be called"),
    ],
)
def test_refusals_change_nothing(arm, words):
    faults = FaultInjector()
    for _ in range(2):
        faults.tick()
    with pytest.raises(ConfigError, match=words):
        arm(faults)
    assert faults.pending == []
    assert not F._forward_hooks
    assert not SGD._optimizer_step_pre_hooks
    assert not SGD._optimizer_step_post_hooks


def test_a_clock_must_be_a_function():
    with pytest.raises(ConfigError, match="step is a int"):
        FaultInjector(step=3)  # type: ignore[arg-type]


def test_a_removed_injector_takes_no_more_orders():
    faults = FaultInjector()
    faults.remove()
    for order in (lambda: faults.nan_sample(5), lambda: faults.sampler(lambda: None)):
        with pytest.raises(ConfigError, match="has been removed"):
            order()
    faults.tick()


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "returned a NoneType"),
        ((), "returned a tuple"),
        (torch.tensor(1.0), "returned a Tensor"),
        (torch.zeros(2, 2, dtype=torch.long), "torch.int64"),
        (torch.zeros(2, 2), "row 3"),
    ],
)
def test_results_that_are_no_samples(result, words):
    faults = FaultInjector()
    draw = faults.sampler(lambda: result)
    faults.nan_sample(0, row=3 if isinstance(result, Tensor) and result.ndim else 0)
    with pytest.raises(ConfigError, match=words):
        draw()


def test_models_that_return_no_tensor():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    f = Pair()
    faults = FaultInjector()
    faults.energy_spike(0, f)
    faults.tick()
    with pytest.raises(ConfigError, match="returned a tuple"):
        f(torch.ones(1))
