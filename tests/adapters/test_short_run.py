"""A trainer like short_run's: closures over one network, and a difference that is maximised."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ebmguard import guard
from ebmguard.adapters import short_run
from tests.adapters.closed_form import Call, Run, gradients


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(1, 6, 3, 2), nn.LeakyReLU(0.2), nn.Conv2d(6, 1, 2))

    def forward(self, x):
        return self.f(x).squeeze()


def train(retrofit=None, *, noise_std: float = 0.01, hand_scale: float = 1.0, n: int = 20) -> Run:
    """The script's structure; ``retrofit(f, sample_q)`` gives the guarded loss and sampler.

    ``hand_scale`` multiplies the energy inside the sampler, as the guard should.
    """
    torch.manual_seed(1)
    f = Net()
    data = torch.rand(40, 1, 6, 6) * 2 - 1

    def sample_p_d():
        rows = torch.LongTensor(8).random_(0, len(data))
        return data[rows] + 0.03 * torch.randn(8, 1, 6, 6)

    def sample_q(K=5):
        x_k = torch.empty(8, 1, 6, 6).uniform_(-1, 1).requires_grad_()
        for _ in range(K):
            slope = torch.autograd.grad((hand_scale * f(x_k)).sum(), [x_k])[0]
            x_k.data += slope + noise_std * torch.randn_like(x_k)
        return x_k.detach()

    cd_loss = None
    if retrofit is not None:
        cd_loss, sample_q = retrofit(f, sample_q)
    optim = torch.optim.Adam(f.parameters(), lr=1e-2, betas=(0.9, 0.999))
    run = Run(f)
    for _ in range(n):
        x_p_d, x_q = sample_p_d(), sample_q()
        f_pos, f_neg = f(x_p_d), f(x_q)
        run.calls.append(Call(f_pos, f_neg, x_q))
        L = f_pos.mean() - f_neg.mean() if cd_loss is None else -cd_loss(f_pos, f_neg)
        optim.zero_grad()
        (-L).backward()
        optim.step()
    run.rng = torch.get_rng_state()
    return run


def retrofit(beta_star: float, **literals: float):
    return lambda f, sample_q: guard(
        None, sample_q, beta_star=beta_star, **short_run.settings(f, **literals)
    )


def test_off_is_the_unguarded_script():
    assert train(retrofit(0.0)).equals(train())


def test_the_maximised_difference_has_the_closed_form():
    run = train(retrofit(2.0), noise_std=0.1)
    assert not run.equals(train(noise_std=0.1))
    for call in run.calls:
        to_pos, to_neg = gradients(call.f_pos, call.f_neg, 2.0)
        torch.testing.assert_close(call.to_pos, to_pos, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(call.to_neg, to_neg, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("noise_std", "beta_star", "factor"),
    # β = β* / (2 · step / noise²), the step being 1
    [(0.01, 2.0, 1 - 2 / 20_000), (1.0, 0.5, 0.75)],
)
def test_the_sampler_runs_on_the_tempered_network(noise_std, beta_star, factor):
    guarded = train(retrofit(beta_star, noise_std=noise_std), noise_std=noise_std, n=1)
    by_hand = train(noise_std=noise_std, hand_scale=factor, n=1)
    plain = train(noise_std=noise_std, n=1)
    torch.testing.assert_close(guarded.calls[0].x_neg, by_hand.calls[0].x_neg, rtol=0, atol=1e-7)
    assert not torch.equal(by_hand.calls[0].x_neg, plain.calls[0].x_neg)


def test_settings_are_the_published_ones():
    f = Net()
    assert short_run.settings(f) == {"model": f, "step_size": 1.0, "noise_std": 1e-2}
