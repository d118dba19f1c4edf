"""A replay buffer of persistent chains (Du and Mordatch 2019, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, Stateful, typed

__all__ = ["ReplayBuffer"]


@typed
class ReplayBuffer(Stateful):
    """A buffer of chains that persist between training steps; a share of a draw starts afresh.

    Args:
        size: number of chains.
        sample_shape: of one sample, such as (1, 8, 8).
        reinit_rate: probability that a start point is a fresh one instead; JEM uses 0.05.
        generator: the only source of randomness; the buffer lives on its device.
        low, high: ends of the uniform density that fresh chains start from.
        dtype: floating-point type of the samples.
        classes: with k = size / classes, chains of class c have rows c k to (c + 1) k - 1, as in
            JEM; 1 does not tell them apart.

    Attributes:
        samples: the chains, (size, *sample_shape).
        ages: number of draws since a chain started afresh, (size,) int64.

    Raises:
        ConfigError: a setting is out of range.
    """

    _owner = "a replay buffer"

    def __init__(
        self,
        size: int,
        sample_shape: Sequence[int],
        *,
        reinit_rate: float,
        generator: torch.Generator,
        low: float = -1.0,
        high: float = 1.0,
        dtype: torch.dtype = torch.float32,
        classes: int = 1,
    ) -> None:
        if size < 1 or classes < 1 or size % classes:
            raise ConfigError(
                f"size is {size} and classes is {classes}, expected a multiple of it above 0"
            )
        if not 0 <= reinit_rate <= 1:
            raise ConfigError(f"reinit_rate is {reinit_rate}, expected a probability in [0, 1]")
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(f"low is {low} and high is {high}, expected finite low < high")
        self.reinit_rate, self.generator, self.classes = reinit_rate, generator, classes
        self.low, self.high = low, high
        self._sample_shape = tuple(sample_shape)
        self._dtype = dtype
        self.samples = self._fresh(size)
        self.ages = torch.zeros(size, dtype=torch.int64, device=self.samples.device)
        # Rows, ages and restarts of the latest draw.
        self._draw: tuple[Tensor, Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return self.samples.shape[0]

    @typed
    def sample(self, n: int, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Draw `n` start points, with replacement.

        Args:
            n: how many.
            labels: classes of the chains to draw, (n,) int64 in [0, classes). Their range is not
                checked, since that would wait for the device.

        Returns:
            Start points (n, *sample_shape), a copy, and the rows they belong to, (n,) int64.

        Raises:
            ConfigError: n below 1, labels that do not fit, or none expected.
        """
        if n < 1:
            raise ConfigError(f"n is {n}, expected at least 1")
        chains, device = len(self), self.samples.device
        if labels is not None:
            if self.classes == 1:
                raise ConfigError("This buffer does not tell classes apart; give it classes=...")
            if labels.shape != (n,) or labels.dtype != torch.int64:
                raise ConfigError(
                    f"labels have shape {tuple(labels.shape)} and type {labels.dtype}, expected "
                    f"({n},) and torch.int64"
                )
            chains //= self.classes
        indices = torch.randint(chains, (n,), generator=self.generator, device=device)
        if labels is not None:
            indices += labels * chains
        restart = torch.rand(n, generator=self.generator, device=device) < self.reinit_rate
        self._draw = indices, self.ages[indices] * ~restart, restart
        restart = restart.view(n, *(1 for _ in self._sample_shape))
        return torch.where(restart, self._fresh(n), self.samples[indices]), indices

    @typed
    def write(self, indices: Tensor, samples: Tensor) -> None:
        """Store the ends of the chains in their rows. Of a row drawn twice, the last one stays.

        A chain is then one draw older than its start point in the latest draw, or, with other
        rows, than the chain that its row held.

        Args:
            indices: rows, (n,) int64, as returned by :meth:`sample`.
            samples: (n, *sample_shape); ConfigError of what does not fit the buffer.
        """
        expected = (*indices.shape, *self._sample_shape)
        if indices.ndim != 1 or samples.shape != expected or indices.dtype != torch.int64:
            raise ConfigError(
                f"samples have shape {tuple(samples.shape)} for indices of shape "
                f"{tuple(indices.shape)} and {indices.dtype}, expected "
                f"(n, {', '.join(map(str, self._sample_shape))}) for (n,) and torch.int64"
            )
        # Duplicate rows: which write lands last is undefined on several threads or a GPU, so every
        # duplicate writes the value of the last one.
        order = torch.arange(len(indices), device=indices.device)
        last = torch.zeros(len(self), dtype=torch.int64, device=indices.device)
        last = last.scatter_reduce_(0, indices, order, "amax")[indices]
        self.samples[indices] = samples.detach()[last].to(self._dtype)
        ages = self.ages[indices]
        if self._draw is not None and indices is self._draw[0]:
            ages = self._draw[1]
        self.ages[indices] = ages[last] + 1

    def diagnostics(self) -> dict[str, Tensor]:
        """Return ``age``, ``duplicates`` and ``reinit`` of a draw, see :mod:`ebmguard.tags`.

        The latest draw, 0-dim float32; none before the first draw and after a restored state.
        """
        if self._draw is None:
            return {}
        rows, ages, restart = self._draw
        ordered = rows.sort().values
        repeats = (ordered[1:] == ordered[:-1]).sum()
        return {
            "age": ages.mean(dtype=torch.float32),
            "duplicates": repeats * (1 / len(rows)),
            "reinit": restart.mean(dtype=torch.float32),
        }

    def _saved(self) -> dict[str, Any]:
        return {
            "samples": torch.as_tensor,
            "ages": torch.as_tensor,
            "generator": lambda x: torch.Generator(self.generator.device).set_state(x.cpu()),
        }

    def _read(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if set(state) != {*self._saved()}:
            raise ConfigError(
                f"the state holds {', '.join(sorted(map(str, state)))}; expected samples, ages and "
                "generator, as state_dict() returns them (of a buffer saved before it had ages the "
                "samples alone can be used)"
            )
        read = super()._read(state)
        samples, ages, held = read["samples"], read["ages"], self.samples
        is_other = samples.shape != held.shape or samples.dtype != held.dtype
        if is_other or ages.shape != self.ages.shape:
            raise ConfigError(
                f"the state holds samples of shape {tuple(samples.shape)} and {samples.dtype}, and "
                f"ages of {tuple(ages.shape)}, this buffer samples of {tuple(held.shape)} and "
                f"{held.dtype}; build the buffer with the settings of the saved run"
            )
        return read

    def _take(self, read: Mapping[str, Any]) -> None:
        # In place: a CUDA graph may hold them.
        self.samples.copy_(read["samples"])
        self.ages.copy_(read["ages"])
        self.generator.set_state(read["generator"].get_state())
        self._draw = None

    def _fresh(self, n: int) -> Tensor:
        rng, shape = self.generator, (n, *self._sample_shape)
        uniform = torch.rand(shape, generator=rng, device=rng.device, dtype=self._dtype)
        return uniform.mul_(self.high - self.low).add_(self.low)
