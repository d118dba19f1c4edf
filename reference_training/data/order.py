"""The order in which training images are visited."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ebmguard.errors import ConfigError


class EpochOrder:
    """Batches without replacement: a new permutation of the images for every epoch.

    The batch of a step depends on the seed and the step alone, so that a resumed run needs no
    state. The incomplete batch at the end of an epoch is dropped.

    Args:
        count: number of images.
        batch: images in a batch.
        seed: of the permutations.
        device: of the rows. CPUs and GPUs permute differently.

    Raises:
        ConfigError: there is not one batch in an epoch.
    """

    def __init__(self, count: int, batch: int, seed: int, device: torch.device) -> None:
        if not 1 <= batch <= count:
            raise ConfigError(
                f"a batch of {batch} images was asked for, expected 1 to {count}, the number of "
                "training images"
            )
        self.steps_per_epoch = count // batch
        self._count = count
        self._batch = batch
        self._seed = seed
        self._generator = torch.Generator(device)
        self._epoch: int | None = None
        self._permutation = torch.empty(0, dtype=torch.int64, device=device)

    def rows(self, step: int) -> Tensor:
        """The images of a step, counted from 0: (batch,) int64."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            # 64 bits of both numbers; PyTorch's CPU generator keeps only the lower 32 of its seed.
            mixed = hashlib.blake2b(f"{self._seed} {epoch}".encode(), digest_size=8).digest()
            self._generator.manual_seed(int.from_bytes(mixed))
            self._permutation = torch.randperm(
                self._count, generator=self._generator, device=self._generator.device
            )
            self._epoch = epoch
        return self._permutation[place * self._batch : (place + 1) * self._batch]
