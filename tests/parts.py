"""Small parts that many tests share: energies, the closed form of the gradient, samplers, sinks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ebmguard import Alert, Guard, Level
from ebmguard.alerts import DEFAULT_RULES
from ebmguard.energies import Labels

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

PATIENCE = 3600.0
"""Seconds after which a process hangs: on a busy machine everything may take minutes."""

CLASSES, BATCH, CHAINS, SHAPE = 3, 6, 30, (2, 6, 6)

# -- energies -----------------------------------------------------------------------------------


class Energy(nn.Module):
    """A smooth function of points of any shape: ``(..., *shape) -> (...)``.

    Args:
        middle: layers between the first, of 8 units, and its tanh.
        shape: of one point.
    """

    def __init__(
        self,
        *middle: nn.Module,
        shape: tuple[int, ...] = (2,),
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims = len(shape)
        first = nn.Linear(torch.Size(shape).numel(), 8, dtype=dtype)
        self.net = nn.Sequential(first, *middle, nn.Tanh(), nn.Linear(8, 1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(x).squeeze(-1)

    def classify(self, x: Tensor) -> Tensor:
        column: Tensor = self.net(x.flatten(-self.dims))
        return column


class Bowl(nn.Module):
    """f(x) = -|x|^2 / 2, whose gradient is -x."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.height = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return -0.5 * self.height * x.flatten(1).square().sum(1)


class Bowls(nn.Module):
    """f(x) = -c |x|^2 / 2 with a curvature c of each member."""

    def __init__(self, curvatures: Tensor) -> None:
        super().__init__()
        self.curvatures = nn.Parameter(curvatures.double())

    def forward(self, x: Tensor) -> Tensor:
        return -0.5 * self.curvatures.unsqueeze(-1) * x.square().sum(-1)


class Classifier(nn.Module):
    """JEM's: class logits and, from the same ones, log p(x), or log p(x, y) as a column."""

    def __init__(self, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.layer_one = nn.Conv2d(SHAPE[0], 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6) if batch_norm else nn.Identity()
        self.rest = nn.Sequential(nn.LeakyReLU(0.2), nn.Conv2d(6, 8, 3), nn.LeakyReLU(0.2))
        self.head = nn.Linear(8 * 16, CLASSES)

    def classify(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rest(self.norm(self.layer_one(x))).flatten(1))
        return logits

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.classify(x)
        return logits.logsumexp(1) if y is None else logits.gather(1, y[:, None])


def energies(n: int = 6, m: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Leaf energies of positives and negatives."""
    pos = torch.randn(n, dtype=dtype).requires_grad_()
    neg = torch.randn(m, dtype=dtype).requires_grad_()
    return pos, neg


def slopes(loss: Tensor, *sides: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, sides)


def difference(f_pos: Tensor, f_neg: Tensor) -> Tensor:
    """The standard loss of a trainer whose f is high on data."""
    return -(f_pos.mean() - f_neg.mean())


def rising_difference(energy_pos: Tensor, energy_neg: Tensor) -> Tensor:
    """The same of energies that are low on data."""
    return energy_pos.mean() - energy_neg.mean()


def gradients(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: float,
    groups: Labels | None = None,
) -> tuple[Tensor, Tensor]:
    """dL/df of the default loss, for vectors f that are high on data, in float64.

    -(1 - w⁺_i)/N and GradScale · w_j, with w_j = exp(β* f⁻_j) / Σ_k exp(β* f⁻_k), w⁺_i = exp(β*
    f⁺_i) / (exp(β* f⁺_i) + Σ_k exp(β* f⁻_k)), and GradScale the mean of 1 - w⁺_i. With ``groups``,
    within each class by itself; N counts the positives that have a negative of their class. A third
    entry of ``groups`` multiplies β* in the class of each positive.
    """
    to_pos, to_neg = (torch.zeros(len(f), dtype=torch.float64) for f in (f_pos, f_neg))
    y_pos, y_neg, *scales = groups or (torch.zeros(len(f_pos)), torch.zeros(len(f_neg)))
    paired = int(torch.isin(y_pos, y_neg).sum())
    for y in set(y_pos.tolist()) & set(y_neg.tolist()):
        exponent = beta_star * (scales[0][y_pos == y][0].item() if scales else 1.0)
        pos, neg = (exponent * f_pos.detach().double()).exp()[y_pos == y], y_neg == y
        e = (exponent * f_neg.detach().double()).exp()[neg]
        left = e.sum() / (pos + e.sum())
        to_pos[y_pos == y] = -left / paired
        to_neg[neg] = left.sum() / paired * e / e.sum()
    return to_pos, to_neg


def save_script(module: nn.Module, file: str | Path) -> None:
    """A TorchScript file; newer versions of torch warn of the format."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        torch.jit.script(module).save(str(file))


# -- samplers -----------------------------------------------------------------------------------


def gradient_at(f: Any, x: Tensor) -> Tensor:
    """The sampler of most tests: what a single step would move by, without noise."""
    x = x.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(f(x).sum(), x)
    return grad


def langevin(
    f: Any, x: Tensor, steps: int = 3, step_size: float = 0.1, noise_std: float = 0.01
) -> Tensor:
    """JEM's sampler: edits one leaf in place through `.data`."""
    x = x.clone().requires_grad_()
    for _ in range(steps):
        (grad,) = torch.autograd.grad(f(x).sum(), [x], retain_graph=True)
        x.data += step_size * grad + noise_std * torch.randn_like(x)
    return x.detach()


def unit_langevin(f: Any, x: Tensor, steps: int = 3, step: float = 0.02) -> Tensor:
    """A new leaf for each step, for exp(f): o = 1."""
    for _ in range(steps):
        x = x.detach() + step * gradient_at(f, x) + (2 * step) ** 0.5 * torch.randn_like(x)
    return x


def climb(f: Any, x: Tensor, steps: int = 2) -> Tensor:
    """Langevin steps without noise, so that a chain is the same on any rank."""
    for _ in range(steps):
        x = x.detach() + 0.1 * gradient_at(f, x)
    return x


def uniform(n: int) -> Tensor:
    """Images."""
    return torch.rand(n, *SHAPE) * 2 - 1


def draw(chains: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Where chains start, and which rows of the replay buffer these are. A class owns a block.

    Without a buffer they start from noise.
    """
    if len(chains) == 0:
        return uniform(BATCH), None
    rows = torch.randint(len(chains) // (1 if y is None else CLASSES), (BATCH,))
    rows = rows if y is None else rows + y * (len(chains) // CLASSES)
    fresh = (torch.rand(BATCH) < 0.1).float()[:, None, None, None]
    return fresh * uniform(BATCH) + (1 - fresh) * chains[rows], rows


def get_sample_q(
    n_steps: int = 3,
    step_size: float = 1.0,
    noise_std: float = 0.01,
    temper: Callable[[Tensor], Tensor] = lambda f: f,
) -> Callable[..., Tensor]:
    """JEM's sampler, a closure: chains from a replay buffer, moved in place, and written back."""

    def sample_q(f: Any, chains: Tensor, y: Tensor | None = None, n_steps: int = n_steps) -> Tensor:
        f.eval()
        start, rows = draw(chains, y)
        x = start.requires_grad_()
        for _ in range(n_steps):
            energy = f(x) if y is None else f(x, y=y)
            (slope,) = torch.autograd.grad(temper(energy).sum(), [x], retain_graph=True)
            x.data += step_size * slope + noise_std * torch.randn_like(x)
        f.train()
        if rows is not None:
            chains[rows] = x.detach()
        return x.detach()

    return sample_q


def take(loss: Tensor, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
    """Backward pass and update."""
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


# -- what watches -------------------------------------------------------------------------------


class Memory:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.histograms: list[tuple[int, dict[str, list[float]]]] = []
        self.alerts: list[dict[str, Any]] = []
        self.recoveries: list[dict[str, Any]] = []
        self.flushed_rows: list[int] = []

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]

    def column(self, tag: str) -> list[float]:
        return [row[tag] for _, row in self.rows]

    def write_row(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]],
    ) -> None:
        self.rows.append((step, dict(scalars)))
        if histograms:
            self.histograms.append((step, {k: list(v) for k, v in histograms.items()}))

    def write_alert(self, record: Mapping[str, Any]) -> None:
        self.alerts.append(dict(record))

    def write_recovery(self, record: Mapping[str, Any]) -> None:
        self.recoveries.append(dict(record))

    def flush(self) -> None:
        self.flushed_rows.append(len(self.rows))


class Script:
    """Stands where the judge stands: fires as told, and keeps what it was shown.

    Args:
        levels: the level of the alert of each step that has one.
        counted: ``levels`` and ``active`` have the number of the judgement instead of the step. A
            judgement is a row with energies, and a rollback does not set the number back.
        active: rules that are said to be active.
        remedies: of every alert.
    """

    rules = DEFAULT_RULES
    calm = None  # every row is read at its step

    def __init__(
        self,
        levels: Mapping[int, Level],
        rule: str = "energy_blowup",
        *,
        counted: bool = False,
        active: Mapping[int, dict[str, Level]] | None = None,
        remedies: Sequence[str] = ("one", "two"),
    ) -> None:
        self.remedies = tuple(remedies)
        self.levels, self.rule, self.counted = dict(levels), rule, counted
        self.script = dict(active or {})
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.count = 0
        self.active: dict[str, Level] = {}
        self.level = Level.INFO

    def watches(self, g: Guard) -> Script:
        """From now on it is the judge of this guard."""
        g._loop.judge = self  # type: ignore[assignment]
        return self

    def observe(
        self, step: int, row: Mapping[str, float], members: Sequence[Mapping[str, float]] = ()
    ) -> list[Alert]:
        self.seen.append((step, dict(row)))
        if self.counted and "energy_gap" not in row:
            return []
        at = self.count if self.counted else step
        self.count += 1
        self.active = self.script.get(at, {})
        self.level = self.levels.get(at, Level.INFO)
        if at not in self.levels:
            return []
        return [Alert(self.rule, self.level, step, "energy_gap", 9.0, 1.0, 5, self.remedies)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def after_rollback(self) -> None:
        pass


@contextmanager
def doubles() -> Iterator[None]:
    """Inside the block new tensors have double precision."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
