"""`ebmguard table jem`: read runs, print the page, write it where that was asked for."""

from __future__ import annotations

from ebmguard.errors import ConfigError

from ..runs import find_runs
from .config import TableConfig
from .tables import page


def run(config: TableConfig) -> int:
    """`ebmguard table jem`.

    Returns:
        Exit status 0.

    Raises:
        ConfigError: no folders are given, one holds no JEM run, or the file cannot be written.
    """
    if not config.runs:
        raise ConfigError("name run folders of `ebmguard train jem`, or a folder that holds some")
    text = page(find_runs(config.runs))
    print(text, end="")
    if config.out is not None:
        try:
            config.out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{config.out} cannot be written: {error}") from error
    return 0
