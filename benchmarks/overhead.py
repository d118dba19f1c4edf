"""What the guard costs: a guarded over an unguarded JEM step, in alternating blocks of CPU time.

    python -m benchmarks.overhead                        # make bench-overhead
    python -m benchmarks.overhead --against ../before    # another checkout in the same run

Each checkout has processes of its own, which run a block of steps when they are told to. The blocks
alternate there and back (plain, guarded, and with ``--against`` those of the other checkout), and
begin with the same random numbers. A ratio is the median of those within rounds, which a slow phase
of the machine hits on both sides. Everything is attached, with TensorBoard events and JSON lines,
flushes included. On a GPU a block lies between two synchronisations, and its wall time counts.

What a reader of the step has to follow is counted, too: the lines that ``from ebmguard import
guard`` loads, the calls of the package's functions that the guard adds to a step, and how many of
them come from another of its files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).parents[1]
GPU_BLOCK = 50
PROCESSES = 4
"""Of a checkout, one after the other: where the memory of one lies costs or saves some per cent."""
NAMES = ("mlp", "default", "digits", "cifar")
Kind = tuple[str, str]
WARM_UP = 3
"""Steps of each kind at least: caches, allocators, the sampler calls that the guard measures."""


def serve(root: Path, name: str, device_name: str) -> None:
    """Run blocks of a case with the package of a checkout, as told by lines of standard input."""
    rooms = {"ebmguard": "ebmguard", "ebmguard.reference_training": "reference_training"}
    for module, folder in rooms.items():  # whichever is installed
        spec = spec_from_file_location(module, root / folder / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])

    import_module("ebmguard.retrofit")
    found = [getattr(x, "__file__", None) or "" for x in sys.modules.values()]
    files = [Path(x) for x in found if x.startswith(str(root / "ebmguard"))]
    lines = sum(len(file.read_text().splitlines()) for file in files)

    import torch

    from .jem_step import CASES, Trainer
    from .timing import Turn, peak_mib, prove_no_wait, seconds_of

    torch.set_num_threads(1)
    device = torch.device(device_name)
    trainer = Trainer(CASES[name], device)
    kinds: dict[str, Any] = {"plain": (*trainer.plain, trainer.optimizer)}
    with tempfile.TemporaryDirectory() as folder:
        guard = None
        for line in sys.stdin:
            kind, steps, seed, is_counted = json.loads(line)
            if kind == "guarded" and guard is None:
                # The unguarded steps in between must not reach the hooks of its optimizer.
                own = trainer.adam(lr=1e-12)
                guard = trainer.guard(folder, own)
                kinds[kind] = (*guard, own)
            trainer.rng.manual_seed(seed)
            turn, calls = Turn(partial(trainer.step, *kinds[kind]), steps), [0, 0]
            with counting(root / "ebmguard", calls) if is_counted else nullcontext():
                took = seconds_of(turn, device)._asdict()
            counts = {"lines": lines, "calls": [x / steps for x in calls]}
            print(json.dumps(took | counts | {"peak": peak_mib(device)}), flush=True)
        if guard is not None:
            prove_no_wait(partial(trainer.step, *kinds["guarded"]), GPU_BLOCK, device)
            if guard.alerts:
                print(f"alerts: {[alert.message for alert in guard.alerts]}", file=sys.stderr)
            guard.close()


@contextmanager
def counting(package: Path, calls: list[int]) -> Iterator[None]:
    """Count the calls of a package's functions, and those among them from another of its files."""

    def look(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(package)):
            before = "" if frame.f_back is None else frame.f_back.f_code.co_filename
            calls[0] += 1
            calls[1] += before != file and before.startswith(str(package))

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def worker(root: Path, name: str, given: argparse.Namespace) -> Iterator[Callable[..., Any]]:
    """A process with the package of one checkout; called, it runs a block of steps of a kind.

    Which returns seconds of wall and CPU time of a step, the peak of memory in MiB, lines that were
    loaded, and the calls of a step, if they are counted.
    """
    words = ["-m", "benchmarks.overhead", "--serve", str(root), "--only", name]
    words += ["--device", given.device]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, *words], stdin=pipe, stdout=pipe, text=True, cwd=HERE
    ) as process:
        asked, told = process.stdin, process.stdout
        assert asked is not None
        assert told is not None

        def run(kind: str, steps: int, seed: int = 0, *, is_counted: bool = False) -> Any:
            print(json.dumps([kind, steps, seed, is_counted]), file=asked, flush=True)
            return json.loads(told.readline())

        yield run
        asked.close()


def compare(
    roots: dict[str, Path], name: str, steps: int, given: argparse.Namespace
) -> tuple[dict[Kind, list[float]], dict[Kind, list[float]], dict[Kind, list[float]]]:
    """By checkout and kind, over rounds: ms of a step, and MiB that the process has held so far.

    And the lines loaded, with the calls of a step, all of them and those from another file.

    Blocks alternate there and back; the time of the first ones is not counted. It is CPU time, on a
    GPU wall time.
    """
    clock = "cpu" if given.device == "cpu" else "wall"
    kinds = [(x, kind) for x in roots for kind in ("plain", "guarded")]
    ms, peak, counts = ({kind: list[float]() for kind in kinds} for _ in range(3))
    for generation in range(min(PROCESSES, given.rounds)):
        with ExitStack() as stack:
            of = {x: stack.enter_context(worker(at, name, given)) for x, at in roots.items()}
            for x, kind in kinds:
                peak[x, kind].append(of[x](kind, max(WARM_UP, steps))["peak"])
            for seed in range(generation, given.rounds, PROCESSES):
                for x, kind in kinds[:: (-1) ** (seed // PROCESSES)]:
                    took = of[x](kind, steps, seed)
                    ms[x, kind].append(1e3 * took[clock])
                    peak[x, kind].append(took["peak"])
            for x, kind in kinds:
                took = of[x](kind, steps, is_counted=True)
                counts[x, kind] = [took["lines"], *took["calls"]]
    return ms, peak, counts


def report(roots: dict[str, Path], names: Sequence[str], given: argparse.Namespace) -> None:
    """Print a table of each step."""
    from .grid import table_of
    from .jem_step import CASES
    from .timing import spread

    def ratio(a: list[float], b: list[float]) -> str:
        return spread([x / y for x, y in zip(a, b, strict=True)], ".4f")

    print(f"{given.device}, one thread, {given.rounds} rounds")
    for name in names:
        case, lines = CASES[name], []
        steps = given.steps or (case.block if given.device == "cpu" else GPU_BLOCK)
        ms, peak, counts = compare(roots, name, steps, given)
        for x in roots:
            plain, guarded = ms[x, "plain"], ms[x, "guarded"]
            added = statistics.median(a - b for a, b in zip(guarded, plain, strict=True))
            held, most = min(peak[x, "plain"]), max(peak[x, "guarded"])
            line = {"package": x, "unguarded, ms": f"{statistics.median(plain):.2f}"}
            line |= {"ratio: median (quartiles)": ratio(guarded, plain)}
            line |= {"added, ms": f"{added:.2f}", "goal": case.goal}
            line |= {"MiB": f"{held:.0f} + {most - held:.0f}"}
            loaded, *made = counts[x, "guarded"]
            line["lines loaded"] = f"{loaded:,}"
            both = zip(("calls added", "across files"), made, counts[x, "plain"][1:], strict=True)
            lines.append(line | {name: f"{more - less:.0f}" for name, more, less in both})
        print(f"\n{case.title}\n\n{table_of(lines)}", flush=True)
        if len(roots) > 1:
            own = (ratio(*(ms[x, kind] for x in roots)) for kind in ("plain", "guarded"))
            print("\nbefore / now: plain {}, guarded {}".format(*own), flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu, or a GPU such as cuda")
    parser.add_argument("--only", choices=NAMES, help="one of the steps")
    parser.add_argument("--against", type=Path, help="another checkout, measured in between")
    parser.add_argument("--rounds", type=int, default=20, help="how often the blocks alternate")
    parser.add_argument("--steps", type=int, help="of a block, other than the case's own")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.serve:
        serve(given.serve, given.only, given.device)
        return
    before = {"before": given.against.resolve()} if given.against else {}
    report(before | {"now": HERE}, [given.only] if given.only else NAMES, given)


if __name__ == "__main__":
    main()
