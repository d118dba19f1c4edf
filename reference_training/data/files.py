"""Files of a data set as they were published, where they are looked for, and what is read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ebmguard.errors import ConfigError

NAMED = 5


class Pixels(Protocol):
    """Images as an array has them, or a reader that decodes those that are asked for."""

    def __len__(self) -> int:
        """Number of images."""

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.uint8]:
        """The images of some rows, (N,) -> (N, C, H, W)."""


Images = Mapping[str, tuple[Pixels, NDArray[np.int64]]]
"""The parts "train", "test" and, where one is published, "valid" of a data set, in their published
order: images (N, C, H, W) uint8, and their labels (N,) from 0."""


@dataclass(frozen=True)
class PublishedFiles:
    """The files of one data set.

    Attributes:
        title: of the data set.
        page: address where it is published.
        folders: below the root, in the order in which they are tried.
        md5: checksum of every file, by its name in the folder.
        archive: address of a .tar.gz whose members they are, and its checksum; None: they are
            published one by one, beside the page.
    """

    title: str
    page: str
    folders: tuple[str, ...]
    md5: Mapping[str, str]
    archive: tuple[str, str] | None = None

    def contents(self, root: Path) -> dict[str, bytes]:
        """What the files hold, by name, from the first of the folders that has all of them.

        Raises:
            ConfigError: there is no such folder, or a file is not the published one.
        """
        folder = find_folder(
            root,
            self.folders,
            [*self.md5],
            f"{self.title} was",
            f"It is published at {self.page} : put its files there, or name the folder that holds "
            "them by --data-root or the environment variable EBMGUARD_DATA; --download fetches "
            "what is published without a form.",
        )
        found = {name: (folder / name).read_bytes() for name in self.md5}
        for name, expected in self.md5.items():
            if (md5 := md5_of(found[name])) != expected:
                raise ConfigError(
                    f"{folder / name} is not the published file of {self.title}: its md5 is {md5}, "
                    f"expected {expected}. Delete it and fetch it again from {self.page}"
                )
        return found


def md5_of(content: bytes) -> str:
    """The checksum of a file's content."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def find_folder(
    root: Path, folders: Sequence[str], names: Sequence[str], what: str, cure: str
) -> Path:
    """The first of some folders below the root that holds files of all these names.

    Raises:
        ConfigError: there is none. It names the folders, and what is missing in each.
    """
    lacks = []
    for folder in (root / name for name in folders):
        found = set(os.listdir(folder)) if folder.is_dir() else set()
        missing = [name for name in names if name not in found]
        if not missing:
            return folder
        more = f", ... ({len(missing):,} files)" if len(missing) > NAMED else ""
        lacks.append(f"{folder} lacks {', '.join(missing[:NAMED])}{more}")
    raise ConfigError("\n  ".join([f"{what} not found under {root}:", *lacks]) + f"\n{cure}")
