"""A trainer like ebm-anatomy's: closures over one energy, whose loss is multiplied by 2/ε²."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ebmguard import Guard, guard
from ebmguard.adapters import ebm_anatomy
from ebmguard.errors import ConfigError
from tests.adapters.closed_form import Call, Run, gradients

CONFIG = {"epsilon": 1e-2, "batch_size": 8, "num_shortrun_steps": 5, "num_longrun_steps": 12}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(1, 6, 3, 2), nn.LeakyReLU(0.05), nn.Conv2d(6, 1, 2))

    def forward(self, x):
        return self.f(x).squeeze()


def train(retrofit=None, *, config=CONFIG, hand_scale: float = 1.0, n: int = 20) -> Run:
    """The trainer's structure; every fifth iteration draws a long-run chain from the data.

    ``retrofit(config, f, sample_s_t)`` gives the guarded loss and sampler; ``hand_scale``
    multiplies the energy inside the short-run sampler, as the guard should.
    """
    torch.manual_seed(123)
    f = Net()
    q = torch.rand(40, 1, 6, 6) * 2 - 1
    s_t_0 = 2 * torch.rand_like(q) - 1

    def sample_image_set(images):
        rows = torch.randperm(len(images))[: config["batch_size"]]
        return images[rows], rows

    def sample_q():
        x_q = sample_image_set(q)[0]
        return x_q + 0.03 * torch.randn_like(x_q)

    def sample_s_t(L, init_type, update_s_t_0=True):
        bank = init_type == "persistent"
        start, rows = sample_image_set(s_t_0) if bank else (sample_q(), None)
        x_s_t = start.clone().requires_grad_()
        r_s_t = torch.zeros(1)
        scale = hand_scale if bank else 1.0
        for _ in range(L):
            slope = torch.autograd.grad((scale * f(x_s_t)).sum(), [x_s_t])[0]
            x_s_t.data += -slope + config["epsilon"] * torch.randn_like(x_s_t)
            r_s_t += slope.flatten(1).norm(dim=1).mean()
        if bank and update_s_t_0:
            s_t_0[rows] = x_s_t.detach()
        return x_s_t.detach(), r_s_t.squeeze() / L

    cd_loss, guarded, original = None, sample_s_t, sample_s_t
    if retrofit is not None:
        cd_loss, guarded = retrofit(config, f, sample_s_t)
        original = guarded.original
    optim = torch.optim.Adam(f.parameters(), lr=1e-2)
    run = Run(f)
    for i in range(n):
        x_q = sample_q()
        x_s_t, r_s_t = guarded(L=config["num_shortrun_steps"], init_type="persistent")
        f_q, f_s_t = f(x_q), f(x_s_t)
        run.calls.append(Call(f_q, f_s_t, x_s_t))
        d_s_t = f_q.mean() - f_s_t.mean() if cd_loss is None else cd_loss(f_q, f_s_t)
        if config["epsilon"] > 0:
            d_s_t *= 2 / config["epsilon"] ** 2
        optim.zero_grad()
        d_s_t.backward()
        optim.step()
        run.others += [d_s_t.item(), r_s_t.item()]
        if (i + 1) % 5 == 0:
            long = original(L=config["num_longrun_steps"], init_type="data", update_s_t_0=False)
            run.others.append(long[0].tolist())
    run.others.append(s_t_0.tolist())
    run.rng = torch.get_rng_state()
    return run


def retrofit(beta_star: float, guards: list[Guard] | None = None):
    def make(config, f, sample_s_t):
        g = guard(None, sample_s_t, beta_star=beta_star, **ebm_anatomy.settings(config, f))
        if guards is not None:
            guards.append(g)
        return g

    return make


@pytest.mark.parametrize("epsilon", [1e-2, 0])
def test_off_is_the_unguarded_trainer(epsilon):
    config = CONFIG | {"epsilon": epsilon}
    assert train(retrofit(0.0), config=config).equals(train(config=config))


@pytest.mark.parametrize("epsilon", [0.1, 0])
def test_the_gradient_has_the_closed_form_times_the_trainers_factor(epsilon):
    config = CONFIG | {"epsilon": epsilon}
    run = train(retrofit(2.0), config=config)
    factor = 2 / 0.1**2 if epsilon else 1.0
    for call in run.calls:
        # An energy is low on data: f = -E, and so is the gradient.
        to_pos, to_neg = gradients(-call.f_pos, -call.f_neg, 2.0)
        torch.testing.assert_close(call.to_pos, -factor * to_pos, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(call.to_neg, -factor * to_neg, rtol=1e-5, atol=1e-8)
        assert (call.to_pos > 0).all()  # x_q are the data, whose energy is lowered


def test_reweighted_energies_keep_the_trainers_record_of_the_difference():
    def reweighted(config, f, sample_s_t):
        g = guard(None, sample_s_t, beta_star=2.0, **ebm_anatomy.settings(config, f))

        def difference(f_q, f_s_t):
            f_q, f_s_t = g.reweight(f_q, f_s_t)
            return f_q.mean() - f_s_t.mean()

        return difference, g.sampler

    run, by_loss = train(reweighted, n=1), train(retrofit(2.0), n=1)
    call, other = run.calls[0], by_loss.calls[0]
    torch.testing.assert_close(call.to_pos, other.to_pos, rtol=1e-6, atol=0)
    torch.testing.assert_close(call.to_neg, other.to_neg, rtol=1e-6, atol=0)
    d_s_t = 20_000 * (call.f_pos.mean() - call.f_neg.mean()).item()
    assert run.others[0] == pytest.approx(d_s_t, rel=1e-5)
    assert by_loss.others[0] != pytest.approx(d_s_t, rel=1e-1)


def test_rows_hold_the_loss_before_the_trainers_factor():
    guards: list[Guard] = []
    run = train(retrofit(2.0, guards), n=1)
    last = guards[0].last
    # The trainer multiplies the loss in place.
    assert run.others[0] == pytest.approx(last["loss"] * 20_000, rel=1e-6)


@pytest.mark.parametrize(
    ("epsilon", "beta_star", "factor"),
    # β = β* ε²/2
    [(1e-2, 2.0, 1 - 1e-4), (1.0, 0.5, 0.75), (0, 0.5, 1.0)],
)
def test_the_short_runs_are_tempered(epsilon, beta_star, factor):
    config = CONFIG | {"epsilon": epsilon}
    guarded = train(retrofit(beta_star), config=config, n=1)
    by_hand = train(config=config, hand_scale=factor, n=1)
    plain = train(config=config, n=1)
    torch.testing.assert_close(guarded.calls[0].x_neg, by_hand.calls[0].x_neg, rtol=0, atol=1e-7)
    assert torch.equal(by_hand.calls[0].x_neg, plain.calls[0].x_neg) == (epsilon == 0)
    # The trainer's mean gradient size r_s_t is then that of the tempered energy.
    assert guarded.others[1] == pytest.approx(by_hand.others[1], rel=1e-5)


def test_long_run_chains_use_the_original_and_leave_no_trace():
    torch.manual_seed(0)
    f, starts = Net(), torch.rand(4, 1, 6, 6)
    guards: list[Guard] = []

    def sample_s_t(L, update_s_t_0=True):
        x = starts.clone().requires_grad_()
        for _ in range(L):
            x.data -= torch.autograd.grad(f(x).sum(), [x])[0]
        return x.detach(), torch.zeros(())

    plain = sample_s_t(L=3)[0]
    config = {"epsilon": 1.0}
    cd_loss, guarded = retrofit(0.5, guards)(config, f, sample_s_t)
    short = guarded(L=3)[0]
    long = guarded.original(L=3, update_s_t_0=False)[0]
    assert torch.equal(long, plain)
    assert not torch.equal(short, plain)
    cd_loss(f(starts), f(short))
    assert guards[0].step == 0
    guarded.original(L=3)
    assert guards[0].step == 0  # a guarded call would have begun the next step
    guarded(L=3)
    assert guards[0].step == 1


def test_a_configuration_without_epsilon_is_refused():
    with pytest.raises(ConfigError, match=r"no 'epsilon'.*batch_size"):
        ebm_anatomy.settings({"batch_size": 100}, Net())
