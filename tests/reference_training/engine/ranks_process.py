"""One rank of three: what the ranks of a run settle between them; written to a file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.checkpoints import Checkpoints
from ebmguard.reference_training.engine.ranks import Ranks
from tests.ranks import be_rank
from tests.reference_training.engine.ring import RingConfig


def talk(ranks: Ranks) -> dict[str, Any]:
    own = torch.arange(6.0).view(3, 2)[: ranks.rank] + 10 * ranks.rank  # none, one, two rows
    return {
        "who": [ranks.rank, ranks.world, ranks.is_first],
        "average": ranks.averages([torch.tensor([float(ranks.rank), float("inf")])])[0],
        "joined": ranks.joined(own),
        "all": ranks.from_all({"rank": ranks.rank}),
        "first": ranks.from_first({"rank": ranks.rank}),
    }


def opened(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Settings are settled by the first rank, errors are everybody's."""
    found: dict[str, Any] = {}

    def attempt(name: str, config: RingConfig) -> None:
        try:
            settled, run_folder = config.open(ranks)
        except ConfigError as error:
            found[name] = str(error)
        else:
            found[name] = settled.to_json()
            found[f"{name} writes"] = run_folder.writes

    # The first rank decides: what the others were told is not looked at.
    attempt("new", RingConfig(out=folder / "run", seed=10 + ranks.rank))
    attempt("again", RingConfig(out=folder / "run"))
    attempt("wrong", RingConfig(out=folder / "wrong", device="abacus"))
    attempt("resumed", RingConfig(out=folder / "run", resume=True))
    return found


def checkpoints(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Three are saved; then the newest one, and then all, are damaged on one rank."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ebmguard.train").addHandler(handler)
    if ranks.is_first:
        folder.mkdir()
    ranks.wait()
    own, cpu = Checkpoints(folder, ranks), torch.device("cpu")
    for step in (4, 8, 12, 16):
        own.save(step, {"x": torch.tensor([step + ranks.rank / 10])})
    ranks.wait()
    found: dict[str, Any] = {"names": sorted(path.name for path in folder.iterdir())}

    def loaded() -> float:
        state = own.load(cpu)
        assert state is not None
        return float(state["x"])

    found["newest"] = loaded()
    ranks.wait()
    if ranks.rank == 1:
        own.file(16).write_bytes(b"torn")
    ranks.wait()
    found["back"] = loaded()
    found["warnings"] = list(warnings)
    ranks.wait()
    if ranks.rank == 2:
        own.file(12).write_bytes(b"torn")
    ranks.wait()
    try:
        loaded()
    except ConfigError as error:
        found["lost"] = str(error)
    return found


if __name__ == "__main__":
    be_rank(
        lambda ranks, folder: {
            **talk(ranks),
            "opened": opened(ranks, folder),
            "checkpoints": checkpoints(ranks, folder / "checkpoints"),
        }
    )
