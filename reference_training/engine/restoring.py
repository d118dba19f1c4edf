"""What a run folder holds need not be what the run wrote, even where it can be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ebmguard.errors import ConfigError, EbmguardError

# What parts of a run raise of a state that is not theirs.
_MISFITS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def restoring(run: Path) -> Iterator[None]:
    """Context in which a run takes what its folder holds: settings and the newest checkpoint.

    Raises:
        ConfigError: something is missing, or not what this run wrote.
    """
    try:
        yield
    except EbmguardError:
        raise
    except _MISFITS as error:
        what = (str(error).splitlines() or [""])[0][:200]
        raise ConfigError(
            f"{run} cannot be resumed: its config.json or its newest checkpoint is damaged "
            f"({type(error).__name__}: {what}). Restore it, remove that checkpoint to go on from "
            "the one before, or begin a run in another folder."
        ) from error
