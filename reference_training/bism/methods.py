"""The ways to train a model with binary latents: one update of a minibatch each.

BiSM's three and their plain counterparts differ in one thing: the log density whose score is
matched is a posterior's log weight or f itself, the negative free energy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Generator, Tensor, nn

from ..engine.ranks import ONE_RANK, Ranks
from .bilevel import BETAS, Moments, Parameters, descend
from .config import BILEVEL, CHAINS, POSTERIORS, UpdateSettings
from .matching import LogDensity, contrastive, denoising, multiscale_denoising, sliced
from .posterior import BernoulliPosterior, Energy, Latent, Posterior
from .rbm import GaussianBernoulliRBM

__all__ = ["Levels", "Update", "Walk"]

PARTICLES = 5
"""Latents that vnce draws for each sample of its noise."""
Walk = Callable[[Tensor, int, Generator], Tensor]


class Levels(NamedTuple):
    """Both levels of one update, before it is done: phi_0, phi_N, and the loss of any phi.

    phi_N is differentiable in the model's parameters where N > 0, the loss in them and in phi; it
    is always of the same draws.
    """

    before: Parameters
    after: Parameters
    upper: Callable[[Parameters], Tensor]


class Update:
    """Trains a model on one minibatch at a time.

    Args:
        model: trained in place; of another than an RBM, called with v it is the negative free
            energy, or `energy` is that of v and h.
        settings: what to do, without problems.
        generator: all random numbers; on the model's device.
        posterior: of a method that has one; None makes an RBM's. It holds phi between minibatches.
        walk: v, steps and generator to v, the chains of contrastive divergence; None is Gibbs
            sampling of an RBM.
        ranks: who trains: each takes its part of a minibatch, and draws the random numbers of all,
            but for those of chains (:attr:`UpdateSettings.has_chains`).
    """

    def __init__(
        self,
        model: nn.Module,
        settings: UpdateSettings,
        generator: Generator,
        posterior: Posterior | None = None,
        walk: Walk | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.model, self.settings, self._generator = model, settings, generator
        self._walk, self._ranks = walk or cast(GaussianBernoulliRBM, model).gibbs, ranks
        self._like = like = next(model.parameters())
        self._constant = nn.Parameter(like.new_zeros(()))
        noise_contrast = settings.method in ("nce", "vnce")
        self._trained = [*model.parameters(), *[self._constant] * noise_contrast]
        self._optimizer = torch.optim.Adam(self._trained, lr=settings.lr, betas=BETAS)
        self._chains: Tensor | None = None
        self.posterior: Posterior | None = None
        if settings.method in POSTERIORS:
            self.posterior = posterior or _linear(cast(GaussianBernoulliRBM, model), generator)
            self._latent = Latent(cast(Energy, model.energy), self.posterior)
            self._moments = Moments.none(self._phi)

    def __call__(
        self, v: Tensor, inner: Callable[[], Tensor] | None = None, *, rate: float = 1.0
    ) -> dict[str, Tensor]:
        """One update.

        Args:
            v: the minibatch, ``(B, ...)``.
            inner: draws a minibatch for each of the K steps; None: they have v.
            rate: factor on the learning rate of this update.

        Returns:
            ``update_loss``; of a bi-level method also ``drift``, the norm of phi_N - phi_0.
        """
        numbers: dict[str, Tensor] = {}
        phi: Parameters = {}
        self._optimizer.param_groups[0]["lr"] = rate * self.settings.lr
        if self.posterior is not None:
            before, self._moments, phi = self._both(v, inner)
            self.posterior.load_state_dict(before)
            if self.settings.method in BILEVEL:
                apart = [(phi[name].detach() - x).norm() for name, x in before.items()]
                numbers["drift"] = torch.stack(apart).norm()
        loss = self._loss(v, phi).mean()
        self._optimizer.zero_grad()
        torch.autograd.backward(loss, inputs=self._trained)
        moved = [(p, p.grad) for p in self._trained if p.grad is not None]
        for (p, _), mean in zip(moved, self._ranks.averages([g for _, g in moved]), strict=True):
            p.grad = mean
        self._optimizer.step()
        return {"update_loss": loss.detach(), **numbers}

    def levels(self, v: Tensor, inner: Callable[[], Tensor] | None = None) -> Levels:
        """What a call of a bi-level method would do; the generator goes on, nothing else does."""
        before, _, after = self._both(v, inner)
        held = self._generator.get_state()

        def upper(phi: Parameters) -> Tensor:
            self._generator.set_state(held)
            return self._loss(v, phi).mean()

        return Levels(before, after, upper)

    def held_out(self, v: Tensor, generator: Generator) -> float:
        """The loss of other data, by other random numbers; nothing is changed by it."""
        other = copy(self)
        other._generator, other._chains, other._ranks = generator, None, ONE_RANK
        return other._loss(v, {} if self.posterior is None else self._phi).mean().item()

    def state_dict(self) -> dict[str, Any]:
        """All but the model's parameters and the generator."""
        found: dict[str, Any] = {
            "optimizer": self._optimizer.state_dict(),
            "constant": self._constant.detach(),
            "chains": self._chains,
        }
        if self.posterior is not None:
            found |= {"posterior": self.posterior.state_dict(), "moments": tuple(self._moments)}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self._optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            self._constant.copy_(state["constant"])
        self._chains = state["chains"]
        if self.posterior is not None:
            self.posterior.load_state_dict(state["posterior"])
            self._moments = Moments(*state["moments"])

    @property
    def _phi(self) -> Parameters:
        assert self.posterior is not None
        return {name: p.detach().clone() for name, p in self.posterior.named_parameters()}

    def _both(
        self, v: Tensor, inner: Callable[[], Tensor] | None
    ) -> tuple[Parameters, Moments, Parameters]:
        """phi_0 with its moments, by the K steps, and of a bi-level method phi_N, by N more."""
        settings, draw = self.settings, inner or (lambda: v)
        before, moments = self._descend(draw, self._phi, self._moments, settings.inner_steps)
        if settings.method not in BILEVEL:
            return before, moments, before
        steps = settings.unrolled_steps
        after, _ = self._descend(lambda: v, before, moments, steps, unrolled=True)
        return before, moments, after

    def _descend(
        self, draw: Callable[[], Tensor], *start: Any, unrolled: bool = False
    ) -> tuple[Parameters, Moments]:
        def lower(phi: Parameters) -> Tensor:
            v = draw()
            # At the noise at which the upper level will ask for the posterior.
            spread = self._spread(len(v))
            seen = v + spread.view(-1, *[1] * (v.ndim - 1)) * self._normal(v)
            seen, draws, spread = self._part(seen, self._draws(len(v)), spread)
            if self.settings.lower == "elbo":
                return (-self._latent.log_weight(phi, seen, draws)).mean()
            found = self._latent.conditional_fisher(phi, seen, draws)
            # Published so: what is seen through much noise counts less.
            return (found / spread if self.settings.method == "bimdsm" else found).mean()

        phi, moments, steps = start
        lr, averages = self._optimizer.param_groups[0]["lr"], self._ranks.averages
        return descend(lower, phi, moments, lr, steps, unrolled=unrolled, averages=averages)

    def _loss(self, v: Tensor, phi: Parameters) -> Tensor:
        method = self.settings.method
        if chains := CHAINS.fullmatch(method):
            (own,) = self._part(v)
            return self._contrastive_divergence(own, bool(chains[1]), int(chains[2]))
        if method in ("nce", "vnce"):
            return self._noise_contrast(v, phi)
        density: LogDensity = self.model
        if method in BILEVEL:
            (draws,) = self._part(self._draws(len(v)))
            density = partial(self._latent.log_weight, phi, noise=draws)
        v, noise, spread = self._part(v, self._normal(v), self._spread(len(v)))
        match method.removeprefix("bi"):
            case "dsm":
                return denoising(density, v, noise, self.settings.noise_std)
            case "ssm":
                return sliced(density, v, noise.sign())
            case _:
                return multiscale_denoising(density, v, noise, spread)

    def _noise_contrast(self, v: Tensor, phi: Parameters) -> Tensor:
        """(V)NCE against N(0, I); of VNCE (Rhodes and Gutmann 2019) the bound at the posterior."""
        own, noise = self._part(v, self._normal(v))

        def above(log_density: Tensor, x: Tensor) -> Tensor:
            of_noise = -(x.square() / 2 + math.log(2 * math.pi) / 2).flatten(1).sum(1)
            return log_density - self._constant - of_noise

        if self.settings.method == "nce":
            return contrastive(above(self.model(own), own), above(self.model(noise), noise))
        count, weight = PARTICLES, partial(self._latent.log_weight, phi)
        several = noise.repeat(count, *[1] * (noise.ndim - 1))
        drawn = self._draws(count * len(v)).view(count, len(v), -1)
        weights = weight(several, drawn[:, self._ranks.part(len(v))].flatten(0, 1))
        of_noise = weights.view(count, -1).logsumexp(0) - math.log(count)
        of_data = weight(own, *self._part(self._draws(len(v))))
        return contrastive(above(of_data, own), above(of_noise, noise))

    def _contrastive_divergence(self, v: Tensor, is_persistent: bool, steps: int) -> Tensor:
        start = v if self._chains is None or not is_persistent else self._chains
        negatives = self._walk(start, steps, self._generator)
        if is_persistent:
            self._chains = negatives
        risen: Tensor = self.model(negatives) - self.model(v)
        return risen

    def _spread(self, count: int) -> Tensor:
        """The noise's standard deviation of each sample of a minibatch, ``(B,)``."""
        like, name = self._like, self.settings.method
        low, high = {
            "bidsm": (self.settings.noise_std,) * 2,
            "bimdsm": self.settings.noise_range,
            "mdsm": self.settings.noise_range,
        }.get(name, (0.0, 0.0))
        if low == high or self.settings.noise_spacing == "linear":
            return torch.linspace(low, high, count, dtype=like.dtype, device=like.device)
        exponents = torch.linspace(math.log(low), math.log(high), count, device=like.device)
        return exponents.exp().to(like.dtype)

    def _part(self, *rows: Tensor) -> Iterator[Tensor]:
        """This rank's part of what is there for the whole minibatch."""
        return (x[self._ranks.part(len(x))] for x in rows)

    def _normal(self, v: Tensor) -> Tensor:
        return v.new_empty(v.shape).normal_(generator=self._generator)

    def _draws(self, count: int) -> Tensor:
        assert self.posterior is not None
        return self.posterior.noise(count, self._generator)


def _linear(model: GaussianBernoulliRBM, generator: Generator) -> BernoulliPosterior:
    """An RBM's posterior as a linear layer begins, but by the generator."""
    like = model.weight
    posterior = BernoulliPosterior(*like.shape).to(like)
    with torch.no_grad():
        for p in posterior.parameters():
            p.uniform_(-(len(like) ** -0.5), len(like) ** -0.5, generator=generator)
    return posterior
