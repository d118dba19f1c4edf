"""Small training runs that many tests share, and the record of all that a run leaves behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebmguard import Guard, guard
from ebmguard.energies import Labels
from tests.parts import (
    BATCH,
    CHAINS,
    CLASSES,
    Classifier,
    Energy,
    Memory,
    difference,
    get_sample_q,
    uniform,
)


def frozen(tree: Any) -> Any:
    """A copy of plain values, in which a number is its bits: ``==`` compares them all."""
    if isinstance(tree, Tensor):
        bits = tree.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return str(tree.dtype), tuple(tree.shape), bits.numpy().tobytes()
    if isinstance(tree, torch.Generator):
        return frozen(tree.get_state())
    if hasattr(tree, "state_dict"):
        return frozen(tree.state_dict())
    if isinstance(tree, Mapping):
        return {key: frozen(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [frozen(value) for value in tree]
    return tree.hex() if isinstance(tree, float) else tree


def randomness() -> dict[str, Any]:
    """The states of the three global random generators."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numpy = [name, np.asarray(keys).tolist(), *rest]
    states: dict[str, Any] = frozen(
        {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy}
    )
    return states


@dataclass
class Call:
    """The energies of one loss, whose gradients are kept, and the samples behind them.

    With their classes, and the weights of its pairs.
    """

    f_pos: Tensor
    f_neg: Tensor
    x_neg: Tensor
    groups: Labels | None = None
    weight: Tensor | float = 1.0

    def __post_init__(self) -> None:
        self.f_pos.retain_grad()
        self.f_neg.retain_grad()

    @property
    def to_pos(self) -> Tensor:
        """The gradient that has arrived at the positives' energies, in float64."""
        assert self.f_pos.grad is not None
        return self.f_pos.grad.double()

    @property
    def to_neg(self) -> Tensor:
        """The same of the negatives'."""
        assert self.f_neg.grad is not None
        return self.f_neg.grad.double()


@dataclass
class Run:
    """A trainer's parts, and all that its training leaves behind.

    Args:
        chains: the replay buffer, a tensor or anything with a ``state_dict``.
        extra: further parts with a state, such as a scheduler or a generator.

    Attributes:
        calls: the losses, and whatever ``others`` the trainer prints, draws or counts.
        guards: those that :meth:`guard` made, and in ``memories`` what each has written.
    """

    model: Any
    optimizer: Any = None
    chains: Any = None
    loss_fn: Any = difference
    sampler: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    final: Any = None

    def guard(
        self, loss_fn: Any, sampler: Any, *, sinks: Sequence[Any] = (), **options: Any
    ) -> Any:
        """A guard; pass ``attach={...}`` for its :meth:`~ebmguard.Guard.attach`."""
        attach = options.pop("attach", None)
        self.memories.append(Memory())
        g = guard(loss_fn, sampler, sinks=[self.memories[-1], *sinks], **options)
        if attach is not None:
            g.attach(**attach)
        self.guards.append(g)
        return g

    def step(self, x_pos: Tensor, *args: Any) -> None:
        """One training step on these positives; the sampler gets the model and ``args``."""
        x_neg = self.sampler(self.model, *args)
        f_pos, f_neg = self.model(x_pos), self.model(x_neg)
        self.calls.append(Call(f_pos, f_neg, x_neg))
        loss = self.loss_fn(f_pos, f_neg)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Everything as it is now, by name: a copy that ``==`` compares bit by bit."""
        parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "chains": self.chains,
            "calls": [(call.f_pos, call.f_neg, call.x_neg) for call in self.calls],
            "others": self.others,
        }
        return {**frozen(parts | self.extra), **randomness()}

    def end(self) -> Run:
        """The run itself, with its last state kept as ``final`` and all rows written."""
        self.final = self.state()
        for g in self.guards:
            g.close()
        return self

    def equals(self, other: Run) -> bool:
        """Whether everything agrees bit by bit, the random numbers that come next included."""
        return bool(self.final == other.final)


@dataclass(frozen=True)
class Trial:
    """How a codebase's loop is tried: with its own loss and sampler, or with guarded ones.

    Args:
        beta_star: None leaves the guard out.
        n: iterations.
        scale: multiplies the energy inside the codebase's own sampler, as the guard should.
        attach: the guard is told the optimizer and the rest.
    """

    beta_star: Any = None
    n: int = 20
    scale: float = 1.0
    attach: bool = False

    def temper(self, energies: Tensor) -> Tensor:
        """What the codebase's own sampler runs on."""
        return self.scale * energies

    def around(
        self,
        run: Run,
        loss_fn: Any,
        sampler: Any,
        settings: Mapping[str, Any],
        known: Mapping[str, Any] | None = None,
        given: Any = None,
    ) -> Any:
        """The loss and the sampler that the loop should use.

        Args:
            settings: keywords of the guard.
            known: those of its ``attach``, beside the optimizer.
            given: the loss that the guard gets.
        """
        if self.beta_star is None:
            return loss_fn, sampler
        attach = {"optimizer": run.optimizer, **(known or {})} if self.attach else None
        return run.guard(given, sampler, beta_star=self.beta_star, attach=attach, **settings)


def begin(network: Callable[[], nn.Module] = Classifier) -> Run:
    """A network, Adam and chains, the same each time."""
    torch.manual_seed(1)
    f = network()
    return Run(
        f, torch.optim.Adam(f.parameters(), lr=1e-3), uniform(CHAINS), sampler=get_sample_q()
    )


class Training:
    """A guarded trainer of points in the plane, without a sampler where none is given.

    Args:
        f: the network.
        make: the optimizer, of its parameters.
        options: of the guard.
    """

    def __init__(self, sampler: Any = None, *, f: Any = None, make: Any = None, **options: Any):
        torch.manual_seed(0)
        self.f = Energy() if f is None else f
        parameters = [*self.f.parameters()]
        self.optimizer = make(parameters) if make else torch.optim.SGD(parameters, lr=0.01)
        told: Any = {"model": self.f, "optimizer": self.optimizer, "beta_star": 0.5}
        self.g = guard(None, sampler, **(told | options))

    def loss(self) -> Tensor:
        """Of one batch, from the sampler on."""
        x = torch.randn(8, 2)
        if self.g.sampler is not None:
            x = self.g.sampler(self.f, x)
        loss: Tensor = self.g.loss_fn(self.f(torch.randn(8, 2) + 1), self.f(x))
        return loss

    def go(self, steps: int = 1, before_update: Callable[[], object] = lambda: None) -> None:
        """Take steps."""
        for _ in range(steps):
            loss = self.loss()
            self.optimizer.zero_grad()
            loss.backward()
            before_update()
            self.optimizer.step()


def data() -> tuple[Tensor, Tensor]:
    return uniform(40), torch.arange(40) % CLASSES


def batches(n: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Images, and others with their labels, of two streams."""
    images, labels = data()
    for _ in range(n):
        x, rows = images[torch.randint(40, (BATCH,))], torch.randint(40, (BATCH,))
        yield x, images[rows], labels[rows]


def cross_entropy(f: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f.classify(x), y)


def train(
    run: Run,
    n: int = 20,
    *,
    weight: float = 1.0,
    by_class: bool = False,
    joint_weight: float = 0.0,
    joint: Any = None,
    scored_by_class: bool = True,
    grouped: bool = False,
    supervised: Callable[[Any, Tensor, Tensor], Any] = cross_entropy,
    reweight: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda p, n: (p, n),
    negate: bool = False,
    after: Callable[[int], object] = lambda step: None,
) -> Run:
    """JEM's loop: p(x) and p(x, y) terms and a classifier.

    Args:
        weight: of the first term, and ``joint_weight`` of the second.
        by_class: chains of the first term are conditional on random classes.
        joint: loss and sampler of the second term; None is those of the first.
        scored_by_class: its chains are conditional on the classes; so are its energies.
        grouped: its loss is told the classes.
        supervised: the other losses, from the network, images and labels.
        reweight: what the first term's energies pass through.
        negate: the losses get -f, as in trainers of the energy convention.
        after: called at the end of every iteration.
    """
    joint_loss, joint_sample = joint or (run.loss_fn, run.sampler)
    f, sign = run.model, -1 if negate else 1
    for step, (x, x_lab, y_lab) in enumerate(batches(n)):
        y_q = torch.randint(CLASSES, (BATCH,)) if by_class else None
        x_q = run.sampler(f, run.chains, y=y_q)
        fp_all, fq_all = f(x), f(x_q)
        run.calls.append(Call(fp_all, fq_all, x_q))
        reweighted = reweight(sign * fp_all, sign * fq_all)
        total = supervised(f, x_lab, y_lab) + weight * run.loss_fn(*reweighted)
        if joint_weight > 0:
            x_q = joint_sample(f, run.chains, y=y_lab)
            given = (y_lab,) if scored_by_class else ()
            fp, fq = f(x_lab, *given), f(x_q, *given)
            assert fp.shape == ((BATCH, 1) if given else (BATCH,))
            groups: Any = {"groups": (y_lab, y_lab)} if grouped else {}
            run.calls.append(Call(fp, fq, x_q, **groups))
            total = total + joint_weight * joint_loss(sign * fp, sign * fq, **groups)
        run.others.append(total.item())
        run.optimizer.zero_grad()
        total.backward()
        run.optimizer.step()
        after(step)
    return run.end()
