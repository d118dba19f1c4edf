"""A short-run training: what an update is, and what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebmguard import guard, tags
from ebmguard.samplers import ReplayBuffer

from ..device import compile_modules, set_precision
from ..engine import loop
from ..engine.record import Record
from ..engine.task import Part, Task
from ..plots.images import as_bytes, save_sample_figures
from ..plots.numbers import median
from .config import ShortRunConfig
from .network import start_from
from .sampler import Draws, make_sampler

SHOWN = 64
"""Samples of an update that are kept."""
LAST = 100
"""Updates whose medians are results."""
WEIGHTS = (tags.GRAD_SCALE, tags.ESS)
WATCHED = (tags.ENERGY_GAP, "f_pos/mean", "f_neg/mean", *WEIGHTS, tags.SAMPLER_GRAD_NORM)
"""Of the guard's row; weights also at the reference exponent."""


class ShortRun(Task):
    """An EBM whose negatives are K Langevin steps from noise (Nijkamp et al. 2019).

    The guard's row of each update has three more numbers: `sgld_steps`, how many were run;
    `outside`, the share of the negatives' entries that lie outside of [-1, 1]; `contrast`, their
    standard deviation (of several ranks, the mean of theirs).
    """

    unit = "update"
    stop_after = 0

    def __init__(self, config: ShortRunConfig, record: Record) -> None:
        settings, device, ranks = config.settings, record.device, record.ranks
        set_precision(config.precision)
        self.title = f"beta* = {config.beta_star:g}"
        self.config, self.settings, self.record = config, settings, record
        data = config.load_data().to(device)
        self.network = config.make_network(data)
        compile_modules(config.compile, config.precision, device, self.network)
        self.energies = ranks.parallel(self.network)
        make_optimizer = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[settings.optimizer]
        self.optimizer = make_optimizer(self.network.parameters(), lr=settings.lr, fused=True)
        self.draws = Draws(data, settings, config.seed, ranks)
        self.count = ranks.share(settings.batch)
        self.buffer = None
        if settings.init == "persistent":
            self.buffer = ReplayBuffer(
                ranks.share(settings.buffer_size),
                data.sample_shape,
                reinit_rate=0.0,
                generator=self.draws.chains,
            )
        self.loss_fn, self.sample_q = guard(
            None,
            make_sampler(settings, device),
            beta_star=config.beta_star,
            substeps=1,  # steps as published
            output_scale=settings.output_scale,
            action=config.action,
            **record.for_guard,
        )
        self.guard = self.loss_fn.guard
        self.guard.attach(
            model=self.network,
            optimizer=self.optimizer,
            buffer=self.buffer,
            step_size=settings.step_size,
            noise_std=settings.noise_std,
            sgld_steps=settings.sgld_steps,
        )
        self.guards = {"guard": self.guard}
        self.samples = {"data": data.scale(data.train_x[:SHOWN])}
        self.parts: dict[str, Part] = {"network": self.network, "optimizer": self.optimizer}
        self.parts |= {"draws": self.draws, "shown": self}
        if self.buffer is not None:
            self.parts["buffer"] = self.buffer

    def begin(self) -> None:
        """Take another run's parameters, where that is asked for."""
        if self.config.start_from is not None:
            start_from(self.network, Path(self.config.start_from), self.settings.activation)

    def step(self, step: int) -> Tensor | None:
        """One update."""
        count = self.count
        x_pos = self.draws.positives()
        steps = self.draws.sgld_steps()
        if self.buffer is None:
            x0 = self.draws.starts(count)
        else:
            x0, rows = self.buffer.sample(count)
        x_neg: Tensor = self.sample_q(self.network, x0, self.draws.noise(count, steps))
        if self.buffer is not None:
            self.buffer.write(rows, x_neg)
        f_pos, f_neg = self.energies(torch.cat((x_pos, x_neg))).split(count)
        loss = self.loss_fn(f_pos, f_neg)  # it was f_neg.mean() - f_pos.mean()
        self.optimizer.zero_grad()
        loss.backward()
        own = {"outside": (x_neg.abs() > 1).float().mean(), "contrast": x_neg.std()}
        self.guard.log({**self.record.ranks.means(own), "sgld_steps": steps})
        self.optimizer.step()
        return x_neg

    def keep(self, step: int, samples: Tensor | None) -> None:
        """Keep the last samples, and write those of some updates."""
        assert samples is not None
        done, record = step + 1, self.record
        x = self.samples["end"] = samples[:SHOWN]
        if record.folder.writes and (done % self.settings.sample_every == 0 or step == 0):
            pixels = as_bytes(x).cpu()
            np.save(record.folder.samples / f"{done:08d}.npy", pixels.numpy())
            record.images("samples", pixels, done)

    def results(self) -> dict[str, Any]:
        """Draw the last samples; medians of what the guard saw at the end."""
        config, folder = self.config, self.record.folder
        if folder.writes:
            save_sample_figures(folder.figures, self.samples)
        last = self.record.guard_rows()[-LAST:]
        medians = {
            tag: median([row[tag] for row in last if row.get(tag) is not None])
            for name in WATCHED
            for tag in ((name, tags.REFERENCE + name) if name in WEIGHTS else (name,))
        }
        return {
            "data": config.data,
            "beta_star": config.beta_star,
            "beta": config.beta_star / self.settings.output_scale,
            "median_last_100": medians,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """The samples that are drawn at the end, beside images of the data set."""
        return self.samples

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go back to saved samples."""
        self.samples = dict(state)


def told(results: Mapping[str, Any]) -> str:
    """What the guard saw at the end."""
    numbers, beta_star = results["median_last_100"], results["beta_star"]
    shown = {"energy gap": tags.ENERGY_GAP}
    for name, tag in (("GradScale", tags.GRAD_SCALE), ("ESS", tags.ESS)):
        shown[name] = tags.weight_tag(tag, beta_star)
    known = [f"{name} {numbers[t]:.3g}" for name, t in shown.items() if numbers[t] is not None]
    return f"medians of the last {LAST} updates: {', '.join(known)}"


train = partial(loop.train, ShortRun)
run = partial(loop.launch, train, told)
