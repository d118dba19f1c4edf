"""What the ranks of a run tell each other where they begin, resume or roll back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["Ranks"]


@dataclass(frozen=True)
class Ranks:
    """The processes that train together; a single one has no process group.

    Attributes:
        group: they.
    """

    group: dist.ProcessGroup | None = None

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks and writes for all."""
        return self.group is None or dist.get_rank(self.group) == 0

    def own(self, folder: Path) -> Path:
        """This rank's part of a folder; of a single process all of it."""
        return folder if self.group is None else folder / f"rank{dist.get_rank(self.group)}"

    def from_all(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank: a plain value, and not at every step."""
        values = [value] * self.count
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values
