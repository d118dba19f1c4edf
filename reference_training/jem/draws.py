"""The images of a training step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..data import EpochOrder, ImageData, augment
from ..engine.ranks import Ranks
from ..engine.task import Streams
from .scenarios import Scenario


class Draws(Streams):
    """Batches of noisy, augmented training images: positives, and the classifier's own.

    Every rank draws the same batch and keeps its part of it, so that the images of a run do not
    depend on the number of ranks. What is random here is drawn apart from the chains, so that runs
    of different β* see the same images.

    Args:
        data: on the device of the training.
        settings: sizes of the batches, noise, epochs or draws with replacement.
        seed: of the run.
        ranks: who trains.
        labels_per_class: the classifier's own batch is of the first so many images of each class;
            None: of all.

    Attributes:
        generator: source of all that is random here, but for the order of epochs.
    """

    def __init__(
        self,
        data: ImageData,
        settings: Scenario,
        seed: int,
        ranks: Ranks,
        labels_per_class: int | None = None,
    ) -> None:
        device = data.train_x.device
        self._data = data
        self._settings = settings
        self._ranks = ranks
        self.generator = torch.Generator(device).manual_seed(2 * seed)
        super().__init__({"generator": self.generator})  # epochs need no state
        sizes = [size for size in (settings.n_pos, settings.n_labelled) if size]
        every = torch.arange(len(data.train_x), device=device)
        labelled = every
        if labels_per_class is not None:
            labels = [(data.train_y == label).nonzero()[:, 0] for label in range(data.classes)]
            labelled = torch.cat([rows[:labels_per_class] for rows in labels]).sort()[0]
        self._images = (every, labelled)
        self._orders = [
            EpochOrder(len(images), size, 2 * seed + i, device)
            for i, (images, size) in enumerate(zip(self._images, sizes, strict=False))
        ]

    def batch(self, step: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """This rank's images of a step.

        Returns:
            positives (n_pos, C, H, W) in the units of the samples; the classifier's images
            (n_labelled, C, H, W), or None where the positives serve; the labels of the latter, or
            of the positives, (n,) int64.
        """
        images, labels = self._noisy(step, 0, self._settings.n_pos)
        if not self._settings.n_labelled:
            return images, None, labels
        return images, *self._noisy(step, 1, self._settings.n_labelled)

    def _noisy(self, step: int, which: int, size: int) -> tuple[Tensor, Tensor]:
        data, settings, rng = self._data, self._settings, self.generator
        images = self._images[which]
        if settings.epochs:
            rows = images[self._orders[which].rows(step)]
        else:
            rows = images[torch.randint(len(images), (size,), generator=rng, device=rng.device)]
        x = data.scale(augment(data.train_x[rows], pad=data.pad, flip=data.flip, generator=rng))
        noise = torch.randn(x.shape, generator=rng, device=x.device)
        part = self._ranks.part(size)
        return (x + settings.data_noise * noise)[part], data.train_y[rows][part]
