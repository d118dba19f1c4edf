"""A trainer like the energy-based model of normalized autoencoders: one class does everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.adapters import nae
from ebmguard.errors import ConfigError
from tests.adapters.closed_form import Call, Run, gradients


class Net(nn.Sequential):
    def __init__(self, gain=1.0) -> None:
        last = nn.Conv2d(6, 1, 2)
        last.weight.data *= gain
        super().__init__(nn.Conv2d(1, 6, 3, 2), nn.LeakyReLU(0.2), last)


class Model(nn.Module):
    """Network, sampler, buffer and training step; ``beta_star`` None leaves the guard out."""

    def __init__(
        self,
        beta_star=None,
        *,
        step_size=10,
        noise_std=0.005,
        clip=0.01,
        hand_scale=1.0,
        alpha=1.0,
        gain=1.0,
    ) -> None:
        super().__init__()
        self.net = Net(gain)
        self.step_size, self.noise_std = step_size, noise_std
        self.clip, self.hand_scale, self.alpha = clip, hand_scale, alpha
        self.buffer: list[Tensor] = []
        self.cd_loss: Any = None
        if beta_star is not None:
            self.cd_loss, self.sample = guard(  # type: ignore[method-assign]
                None, self.sample, beta_star=beta_star, **nae.settings(self)
            )

    def forward(self, x):
        return self.net(x).view(-1)

    def sample(self, shape):
        x = torch.rand(shape)
        if self.buffer:
            rows = torch.randint(len(self.buffer), (shape[0] - 1,)).tolist()
            x[1:] = torch.stack([self.buffer[row] for row in rows])
        step, noise = self.step_size, self.noise_std
        noise = (2 * step) ** 0.5 if noise is None else noise
        step = noise**2 / 2 if step is None else step
        x.requires_grad = True
        for _ in range(5):
            drawn = torch.randn_like(x) * noise
            grad = torch.autograd.grad((self.hand_scale * self(x)).sum(), x)[0]
            if self.clip is not None:
                norm = grad.norm(dim=-1, keepdim=True)
                grad = grad * torch.where(norm > self.clip, self.clip / norm, 1.0)
            x = torch.clamp(x - step * grad + drawn, 0, 1)
        x = x.detach()
        self.buffer += list(x)
        return x

    def train_step(self, x, optimizer, run):
        neg_x = self.sample(x.shape)
        optimizer.zero_grad()
        pos_e, neg_e = self(x), self(neg_x)
        run.calls.append(Call(pos_e, neg_e, neg_x))
        if self.cd_loss is None:
            ebm_loss = pos_e.mean() - neg_e.mean()
        else:
            ebm_loss = self.cd_loss(pos_e, neg_e)
        reg_loss = (pos_e**2).mean() + (neg_e**2).mean()
        loss = ebm_loss + self.alpha * reg_loss
        loss.backward()
        optimizer.step()
        run.others.append(reg_loss.item())


def train(beta_star=None, *, n=20, **settings):
    torch.manual_seed(5)
    model = Model(beta_star, **settings)
    data = torch.rand(40, 1, 6, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.0, 0.999))
    run = Run(model)
    for _ in range(n):
        model.train_step(data[torch.randint(40, (8,))], optimizer, run)
    run.rng = torch.get_rng_state()
    return run


@pytest.mark.parametrize("noise_std", [0.005, None, 0])
def test_off_is_the_unguarded_class(noise_std):
    assert train(0.0, noise_std=noise_std).equals(train(noise_std=noise_std))


def test_the_guard_is_no_part_of_the_module():
    model = Model(0.5)
    assert model.state_dict().keys() == Model().state_dict().keys()
    assert [name for name, _ in model.named_modules()] == [n for n, _ in Model().named_modules()]


def test_the_gradient_has_the_closed_form_beside_the_l2_term():
    run = train(2.0, alpha=0.5)
    for call in run.calls:
        E_pos, E_neg = call.f_pos.detach().double(), call.f_neg.detach().double()
        to_pos, to_neg = gradients(-E_pos, -E_neg, 2.0)
        expected = -to_pos + E_pos / len(E_pos), -to_neg + E_neg / len(E_neg)
        torch.testing.assert_close(call.to_pos, expected[0], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(call.to_neg, expected[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("step_size", "noise_std", "beta"),
    [(1.0, 1.0, 0.5 / 2), (0.1, None, 0.5), (None, 0.5, 0.5), (1.0, 0, 0.0)],
)
def test_the_sampler_runs_on_the_tempered_energy(step_size, noise_std, beta):
    settings = {"step_size": step_size, "noise_std": noise_std, "clip": None, "n": 1}
    run, plain = train(0.5, **settings), train(**settings)
    by_hand = train(hand_scale=1 - beta, **settings)
    torch.testing.assert_close(run.calls[0].x_neg, by_hand.calls[0].x_neg, rtol=0, atol=1e-6)
    assert torch.allclose(plain.calls[0].x_neg, run.calls[0].x_neg, atol=1e-4) == (beta == 0)


def test_where_every_rows_norm_is_clipped_tempering_moves_nothing():
    """The limit that the docs name: the clip is on the norm of each row of pixels."""
    settings = {"step_size": 1.0, "noise_std": 1.0, "gain": 1e6, "n": 1}
    run, plain = train(0.5, clip=0.1, **settings), train(clip=0.1, **settings)
    unmoved = train(clip=0.0, **settings)
    torch.testing.assert_close(run.calls[0].x_neg, plain.calls[0].x_neg, rtol=0, atol=1e-5)
    assert not torch.allclose(plain.calls[0].x_neg, unmoved.calls[0].x_neg, rtol=0, atol=0.05)


def test_pictures_are_drawn_untempered():
    torch.manual_seed(0)
    model = Model(0.5, step_size=1.0, noise_std=1.0, clip=None)
    torch.manual_seed(1)
    sample: Any = model.sample
    picture = sample.original((8, 1, 6, 6))
    plain = Model(step_size=1.0, noise_std=1.0, clip=None)
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    assert torch.equal(picture, plain.sample((8, 1, 6, 6)))


def test_other_classes_and_a_step_without_size_are_refused():
    with pytest.raises(ConfigError, match=r"Net has no step_size.*EnergyBasedModel"):
        nae.settings(Net())
    with pytest.raises(ConfigError, match="both None"):
        Model(0.5, step_size=None, noise_std=None)
