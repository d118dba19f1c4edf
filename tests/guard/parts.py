"""Small parts that the tests of the guard are built from: energies, samplers, sinks, a detector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ebmguard import Alert, Guard, Level
from ebmguard.alerts import DEFAULT_RULES

# beta = 1/4, so that the sampler runs on 3/4 of the energy.
QUARTER: Any = {"beta_star": 0.5, "output_scale": 2.0}
X = torch.tensor([[1.0, -2.0], [0.5, 3.0], [0.0, 1.0]], dtype=torch.float64)


def is_tempered(gradient: torch.Tensor) -> bool:
    return torch.allclose(gradient, -0.75 * X, rtol=1e-12, atol=0)


def is_plain(gradient: torch.Tensor) -> bool:
    return torch.equal(gradient, -X)


class Energy(nn.Module):
    """A smooth scalar function of points in the plane."""

    def __init__(self, dim: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 1, dtype=dtype)
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def classify(self, x):
        return self.net(x)


class Bowl(nn.Module):
    """f(x) = -|x|^2 / 2, whose gradient is -x."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.height = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return -0.5 * self.height * x.flatten(1).square().sum(1)


def gradient_at(f: Any, x: Tensor) -> Tensor:
    """The sampler of most tests: what a single step would move by, without noise."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(f(x).sum(), x)
    return grad


def langevin(f: Any, x: Tensor, steps: int = 3, step_size: float = 0.1) -> Tensor:
    """JEM's sampler: edits one leaf in place through `.data`."""
    x = x.clone().requires_grad_()
    for _ in range(steps):
        (grad,) = torch.autograd.grad(f(x).sum(), x)
        x.data += step_size * grad + 0.01 * torch.randn_like(x)
    return x.detach()


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


class ScriptedDetector:
    """Raises the alerts it is told to, and keeps what it was shown."""

    def __init__(self, script: Mapping[int, Level], rule: str = "energy_blowup") -> None:
        self.script = dict(script)
        self.rule = rule
        self.seen: list[tuple[int, dict[str, float]]] = []

    active: Mapping[str, Level] = {}
    rules = DEFAULT_RULES

    def observe(
        self, step: int, row: Mapping[str, float], members: Sequence[Mapping[str, float]] = ()
    ) -> list[Alert]:
        self.seen.append((step, dict(row)))
        level = self.script.get(step)
        if level is None:
            return []
        return [Alert(self.rule, level, step, "energy_gap", 9.0, 1.0, 5, ("one", "two"))]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def script(g: Guard, levels: Mapping[int, Level], rule: str = "energy_blowup") -> ScriptedDetector:
    """Replace the guard's rules by a script."""
    detector = ScriptedDetector(levels, rule)
    g._judge = detector  # type: ignore[assignment]
    return detector


def energies(n: int = 6, m: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Leaf energies of positives and negatives."""
    pos = torch.randn(n, dtype=dtype).requires_grad_()
    neg = torch.randn(m, dtype=dtype).requires_grad_()
    return pos, neg


def slopes(loss: Tensor, *sides: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, sides)
