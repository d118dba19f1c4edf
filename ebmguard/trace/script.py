"""A user's script: places in its code, running it, and running it with other lines."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.machinery
import io
import itertools
import json
import logging
import operator
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..sampling import JOINED

__all__ = [
    *("SCOPES", "Place", "Replay", "Source", "Stack"),
    *("replay", "run", "shown", "source_of", "stack"),
]
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_LOOPS = (ast.For, ast.While, ast.AsyncFor, ast.ListComp, ast.SetComp, ast.DictComp)

_ends = operator.attrgetter("lineno", "end_lineno", "col_offset", "end_col_offset")
# Neither Python's own, nor torch's, nor this package's is the user's; what is installed is.
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_OURS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")


@functools.cache
def _is_users(file: str) -> bool:
    is_library = file.startswith(_LIBRARY) and not any(part in file for part in _INSTALLED)
    return not is_library and not file.startswith(("<", *_OURS))


class Source:
    """A file as text and as a tree that knows its parents. OSError or SyntaxError if unreadable."""

    def __init__(self, file: str) -> None:
        self.file, self.text = file, Path(file).read_text()
        self.tree = ast.parse(self.text)
        self.nodes = [*ast.walk(self.tree)]  # from the outside in
        self.expressions: Mapping[Any, ast.expr] = {
            _ends(x): x for x in self.nodes[::-1] if isinstance(x, ast.expr)
        }
        self._parents = {x: above for above in self.nodes for x in ast.iter_child_nodes(above)}

    def around(self, node: ast.AST) -> list[ast.AST]:
        """Return the nodes around a node, from the inside out."""
        above = self._parents.get(node)
        return [] if above is None else [above, *self.around(above)]

    def scope(self, node: ast.AST) -> Any:
        """Return the function around a node, or the whole file."""
        return next(parent for parent in self.around(node) if isinstance(parent, SCOPES))

    def loops(self, node: ast.AST) -> list[Any]:
        """Return the loops around a node in its function, from the inside out."""
        inside = itertools.takewhile(lambda x: not isinstance(x, SCOPES), self.around(node))
        return [parent for parent in inside if isinstance(parent, _LOOPS)]

    def offset(self, line: int, column: int) -> int:
        """Return the bytes before a place: its line from 1, its column in bytes."""
        before = self.text.splitlines(keepends=True)[: line - 1]
        return len("".join(before).encode()) + column

    def segment(self, node: ast.AST) -> str:
        """Return the text of a node."""
        return ast.get_source_segment(self.text, node) or ""


source_of = functools.cache(Source)


@dataclass(frozen=True)
class Place:
    """An instruction of the user's code."""

    code: CodeType
    instruction: int

    def __hash__(self) -> int:
        return hash((id(self.code), self.instruction))  # A code object would hash all of itself.

    @property
    def _span(self) -> tuple[int | None, ...]:
        """The first and last line from 1, the columns in bytes; None where unknown."""
        return list(self.code.co_positions())[self.instruction // 2]

    @property
    def line(self) -> int:
        """The line, from 1."""
        return self._span[0] or 0

    @property
    def source(self) -> Source:
        """The source of the file."""
        return source_of(self.code.co_filename)

    @property
    def node(self) -> ast.expr | None:
        """The expression that is being evaluated there; None where it is a statement."""
        return self.source.expressions.get(self._span)

    @property
    def base(self) -> ast.Name | None:
        """The name in a call of ``name(...)`` or ``name.any.thing(...)``."""
        callee: Any = getattr(self.node, "func", None)
        while isinstance(callee, ast.Attribute):
            callee = callee.value
        return callee if isinstance(callee, ast.Name) else None

    @property
    def statement(self) -> ast.stmt:
        """The innermost statement around it."""
        line, statements = self.line, (x for x in self.source.nodes if isinstance(x, ast.stmt))
        return [x for x in statements if x.lineno <= line <= (x.end_lineno or line)][-1]

    @property
    def loops(self) -> list[Any]:
        """The loops of its function around it, from the inside out."""
        return self.source.loops(self.node or self.statement)

    @property
    def is_file(self) -> bool:
        """True where it is in no function."""
        return self.code.co_name == "<module>"

    def __str__(self) -> str:
        return f"{shown(self.code.co_filename)}:{self.line}"

    @property
    def text(self) -> str:
        """The statement on one line, cut where it is long."""
        try:
            line = ast.unparse(self.statement).splitlines()[0]
        except (OSError, SyntaxError, LookupError):
            return "?"
        return line if len(line) <= 100 else line[:97] + "..."


class Stack(NamedTuple):
    """The user's frames and their places, the innermost first."""

    frames: tuple[FrameType, ...] = ()
    places: tuple[Place, ...] = ()


def stack() -> Stack:
    """Return the user's frames that called the caller, up to that of a file."""
    frames, frame = list[FrameType](), sys._getframe(1).f_back
    while frame is not None and not (frames and frames[-1].f_code.co_name == "<module>"):
        frames += [frame] if _is_users(frame.f_code.co_filename) else []
        frame = frame.f_back
    return Stack(tuple(frames), tuple(Place(frame.f_code, frame.f_lasti) for frame in frames))


def shown(file: str) -> str:
    """Return the shorter of the path and the path from here."""
    short = os.path.relpath(file)
    return file if short.startswith(".." + os.sep + "..") else short


class _Seen(BaseException):
    """The end of a trace. It is no error, and ``except Exception`` does not catch it."""


def run(
    script: Path, arguments: Sequence[str], is_enough: Callable[[Optimizer], bool], text: str = ""
) -> tuple[str, str]:
    """Run a script, or ``text`` in its place, with seeds of 0 until an optimizer's step is enough.

    Returns the hash of parameters and random states then, and the error that ended it before: one
    of them is empty, and both are where it ended by itself.
    """
    optimizers: list[Optimizer] = []
    state = error = ""

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        nonlocal state
        if not any(optimizer is known for known in optimizers):
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
        text = text or script.read_text()
        exec(compile(text, main.__file__, "exec", dont_inherit=True), vars(main))
    except _Seen:
        pass
    except SystemExit as left:
        error = f"SystemExit: {left}" if left.code else ""
    except Exception as failed:  # noqa: BLE001  Of the user's code: it is told, with its place.
        frames = traceback.extract_tb(failed.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == main.__file__]
        error = f"{type(failed).__name__}: {failed}" + (f" ({script}:{lines[-1]})" if lines else "")
    finally:
        hook.remove()
        sys.modules["__main__"], sys.argv, sys.path[:] = before
    return state, ("" if state else error)


def _state(optimizers: Sequence[Optimizer]) -> str:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    numpy = sys.modules.get("numpy")
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    parts = [
        [p.detach().cpu().clone() for group in groups for p in group["params"]],
        [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if is_on_gpu else ())],
        [random.getstate(), numpy and numpy.random.get_state()],
    ]
    torch.save(parts, written := io.BytesIO())
    return hashlib.sha256(written.getvalue()).hexdigest()


class Replay(NamedTuple):
    """The end of a run, and the number of its guards, sampler calls and losses."""

    state: str  # hash of parameters and random states after the given number of optimizer steps
    error: str = ""  # that ended the script before
    guards: int = 0
    sampler_calls: int = 0
    losses: int = 0
    warnings: tuple[str, ...] = ()  # of the guard


def replay(
    script: Path, arguments: Sequence[str], steps: int, texts: Mapping[str, str], **options: object
) -> Replay:
    """Run a script for some optimizer steps, with other texts of files and options of guards."""
    with tempfile.TemporaryDirectory() as folder:
        task, result = Path(folder) / "task.json", Path(folder) / "result.json"
        given = [str(script), list(arguments), steps, dict(texts), options, str(result)]
        task.write_text(json.dumps(given))
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(task)], capture_output=True, text=True, check=False
        )
        if not result.exists():
            words = [f"exit status {done.returncode}", *done.stderr.strip().splitlines()]
            return Replay("", words[-1])
        return Replay(*json.loads(result.read_text()))


def _main(task: Path) -> None:
    facade: Any = importlib.import_module("ebmguard")
    script, arguments, steps, texts, options, result = json.loads(task.read_text())
    guards: list[Any] = []
    make, count = facade.guard, itertools.count(1)
    loader: Any = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def guard(*args: Any, **kwargs: Any) -> Any:
        # A proof leaves the folder of the real run alone.
        guards.append(make(*args, **{"rules": (), **kwargs, "log_dir": None, **options}))
        return guards[-1]

    warnings, handler = list[str](), logging.Handler(logging.WARNING)
    vars(handler)["emit"] = lambda record: warnings.append(record.getMessage())
    logging.getLogger("ebmguard").addHandler(handler)

    def get_code(self: Any, name: str) -> Any:
        path = self.get_filename(name)
        if path in texts:
            return compile(texts[path], path, "exec", dont_inherit=True)
        return original(self, name)

    facade.guard, loader.get_code = guard, get_code
    text = texts.get(str(Path(script).resolve()), "")
    state, error = run(Path(script), arguments, lambda _: next(count) >= steps, text)
    states = [made.state_dict() for made in guards]
    calls, losses = (sum(x[name] for x in states) for name in ("sampler_calls", "losses"))
    warned = tuple(text for text in warnings if text != JOINED)  # that is right of a base measure
    done = Replay(state, error, len(guards), calls, losses, warned)
    Path(result).write_text(json.dumps(done))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
