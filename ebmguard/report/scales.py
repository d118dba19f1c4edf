"""Scales of charts: values to heights, and the marks of an axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .charts import Scale

__all__ = ["Axis", "number"]

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # of the axis, times a power of ten
# Beyond these a lost run would flatten everything that came before.
_TALLEST = 1e6
_DECADES = 6


def number(value: float) -> str:
    """A value in few characters."""
    if not math.isfinite(value):
        return str(value)
    digits = 4 if 1e-3 <= abs(value) < 9999.5 else 3
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


@dataclass(frozen=True)
class Axis:
    """An axis from its lowest value to its highest.

    Attributes:
        scale: see :class:`~.charts.Chart`.
        low, high: its ends; values outside are drawn at the end.
    """

    scale: Scale
    low: float
    high: float

    @classmethod
    def around(cls, scale: Scale, values: Sequence[float]) -> Axis:
        """The axis on which finite values fit, cut where a few would flatten the rest."""
        if scale == "share":
            return cls(scale, 0.0, 1.0)
        if scale == "log":
            values = [value for value in values if value > 0] or [1.0]
            high = max(values)
            return cls(scale, max(min(values), high / 10 ** (2 * _DECADES)) / 1.3, high * 1.3)
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if scale == "symlog":
            low, high = (min(_TALLEST, max(-_TALLEST, end)) for end in (low, high))
        middle = max(abs(low), abs(high)) or 1.0
        # A constant is drawn in the middle.
        pad = 0.05 * (high - low) if high - low > 1e-9 * middle else 0.5 * middle
        if scale == "symlog" and high - low > 4:
            down, up = _symlog(low), _symlog(high)
            pad = 0.05 * (up - down)
            return cls(scale, _symexp(down - pad), _symexp(up + pad))
        return cls(scale, low - pad, high + pad)

    def at(self, value: float) -> float:
        """Where a finite value lies: 0 at the lower end, 1 at the upper."""
        if self.scale == "log" and value <= 0:
            return 0.0
        low, x, high = map(self._transform, (self.low, value, self.high))
        return min(1.0, max(0.0, (x - low) / (high - low)))

    def ticks(self) -> list[float]:
        """Some five round values inside."""
        if self.scale == "log":
            ticks = _powers(self.low, self.high)
            return ticks if len(ticks) > 1 else _round_values(self.low, self.high)
        if self.scale == "symlog" and max(-self.low, self.high) > 4:
            inside = [0.0, *_powers(1.0, self.high), *(-x for x in _powers(1.0, -self.low))]
            inside += [5 * x for x in inside if x] if len(inside) < 5 else []
            ticks = sorted(tick for tick in inside if self.low <= tick <= self.high)
            return ticks if len(ticks) > 1 else _round_values(self.low, self.high)
        return _round_values(self.low, self.high)

    @property
    def _transform(self) -> Callable[[float], float]:
        return {"log": math.log10, "symlog": _symlog}.get(self.scale, float)


def _symlog(x: float) -> float:
    return x if abs(x) <= 1 else math.copysign(1 + math.log10(abs(x)), x)


def _symexp(y: float) -> float:
    return y if abs(y) <= 1 else math.copysign(10.0 ** (abs(y) - 1), y)


def _powers(low: float, high: float) -> list[float]:
    """Some five powers of ten inside."""
    if high < low:
        return []
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last < first:
        return []
    return [10.0**e for e in range(first, last + 1, 1 + (last - first) // 4)]


def _round_values(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(s for s in _STEPS if s * unit >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]
