"""The grids of each trainer."""

from __future__ import annotations

from dataclasses import dataclass

from ..bism.config import METHODS, BismConfig
from ..jem.config import JemConfig
from ..shortrun.config import ShortRunConfig
from ..toy.config import ToyConfig
from .grid import Grid


@dataclass(frozen=True, kw_only=True)
class BismGrid(Grid):
    """Train a grid of latent-variable models, or go on with one: methods × seeds, one core each.

    OUT/table.md, with the methods side by side, is written anew after each run.
    """

    methods: tuple[str, ...] = METHODS
    """Ways to train; see ebmguard train bism --help."""

    trainer = BismConfig

    def page(self) -> str | None:
        """The methods' table."""
        from ..bism.table import page

        return page(self.out)


@dataclass(frozen=True, kw_only=True)
class JemGrid(Grid):
    """Train a grid of JEM runs, or go on with one: scenarios × β* × seeds, one GPU or core each.

    OUT/table.md, what `ebmguard table jem` prints, is written anew after each run.
    """

    scenarios: tuple[str, ...]
    """Scenarios of the paper's Appendix M.1 by number, or "digits"."""
    beta_stars: tuple[float, ...]
    """Exponents of the guard's weights; 0 is the standard trainer."""

    trainer = JemConfig

    def page(self) -> str | None:
        """The tables of the grid's runs."""
        from ..jem.runs import find_runs
        from ..studies.jem_tables import page

        return page(find_runs([self.out]))


@dataclass(frozen=True, kw_only=True)
class ShortRunGrid(Grid):
    """Train short-run models, or go on with them: data × β* × seeds, one GPU or core each."""

    data: tuple[str, ...] = ("digits",)
    """Data sets."""
    beta_stars: tuple[float, ...]
    """Exponents of the guard's weights on raw outputs; 0 is the standard trainer."""

    trainer = ShortRunConfig


@dataclass(frozen=True, kw_only=True)
class ToyGrid(Grid):
    """Train a grid of toy ensembles, or go on with one: scenarios × seeds, one GPU or core each.

    β, variants and the number of seeds are an ensemble's own: give them after `--`.
    """

    scenarios: tuple[str, ...]
    """Scenarios by name; see ebmguard train toy --help."""

    trainer = ToyConfig
