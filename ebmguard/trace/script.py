"""A user's script, run as ``python script.py`` runs it; or once more, with the lines of a plan."""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import io
import itertools
import json
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["Replay", "replay", "run"]


class _Seen(BaseException):
    """Enough has been seen: no error, and nothing that ``except Exception`` may catch."""


def run(
    script: Path,
    arguments: Sequence[str],
    is_enough: Callable[[Optimizer], bool],
    text: str | None = None,
) -> tuple[str, str]:
    """Run a script, or ``text`` in its place, with seeds of 0 until an optimizer's step is enough.

    Returns:
        the hash of all optimizers' parameters and of the random generators when it was enough,
        empty where the script ended before; and the error that ended it, empty where none did.
    """
    optimizers: list[Optimizer] = []
    state = error = ""

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        nonlocal state
        if not any(optimizer is each for each in optimizers):
            optimizers.append(optimizer)
        if state or is_enough(optimizer):
            state = state or _state(optimizers)
            raise _Seen

    hook = register_optimizer_step_post_hook(after_step)
    before = sys.modules["__main__"], sys.argv, list(sys.path)
    main = ModuleType("__main__")
    main.__file__ = str(script.resolve())
    try:
        sys.modules["__main__"] = main
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.resolve().parent))
        torch.manual_seed(0)
        random.seed(0)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(0)
        text = script.read_text() if text is None else text
        exec(compile(text, main.__file__, "exec", dont_inherit=True), vars(main))
    except _Seen:
        pass
    except SystemExit as left:
        error = f"SystemExit: {left}" if left.code else ""
    except Exception as failed:  # noqa: BLE001  Of the user's code: it is told, with its place.
        frames = traceback.extract_tb(failed.__traceback__)
        lines = [each.lineno for each in frames if each.filename == main.__file__]
        error = f"{type(failed).__name__}: {failed}" + (f" ({script}:{lines[-1]})" if lines else "")
    finally:
        hook.remove()
        sys.modules["__main__"], sys.argv, sys.path[:] = before
    return state, ("" if state else error)


def _state(optimizers: Sequence[Optimizer]) -> str:
    groups = [group for each in optimizers for group in each.param_groups]
    numpy, is_on_gpu = sys.modules.get("numpy"), torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    parts = [
        [p.detach().cpu().clone() for group in groups for p in group["params"]],
        [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if is_on_gpu else ())],
        [random.getstate(), numpy and numpy.random.get_state()],
    ]
    torch.save(parts, written := io.BytesIO())
    return hashlib.sha256(written.getvalue()).hexdigest()


@dataclass(frozen=True)
class Replay:
    """How a run has ended, and the number of guards, and of calls and losses that they saw."""

    state: str  # hash of parameters and random states after the given number of optimizer steps
    error: str = ""  # that ended the script before
    guards: int = 0
    sampler_calls: int = 0
    losses: int = 0


def replay(script: Path, arguments: Sequence[str], steps: int, texts: Mapping[str, str]) -> Replay:
    """Run a script for a number of optimizer steps, some of its files with another text."""
    with tempfile.TemporaryDirectory() as folder:
        task, told = Path(folder) / "task.json", Path(folder) / "told.json"
        task.write_text(json.dumps([str(script), list(arguments), steps, dict(texts), str(told)]))
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(task)], capture_output=True, text=True, check=False
        )
        if not told.exists():
            words = [f"exit status {done.returncode}", *done.stderr.strip().splitlines()]
            return Replay("", words[-1])
        return Replay(**json.loads(told.read_text()))


def _main(task: Path) -> None:
    facade: Any = importlib.import_module("ebmguard")
    script, arguments, steps, texts, told = json.loads(task.read_text())
    guards: list[Any] = []
    make, count = facade.guard, itertools.count(1)
    loader: Any = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def guard(*args: Any, **kwargs: Any) -> Any:
        guards.append(make(*args, **kwargs))
        return guards[-1]

    def get_code(self: Any, name: str) -> Any:
        path = self.get_filename(name)
        if path in texts:
            return compile(texts[path], path, "exec", dont_inherit=True)
        return original(self, name)

    facade.guard, loader.get_code = guard, get_code
    text = texts.get(str(Path(script).resolve()))
    state, error = run(Path(script), arguments, lambda _: next(count) >= steps, text)
    states = [each.state_dict() for each in guards]
    seen = {name: sum(each[name] for each in states) for name in ("sampler_calls", "losses")}
    Path(told).write_text(json.dumps(asdict(Replay(state, error, len(guards), **seen))))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
