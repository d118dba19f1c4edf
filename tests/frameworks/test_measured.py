"""What is measured of the frameworks' own loops is true, or refused for the right reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import nn
from torchebm.core import BaseModel
from torchebm.samplers import (
    GradientDescentSampler,
    HamiltonianMonteCarlo,
    LangevinDynamics,
    NesterovSampler,
)

from ebmguard.sampling import Measured, Recording
from tests.frameworks.lightning_parts import WARNS, Guarded, make_trainer
from tests.frameworks.parts import NOISE, STEP_SIZE, Sampler, data, make_net
from tests.sampling.loops import Loop, agrees

pytestmark = WARNS


class Energy(BaseModel):
    """As torchebm wants them: low on data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy: torch.Tensor = self.net(x).squeeze(-1)
        return energy


def _recorded(draw: Callable[[], object]) -> Measured:
    with Recording(ends=4) as seen:
        draw()
    return Measured.of(seen.evaluations, seen.draws.log)


def _of_torchebm(kind: Any, **options: Any) -> Measured:
    sampler, x = kind(Energy(), **options), torch.randn(32, 8)
    return _recorded(lambda: sampler.sample(x=x, n_steps=6))


def _of_lightning() -> Measured:
    module = Guarded(beta_star=0.0, output_scale=None)
    make_trainer(max_steps=2).fit(module, data())
    found = module.loss_fn.guard.measured
    assert isinstance(found, Measured)
    return found


def _of_wrapped(wrap: Callable[[nn.Module], Any]) -> Measured:
    """The sampler on the network as the framework wraps it."""
    return _recorded(Sampler(wrap(make_net())).sample_new_exmps)


_TUTORIAL = Loop(step=STEP_SIZE, noise=NOISE)
_NO_NOISE = "gradient steps without noise"
# What is true, and how it is measured.
LOOPS: dict[str, tuple[Loop, Callable[[], Measured]]] = {
    "Lightning: a LightningModule in a Trainer": (_TUTORIAL, _of_lightning),
    "Fabric: the wrapped network": (
        _TUTORIAL,
        lambda: _of_wrapped(lambda net: Fabric(accelerator="cpu", devices=1).setup(net)),
    ),
    "accelerate: the prepared network": (
        _TUTORIAL,
        lambda: _of_wrapped(lambda net: Accelerator(cpu=True).prepare(net)),
    ),
    "torchebm: LangevinDynamics": (
        Loop(step=-0.05, noise=0.1**0.5),
        lambda: _of_torchebm(LangevinDynamics, step_size=0.05),
    ),
    "torchebm: LangevinDynamics, noise_scale=0.1": (
        Loop(step=-0.05, noise=0.1 * 0.1**0.5),
        lambda: _of_torchebm(LangevinDynamics, step_size=0.05, noise_scale=0.1),
    ),
    "torchebm: HamiltonianMonteCarlo": (
        Loop.refused("HMC"),
        lambda: _of_torchebm(HamiltonianMonteCarlo, step_size=0.1, n_leapfrog_steps=4),
    ),
    "torchebm: GradientDescentSampler": (
        Loop.refused(_NO_NOISE),
        lambda: _of_torchebm(GradientDescentSampler, step_size=0.05),
    ),
    "torchebm: NesterovSampler": (
        Loop.refused("momentum"),
        lambda: _of_torchebm(NesterovSampler, step_size=0.05),
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_a_framework_is_what_it_is(name: str) -> None:
    loop, measure = LOOPS[name]
    torch.manual_seed(0)
    found = measure()
    assert agrees(loop, found), found
