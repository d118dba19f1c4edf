"""Take the steps of an unchanged sampler N times finer.

A sampler that moves by x' = x + a t(x) + c n, with a drift t and a normal draw n, is brought to
where N Langevin steps of a/N and c/√N lead. N - 1 of them are taken here, while the gradient is on
its way back to the sampler:

    x_{j+1} = x_j + (a/N) t(x_j) + (c/√N) ξ_j,    x_0 = x

The sampler gets the mean of the t(x_j), and in its draw the rest: the ξ_j, and the moves by which a
clamp changed the x_j. Its update then makes x_N. If the draw was made before, the gradient has the
rest. If the gradient is taken after the step's noise, the ξ_j come before the t(x_j), too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from .recording import Draws, Evaluation, is_opaque
from .sampler_update import SamplerUpdate

__all__ = ["Substeps"]

T = TypeVar("T")

_OFF = 0.05  # of a step; where the sampler's size is off by less, its update still makes the step


class Substeps(Draws):
    """The finer steps of one sampler call. While it is active, it sees the call's draws.

    Args:
        moves: the sampler's update; None only looks, for :meth:`look`.
        times: N.
        seed: of the random numbers, which those of the sampler and the network do not notice.

    Attributes:
        follow: called with the drift of every step that the chain takes, in turn.
        why: why steps were left as they are, in words.
        missed: share of the entries that the sampler did not bring to where its first step should
            have led, on the device; None before its second evaluation.
    """

    def __init__(self, moves: SamplerUpdate | None, times: int = 1, *, seed: int = 0) -> None:
        super().__init__()
        self.follow: Callable[[Tensor], object] = lambda _: None
        self.why, self.missed = "", cast("Tensor | None", None)
        self.moves, self.times = moves, times
        self._seed, self._states = seed, list[Tensor]()  # of the random numbers of the finer steps
        self._is_isolated = False
        self._count = self._steps = 0  # of the draws, and of the sampler's steps
        self._inner: dict[int, Tensor] = {}  # gradients, by the id of the input
        # Where the step under way should lead, and how far its drift does.
        self._end = self._size = cast("Tensor | None", None)
        # The number of the draw that this step waits for, its factor, and what else it has to move.
        self._waits_for: tuple[int, float, Tensor | None] | None = None
        if moves is not None and times > 1 and moves.noise_first is not None:
            self._waits_for = moves.noise_first[0], moves.sizes[0][1] / moves.std, None

    def look(self, evaluation: Evaluation) -> None:
        """Give an evaluation the gradient that has come through the network alone."""
        evaluation.inner_gradient = self._inner.pop(evaluation.input_id, None)

    def take(self, values: Tensor, std: float | None) -> None:
        """See a draw, and scale it to a finer step's noise where the sampler's step uses it."""
        if self._is_isolated or self.moves is None:
            return
        number, self._count = self._count, self._count + 1
        if any(offset < 0 for offset, _ in self.moves.places):
            super().take(values, std)
        if self._waits_for is None or number != self._waits_for[0]:
            return
        (_, factor, rest), self._waits_for = self._waits_for, None
        if rest is not None and values.numel() != rest.numel():
            return
        with torch.no_grad():
            values.mul_(self.times**-0.5)
            if self._end is not None and values.numel() == self._end.numel():
                self._end = self._end + factor * values.reshape(self._end.shape)
            if rest is not None:
                values.add_(rest.reshape(values.shape) / factor)

    def call(
        self, module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``function``; the sampler gets the gradients of finer steps on these energies.

        The buffers of ``module`` stay as that call leaves them.
        """
        values = [*args, *kwargs.values()]
        moving = [i for i, x in enumerate(values) if isinstance(x, Tensor) and x.requires_grad]
        if len(moving) != 1 or is_opaque(values[moving[0]]):
            several = "it moves several inputs of the network, or batched or sparse ones"
            self.why = several if moving else self.why
            return function(*args, **kwargs)
        x = values[moving[0]]
        self._inner.pop(id(x), None)

        def energies(z: Tensor) -> Any:
            inputs = [*values[: moving[0]], z, *values[moving[0] + 1 :]]
            named = dict(zip(kwargs, inputs[len(args) :], strict=True))
            return function(*inputs[: len(args)], **named)

        draws_before, cotangent = self._count, list[Tensor]()
        self._compare(x.detach())
        kind = x.device.type
        modes: AbstractContextManager[Any] = nullcontext()
        if torch.amp.is_autocast_available(kind):
            mode = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            modes = torch.autocast(kind, *mode, cache_enabled=False)

        def gradient_at(z: Tensor) -> Tensor:
            with torch.enable_grad(), modes:
                z = z.to(x.dtype).requires_grad_()
                f = energies(z)
                assert self.moves is not None
                return torch.autograd.grad(f, z, self.moves.cotangent(f, cotangent[0]))[0]

        def finer(gradient: Tensor) -> Tensor | None:
            if torch.is_grad_enabled() or is_opaque(gradient):
                kind = "batches" if is_opaque(gradient) else "differentiates"
                self.why = f"it {kind} its gradient"
                return None
            if self.moves is None:
                self._inner[id(x)] = gradient.clone()
                return None
            step = self.moves, x.detach(), gradient, gradient_at, draws_before
            return self._isolated(module, x.device, partial(self._finer, *step))

        y = x.view_as(x)
        # Before the call, which may change its input in place.
        hook = y.register_hook(finer)
        with warnings.catch_warnings() if self.moves is None else nullcontext():
            if self.moves is None:  # torch.compile looks at y.grad, once
                warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not")
            output = energies(y)
        if not isinstance(output, Tensor) or not output.requires_grad:
            hook.remove()
            return output
        output.register_hook(lambda c: cotangent.__setitem__(slice(None), [c]))  # type: ignore[no-untyped-call]
        return output

    def _finer(
        self,
        moves: SamplerUpdate,
        x: Tensor,
        gradient: Tensor,
        gradient_at: Callable[[Tensor], Tensor],
        draws_before: int,
    ) -> Tensor | None:
        """Take the finer steps of a step from x; returns the sampler's gradient for it."""
        index, self._steps, n = self._steps, self._steps + 1, self.times
        (a, c), (offset, row) = moves.sizes[min(index, len(moves.sizes) - 1)], (0, -1)
        if moves.places:
            offset, row = moves.places[min(index, len(moves.places) - 1)]
        start = z = x.to(torch.promote_types(x.dtype, torch.float32))
        total = move = torch.zeros_like(z)
        is_first = moves.noise_first is not None
        for j in range(n):
            if j:
                z = moves.clamped(z + move) if is_first else z + move
                z = torch.add(z, torch.randn_like(z), alpha=c * n**-0.5) if moves.places else z
                z = z if is_first else moves.clamped(z)
            drift = moves.drift(z, (gradient_at(z) if j else gradient).to(z))
            self.follow(drift)
            total, move = total + drift, (a * drift - moves.decay * z) / n
        if n == 1:
            return None
        finer, self._end = total / n, moves.clamped(z + move) if is_first else z + move
        self._size = (self._end - start).abs().mean()
        # What this gradient does not do.
        rest = self._end - start - a * finer + moves.decay * start
        number, factor = draws_before + offset, c / moves.std
        if moves.noise_first is not None:
            is_next = number < moves.noise_first[1]
            self._waits_for = (number, factor, None) if is_next else None
        if not moves.places or not c or is_first:
            finer = finer + rest / a
        elif offset >= 0:
            self._waits_for = number, factor, rest
        else:
            draw = self.log[number]
            assert draw is not None
            noise = draw.values if row < 0 else draw.values[row]
            noise = noise.reshape(z.shape) * factor
            self._end = self._end + noise * n**-0.5
            finer = finer + (rest + noise * (n**-0.5 - 1)) / a
        return (finer + moves.pull * start).to(gradient)

    def _compare(self, x: Tensor) -> None:
        """Compare the end of the last step with x, where the next evaluation is."""
        if self._end is None or self._size is None or self.moves is None:
            return
        if self.missed is None and x.shape == self._end.shape:
            end = self._end if self.moves.noise_first else self.moves.clamped(self._end)
            rounding = 16 * torch.finfo(x.dtype).eps * end.abs()
            self.missed = ((x - end).abs() > _OFF * self._size + rounding).float().mean()
        self._end = self._waits_for = None

    def _isolated(self, module: nn.Module, device: torch.device, call: Callable[[], T]) -> T:
        """Return ``call()``, whose random numbers, draws and buffers nobody else notices."""
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index])
        states = [generator.get_state() for generator in generators]
        buffers = [(m._buffers, {**m._buffers}) for m in module.modules() if m._buffers]

        def leave() -> None:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            for now, before in buffers:
                now.update(before)
            self._is_isolated = False

        try:
            try:
                self._is_isolated = True
                for i, generator in enumerate(generators):
                    if self._states:
                        generator.set_state(self._states[i])
                    else:
                        generator.manual_seed(self._seed)
                for now, before in buffers:
                    copies = {name: None if x is None else x.clone() for name, x in before.items()}
                    now.update(copies)
                result = call()
                self._states = [generator.get_state() for generator in generators]
                return result
            finally:
                leave()
        finally:
            leave()  # an interrupt may have come inside the first
