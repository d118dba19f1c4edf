"""Files of a data set as they were published: where they are looked for, and their checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ebmguard.errors import ConfigError


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

    def find(self, root: Path) -> Path:
        """The first of the folders that holds every file.

        Raises:
            ConfigError: there is none. It names the folders, and what is missing in each.
        """
        lacks = []
        for folder in (root / name for name in self.folders):
            missing = [name for name in self.md5 if not (folder / name).is_file()]
            if not missing:
                return folder
            lacks.append(f"{folder} lacks {', '.join(missing)}")
        raise ConfigError(
            f"{self.title} was not found under {root}:\n  " + "\n  ".join(lacks) + "\n"
            f"It is published at {self.page} : put its files there, or name the folder that holds "
            "them by --data-root or the environment variable EBMGUARD_DATA; --download fetches "
            "what is published without a form."
        )

    def read(self, path: Path) -> bytes:
        """The content of a file, which is the published one.

        Raises:
            ConfigError: it is not.
        """
        content = path.read_bytes()
        self.check(content, self.md5[path.name], path)
        return content

    def check(self, content: bytes, expected: str, path: Path) -> None:
        """Refuse what has another checksum.

        Raises:
            ConfigError: it has.
        """
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != expected:
            raise ConfigError(
                f"{path} is not the published file of {self.title}: its md5 is {found}, expected "
                f"{expected}. Delete it and fetch it again from {self.page}"
            )
