"""The folder of one run: who may write into it, and what goes where."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ebmguard.errors import ConfigError
from ebmguard.sinks import to_json

CONFIG = "config.json"
RESULTS = "results.json"
CHECKPOINT = "last.pt"
ROW_FILES = (
    "metrics.jsonl",
    "alerts.jsonl",
    "training.jsonl",
    "accuracy.jsonl",
    "members.jsonl",
)
"""Files of one JSON object a line, where a run has them; the first two are the guard's."""


class RunFolder:
    """A run folder that this process may write into.

    Make one with :meth:`create` or :meth:`resume`.

    Attributes:
        path: the folder.
        config: the settings of the run, as config.json holds them.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = dict(config)

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> RunFolder:
        """Start a run in `path`, which must be new or empty.

        Raises:
            ConfigError: the folder holds a run already, or other files, or cannot be written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            taken = sorted(entry.name for entry in path.iterdir())
        except OSError as error:
            raise ConfigError(f"{path} cannot be a run folder: {error}") from error
        if CONFIG in taken:
            raise ConfigError(
                f"{path} already holds a run; go on with it by --resume, or choose another --out"
            )
        if taken:
            raise ConfigError(
                f"{path} holds other files ({', '.join(taken[:3])}); a run needs a new or empty "
                "folder: choose another --out"
            )
        folder = cls(path, config)
        folder.write_config(config)
        for name in ("figures", "checkpoints"):
            (path / name).mkdir()
        return folder

    @classmethod
    def resume(cls, path: Path) -> RunFolder:
        """Open the run that `path` holds.

        Raises:
            ConfigError: there is no run in it.
        """
        if not (path / CONFIG).is_file():
            raise ConfigError(f"{path} holds no run to resume ({CONFIG} is missing)")
        for name in ("figures", "checkpoints"):
            (path / name).mkdir(exist_ok=True)
        return cls(path, json.loads((path / CONFIG).read_text(encoding="utf-8")))

    @property
    def figures(self) -> Path:
        """Pictures, and the samples that they show."""
        return self.path / "figures"

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint; absent until one is written."""
        return self.path / "checkpoints" / CHECKPOINT

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json."""
        self.config = dict(config)
        _replace_text(self.path / CONFIG, json.dumps(self.config, indent=2) + "\n")

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write results.json; numbers that are not finite become strings."""
        text = json.dumps(to_json(results), indent=2, allow_nan=False) + "\n"
        _replace_text(self.path / RESULTS, text)

    def append_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append lines to the row file `name`."""
        lines = [json.dumps(to_json(row), allow_nan=False) + "\n" for row in rows]
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Replace the last checkpoint; a kill in between leaves the old one."""
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(dict(state), partial)
        os.replace(partial, self.checkpoint)

    def load_checkpoint(self, device: torch.device) -> dict[str, Any] | None:
        """The last checkpoint with its tensors on `device`, or None before the first one."""
        if not self.checkpoint.is_file():
            return None
        state: dict[str, Any] = torch.load(self.checkpoint, map_location=device, weights_only=True)
        return state

    def row_sizes(self) -> dict[str, int]:
        """Bytes in each row file, for a checkpoint: what was written by then."""
        files = {name: self.path / name for name in ROW_FILES}
        return {name: file.stat().st_size for name, file in files.items() if file.is_file()}

    def cut_rows(self, sizes: Mapping[str, int]) -> None:
        """Cut the row files back to :meth:`row_sizes`: a resumed run writes the rest again."""
        for name in self.row_sizes():
            os.truncate(self.path / name, sizes.get(name, 0))


def _replace_text(file: Path, text: str) -> None:
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
