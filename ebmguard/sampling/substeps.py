"""Takes each step of an unchanged sampler N times finer.

A sampler that moves by x' = x + a t(x) + c n, with a drift t and a normal draw n, is brought to
where N Langevin steps of a/N and c/√N lead. N - 1 of them are taken here, while the gradient is on
its way back to the sampler:

    x_{j+1} = x_j + (a/N) t(x_j) + (c/√N) ξ_j,    x_0 = x

The sampler is given the mean of the t(x_j), and in its draw the rest: the ξ_j, and what a clamp did
to the x_j. Its own line then makes x_N. Where the draw was made before, the gradient has the rest.
Where each gradient is taken after the step's noise, the ξ_j come before the t(x_j), too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from .moves import Moves
from .recording import Draws, Evaluation, is_opaque

__all__ = ["Substeps"]

T = TypeVar("T")

_OFF = 0.05  # of a step; where the sampler's size is off by less, its own line still makes the step


class Substeps(Draws):
    """The finer steps of one sampler call. While it is active, it sees the call's draws.

    Args:
        moves: how the sampler moves; None only looks, for :meth:`look`.
        times: N.
        seed: of the random numbers, which those of the sampler and the network do not notice.

    Attributes:
        follow: called with the drift of every step that the chain takes, in turn.
        why: why steps were left as they are, in words.
        missed: share of the entries that the sampler did not bring to where its first step should
            have led, on the device; None before its second evaluation.
    """

    def __init__(
        self,
        moves: Moves | None,
        times: int = 1,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.follow: Callable[[Tensor], object] = lambda _: None
        self.why, self.missed = "", cast("Tensor | None", None)
        self.moves, self.times = moves, times
        self._seed, self._states = seed, list[Tensor]()  # of the random numbers of the finer steps
        self._is_inside = False
        self._count = 0  # of the draws
        self._steps = 0
        self._inner: dict[int, Tensor] = {}  # by the id of the input
        # Where the step under way should lead, and how far its drift does.
        self._to = self._size = cast("Tensor | None", None)
        # The number of the draw that this step waits for, its factor, and what else it has to move.
        self._waits_for: tuple[int, float, Tensor] | None = None
        first = moves.noise_first if moves is not None and times > 1 else None
        self._next = first and first[0]

    def look(self, seen: Evaluation) -> None:
        """Give an evaluation the gradient that has come through the network alone."""
        seen.inner_gradient = self._inner.pop(seen.of, None)

    def take(self, values: Tensor, std: float | None) -> None:
        """See a draw, and make it the finer steps' where it is the step's own."""
        if self._is_inside:
            return
        number, self._count = self._count, self._count + 1
        if self.moves is not None and any(at < 0 for at, _ in self.moves.places):
            super().take(values, std)
        if self.moves is not None and number == self._next:
            with torch.no_grad():
                values.mul_(self.times**-0.5)
                if self._to is not None and values.numel() == self._to.numel():
                    factor = self.moves.sizes[0][1] / self.moves.std
                    self._to = self._to + factor * values.reshape(self._to.shape)
        if self._waits_for is None or number != self._waits_for[0]:
            return
        _, factor, rest = self._waits_for
        self._waits_for = None
        if values.numel() == rest.numel() and self._to is not None:
            with torch.no_grad():
                values.mul_(self.times**-0.5)
                self._to = self._to + factor * values.reshape(rest.shape)
                values.add_(rest.reshape(values.shape) / factor)

    def call(
        self, module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """``function(*args, **kwargs)``, energies of which the sampler gets the finer gradient.

        The buffers of ``module`` stay as that call leaves them.
        """
        given = [*args, *kwargs.values()]
        moving = [i for i, x in enumerate(given) if isinstance(x, Tensor) and x.requires_grad]
        if len(moving) != 1 or is_opaque(given[moving[0]]):
            several = "it moves several inputs of the network, or batched or sparse ones"
            self.why = several if moving else self.why
            return function(*args, **kwargs)
        x = given[moving[0]]
        self._inner.pop(id(x), None)

        def at(z: Tensor) -> Any:
            now = [*given[: moving[0]], z, *given[moving[0] + 1 :]]
            return function(*now[: len(args)], **dict(zip(kwargs, now[len(args) :], strict=True)))

        began, cotangent = self._count, list[Tensor]()
        self._compare(x.detach())
        kind = x.device.type
        modes: AbstractContextManager[Any] = nullcontext()
        if torch.amp.is_autocast_available(kind):
            own = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            modes = torch.autocast(kind, *own, cache_enabled=False)

        def gradient(z: Tensor) -> Tensor:
            with torch.enable_grad(), modes:
                z = z.to(x.dtype).requires_grad_()
                found = at(z)
                assert self.moves is not None
                back = self.moves.cotangent(found, cotangent[0])
                return torch.autograd.grad(found, z, back)[0]

        def returned(own: Tensor) -> Tensor | None:
            if torch.is_grad_enabled() or is_opaque(own):
                kind = "batches" if is_opaque(own) else "differentiates"
                self.why = f"it {kind} its gradient"
                return None
            if self.moves is None:
                self._inner[id(x)] = own.clone()
                return None
            finer = partial(self._finer, self.moves, x.detach(), own, gradient, began)
            return self._aside(module, x.device, finer)

        y = x.view_as(x)
        # Before the call, which may change its input in place.
        hook = y.register_hook(returned)
        with warnings.catch_warnings() if self.moves is None else nullcontext():
            if self.moves is None:  # torch.compile looks at y.grad, once
                warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not")
            output = at(y)
        if not isinstance(output, Tensor) or not output.requires_grad:
            hook.remove()
            return output
        output.register_hook(lambda c: cotangent.__setitem__(slice(None), [c]))  # type: ignore[no-untyped-call]
        return output

    def _finer(
        self,
        moves: Moves,
        x: Tensor,
        own: Tensor,
        gradient: Callable[[Tensor], Tensor],
        began: int,
    ) -> Tensor | None:
        """The gradient that the sampler gets for a step from x, where its own would be ``own``."""
        index, self._steps, n = self._steps, self._steps + 1, self.times
        (a, c), place = moves.sizes[min(index, len(moves.sizes) - 1)], [0, -1]
        if moves.places:
            place = moves.places[min(index, len(moves.places) - 1)]
        start = z = x.to(torch.promote_types(x.dtype, torch.float32))
        total = move = torch.zeros_like(z)
        is_first = moves.noise_first is not None
        for j in range(n):
            if j:
                z = moves.clamped(z + move) if is_first else z + move
                z = torch.add(z, torch.randn_like(z), alpha=c * n**-0.5) if moves.places else z
                z = z if is_first else moves.clamped(z)
            drift = moves.drift(z, (gradient(z) if j else own).to(z))
            self.follow(drift)
            total, move = total + drift, (a * drift - moves.decay * z) / n
        if n == 1:
            return None
        given, self._to = total / n, moves.clamped(z + move) if is_first else z + move
        self._size = (self._to - start).abs().mean()
        # What the gradient that is given does not do.
        rest = self._to - start - a * given + moves.decay * start
        if moves.noise_first is not None:
            self._next = began + place[0] if began + place[0] < moves.noise_first[1] else None
        if not moves.places or not c or is_first:
            given = given + rest / a
        elif place[0] >= 0:
            self._waits_for = began + place[0], c / moves.std, rest
        else:
            draw = self.log[began + place[0]]
            assert draw is not None
            noise = draw.values if place[1] < 0 else draw.values[place[1]]
            noise = noise.reshape(z.shape) * (c / moves.std)
            self._to = self._to + noise * n**-0.5
            given = given + (rest + noise * (n**-0.5 - 1)) / a
        return (given + moves.pull * start).to(own)

    def _compare(self, x: Tensor) -> None:
        """The next evaluation is at x."""
        if self._to is None or self._size is None or self.moves is None:
            return
        if self.missed is None and x.shape == self._to.shape:
            to = self._to if self.moves.noise_first else self.moves.clamped(self._to)
            rounding = 16 * torch.finfo(x.dtype).eps * to.abs()
            self.missed = ((x - to).abs() > _OFF * self._size + rounding).float().mean()
        self._to = self._waits_for = None

    def _aside(self, module: nn.Module, device: torch.device, call: Callable[[], T]) -> T:
        """``call()``, whose random numbers, draws and buffers nobody else notices."""
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index])
        theirs = [each.get_state() for each in generators]
        buffers = [(own._buffers, {**own._buffers}) for own in module.modules() if own._buffers]

        def leave() -> None:
            for each, state in zip(generators, theirs, strict=True):
                each.set_state(state)
            for now, before in buffers:
                now.update(before)
            self._is_inside = False

        try:
            try:
                self._is_inside = True
                for each in generators if not self._states else ():
                    each.manual_seed(self._seed)
                for each, state in zip(generators, self._states, strict=False):
                    each.set_state(state)
                for now, before in buffers:
                    copies = {name: None if x is None else x.clone() for name, x in before.items()}
                    now.update(copies)
                found = call()
                self._states = [each.get_state() for each in generators]
                return found
            finally:
                leave()
        finally:
            leave()  # an interrupt may have come inside the first
