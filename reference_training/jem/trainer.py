"""A JEM in training: what one step is, and all that it changes.

The training step is an ordinary one; what the guard adds to it are the two marked lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebmguard import Guard, guard
from ebmguard.samplers import ReplayBuffer

from ..data import ImageData
from ..device import compile_modules
from ..engine.ranks import ONE_RANK, Ranks
from ..engine.task import Part, Streams
from ..judge.stored import network_of, spread
from ..networks import WideResNet, of_class, seeded
from .config import JemConfig
from .course import CROSS_ENTROPY, GAP_XY
from .draws import Draws
from .sampler import make_sampler

MASKS = 10**9
"""What tells the seed of the dropout from those of images and chains."""


class Trainer:
    """Classifier and EBM in one network, trained step by step (Grathwohl et al. 2020).

    Args:
        config: the settings, checked.
        network: as :func:`make_network` builds it.
        data: on the network's device.
        ranks: the processes that train together.
        **for_guard: more of the guards' settings, of :class:`..engine.record.Record`.

    Attributes:
        buffer: this rank's chains.
        parts: all that a step changes, of this rank, but for the guards.
        guards: by the term that they guard, "p_x" and, where it is trained, "p_x_y".
    """

    def __init__(
        self,
        config: JemConfig,
        network: WideResNet,
        data: ImageData,
        *,
        ranks: Ranks = ONE_RANK,
        **for_guard: Any,
    ) -> None:
        settings, device = config.settings, data.train_x.device
        self.config = config
        self.settings = settings
        self.ranks = ranks
        self.network = network
        # All of a step's images and samples pass through the network at once, which is also what
        # several ranks need: their gradients are averaged in one backward pass.
        classifier = Classifier(network)
        # The guard sees no step inside compiled code.
        compiled = "no" if config.finer_steps else config.compile
        compile_modules(compiled, config.precision, device, network, classifier)
        self._classify = ranks.parallel(classifier)
        make: Any = {"adam": torch.optim.Adam, "sgd": partial(torch.optim.SGD, momentum=0.9)}
        self.optimizer: torch.optim.Optimizer = make[config.optimizer](
            network.parameters(), lr=settings.lr, weight_decay=config.weight_decay, fused=True
        )
        self.draws = Draws(data, settings, config.seed, ranks, config.labels_per_class)
        # A stream of random numbers of its own on each rank, apart from that of the images.
        self.rng = torch.Generator(device).manual_seed(ranks.own_seed(2 * config.seed + 1))
        generators = [self.draws.generator, self.rng]
        has_classes = config.class_conditional or config.p_x_y_weight
        self.buffer = ReplayBuffer(
            ranks.share(settings.buffer_size),
            data.sample_shape,
            reinit_rate=settings.reinit_rate,
            generator=self.rng,
            classes=data.classes if has_classes else 1,
        )
        names = ("network", "optimizer", "buffer", "draws")
        self.parts: dict[str, Part] = {name: getattr(self, name) for name in names}
        if config.dropout:
            # It draws from PyTorch's own generator, as no other part of a run does.
            masks = torch.default_generator
            if device.type == "cuda":
                masks = torch.cuda.default_generators[torch.cuda._utils._get_device_index(device)]
            generators.append(masks.manual_seed(ranks.own_seed(MASKS + config.seed)))
            self.parts["masks"] = Streams({"masks": masks})

        def guarded(**how: Any) -> Guard:
            count = ranks.share(settings.n_neg)
            is_finer = config.finer_steps
            own: Guard = guard(
                None,
                make_sampler(
                    *(settings, count, self.rng, lambda: own.next_steps()), as_graph=not is_finer
                ),
                beta_star=config.beta_star,
                substeps="auto" if is_finer else 1,
                output_scale=settings.output_scale,
                variant=config.variant,
                action=config.action,
                **{"process_group": ranks.group, **how},
            )
            # Optional: so that the guard can tell whether the sampler's steps are of the right
            # size, and whether its chains are stale.
            return own.attach(
                buffer=self.buffer,
                step_size=settings.step_size,
                noise_std=settings.noise_std,
                sgld_steps=settings.sgld_steps,
            )

        # The first line of the guard. The objects it returns are drop-in replacements.
        self.loss_fn, self.sample_q = guarded(**for_guard)
        # Optional: the guard's step then ends with the optimizer's, so that checkpoints between
        # two steps hold no half-recorded one, and a rollback knows all that a step changes.
        first = self.loss_fn.guard
        first.attach(model=network, optimizer=self.optimizer, generators=generators)
        self.guards: dict[str, Guard] = {"p_x": first}
        if config.p_x_y_weight:
            # f(x, y) is another population of energies than f(x): bands and weights of its own.
            log_dir: Path | None = for_guard.get("log_dir")
            how = {"sinks": (), "log_dir": log_dir and log_dir / "p_x_y"}
            self.loss_xy, self.sample_xy = guarded(**for_guard | how)
            self.guards["p_x_y"] = self.loss_xy.guard

    def step(self, step: int) -> Tensor | None:
        """Train one step, counted from 0, and return its samples, (n, C, H, W), where it has some.

        The guard's row of it has the classifier's cross-entropy too.
        """
        config, settings, ranks = self.config, self.settings, self.ranks
        self.optimizer.param_groups[0]["lr"] = settings.lr_at(step)
        x_pos, x_lab, labels = self.draws.batch(step)
        parts = {"pos": x_pos}
        if config.p_x_weight:
            y, size = None, (ranks.share(settings.n_neg),)
            if config.class_conditional:
                y = torch.randint(
                    self.network.classes, size, generator=self.rng, device=x_pos.device
                )
            parts["neg"] = self.sample_q(self.network, self.buffer, y)
        if x_lab is not None:
            parts["lab"] = x_lab
        if config.p_x_y_weight:
            parts["neg_y"] = self.sample_xy(self.network, self.buffer, labels)
        outputs = self._outputs(parts)
        labelled = self.network.logits(outputs["pos" if x_lab is None else "lab"])

        count = settings.n_labelled or settings.n_pos
        cross_entropy = F.cross_entropy(labelled, labels) * ranks.weight(count)
        loss = config.p_y_x_weight * cross_entropy
        numbers = {CROSS_ENTROPY: cross_entropy}
        if config.p_x_y_weight:
            f_pos, f_neg = (of_class(own, labels) for own in (labelled, outputs["neg_y"]))
            numbers[GAP_XY] = f_pos.mean() - f_neg.mean()
            l_p_x_y = self.loss_xy(f_pos, f_neg, groups=(labels, labels))
            loss = loss + config.p_x_y_weight * self._with_l2(l_p_x_y, f_pos, f_neg)
        if config.p_x_weight:
            f_pos, f_neg = (self.network.energies(outputs[name]) for name in ("pos", "neg"))
            # The second line of the guard; it was f_neg.mean() - f_pos.mean().
            l_p_x = self.loss_fn(f_pos, f_neg)
            loss = loss + config.p_x_weight * self._with_l2(l_p_x, f_pos, f_neg)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.network.parameters(), config.clip_norm)
        self.guards["p_x"].log(ranks.means(numbers))
        self.optimizer.step()
        return parts.get("neg", parts.get("neg_y"))

    def _with_l2(self, loss: Tensor, f_pos: Tensor, f_neg: Tensor) -> Tensor:
        """The loss and this rank's part of the penalty of energies far from 0: not the guard's."""
        if not self.config.energy_l2:
            return loss
        weight, settings = self.ranks.weight, self.settings
        squares = f_pos.square().mean() * weight(settings.n_pos)
        squares = squares + f_neg.square().mean() * weight(settings.n_neg)
        return loss + self.config.energy_l2 * squares

    def _outputs(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.config.norm == "batch":  # each batch by statistics of its own, as published
            return {name: self._classify(x) for name, x in parts.items()}
        outputs: Tensor = self._classify(torch.cat(list(parts.values())))
        sizes = [len(x) for x in parts.values()]
        return dict(zip(parts, outputs.split(sizes), strict=True))  # type: ignore[no-untyped-call]

    def chains(self, count: int) -> Tensor:
        """So many chains of the replay buffers of all ranks, (count, C, H, W); at most all."""
        return spread(self.ranks.joined(self.buffer.samples), count)


class Classifier(nn.Module):
    """The outputs of a network as a module of its own, to be compiled and spread over ranks."""

    def __init__(self, network: WideResNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, outputs)."""
        return self.network.outputs(x)


def make_network(config: JemConfig, data: ImageData) -> WideResNet:
    """The run's network as its seed initialises it; PyTorch's global generators are left alone."""
    make = partial(network_of, config.to_json(), data.sample_shape[0], data.classes)
    return seeded(make, config.seed, data.train_x.device)
