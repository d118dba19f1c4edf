"""A trainer's steps on a GPU beside an eager loop of the published structure: time, memory, waits.

    python -m benchmarks.gpu_steps jem --minutes 8          # or shortrun
    python -m benchmarks.gpu_steps jem --device cpu --small # to try it; its numbers say nothing

Without EBMGUARD_DATA random bytes stand in for CIFAR-10.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters

from ebmguard.reference_training.data import ROOT_VARIABLE, ImageData
from ebmguard.reference_training.device import find_device, set_precision
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.train import Jem
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.reference_training.shortrun.train import ShortRun

from .grid import table_of
from .loops import JemLoop, ShortRunLoop, step_flop
from .timing import Iterations, Turn, alternate, prove_no_wait, ratios, spread, synchronize

OURS, LOOP = "ours, bfloat16, compiled", "loop, TF32"
# The most important first: what finds no time is left out.
VARIANTS: Mapping[str, Mapping[str, str]] = {
    OURS: {"precision": "bfloat16", "compile": "yes"},
    LOOP: {"precision": "tf32"},
    "loop, float32": {"precision": "float32"},
    "ours, TF32, compiled": {"precision": "tf32", "compile": "yes"},
    "ours, bfloat16": {"precision": "bfloat16"},
    "ours, TF32": {"precision": "tf32"},
    "ours, float32": {"precision": "float32"},
}
WARM_UP, BLOCK, WATCHED, NEVER = 3, 5, 100, 10**6
LONGEST_WARM_UP = 0.6
"""Share of the time after which no further variant is prepared."""


class Case(NamedTuple):
    """A trainer: its settings, its task, its loop; of no evaluations; and as small as can be."""

    config: type[Any]
    task: Any
    loop: type[JemLoop | ShortRunLoop]
    aim: int
    quiet: Mapping[str, Any]
    small: Mapping[str, Any]


FEW = {"data": "digits", "sgld_steps": 2, "train_images": 64, "test_images": 32}
NO_ALERTS = {"quality_samples": 0, "alert_context": 0, "alert_window": 0}
CASES = {
    "jem": Case(
        *(JemConfig, Jem, JemLoop, 3),
        # Step 0 is evaluated all the same: on less than a batch.
        {"scenario": "1", "eval_every": NEVER, "valid_images": 32, "test_images": 32, **NO_ALERTS},
        {"depth": 10, "width": 1, "n_pos": 8, "n_neg": 8, "n_labelled": 8, "buffer_size": 64},
    ),
    "shortrun": Case(
        *(ShortRunConfig, ShortRun, ShortRunLoop, 4),
        {"sample_every": NEVER},
        {"nf": 4, "activation": "leaky_relu", "batch": 8},
    ),
}


def random_images(_: object) -> ImageData:
    """As many as CIFAR-10 has to train on."""
    rng, parts = torch.Generator().manual_seed(0), list[torch.Tensor]()
    for count in (45_000, 64, 64):
        size = (count, 3, 32, 32)
        parts.append(torch.randint(256, size, generator=rng, dtype=torch.uint8))
        parts.append(torch.randint(10, (count,), generator=rng))
    return ImageData("random", *parts, classes=10, levels=255, pad=4, flip=True)


def config_of(
    case: Case, variant: str, out: Path, device: str, *, small: bool = False, **more: Any
) -> Any:
    """Settings of a run."""
    own: dict[str, Any] = {"data": "cifar10", **case.quiet, **VARIANTS[variant]}
    make = case.config
    if small:
        own |= {**FEW, **case.small, "compile": "no"}
    elif not os.environ.get(ROOT_VARIABLE):
        make = type(f"Random{make.__name__}", (make,), {"load_data": random_images})
    return make(out=out, device=device, **{**own, **more})


def measured(case: Case, device: torch.device, seconds: float, *, small: bool) -> Iterator[str]:
    """What is found, line by line."""
    began, cuda = time.monotonic(), device.type == "cuda"
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = config_of(case, OURS, scratch, str(device), small=small)
        data = config.load_data()
        flop = step_flop(case.loop, config.settings, data.sample_shape, data.classes)
        yield (
            f"{config.settings}\n\non {data.name} images; {flop / 1e12:.3g} TFLOP a step. Blocks "
            f"of {BLOCK} steps of each in turn, there and back, in one process; medians and "
            "quartiles over rounds, ratios within rounds. Ours with guard, log folder and record, "
            "without evaluations and checkpoints. PyTorch's default for convolutions is TF32. "
            f"Memory: the peak of the first {WARM_UP} steps, beyond what was allocated before.\n\n"
        )
        made, memory = dict[str, Any](), dict[str, float]()
        for name in VARIANTS:
            if len(made) > 2 and time.monotonic() - began > LONGEST_WARM_UP * seconds:
                yield f"{name}: left out, no time.\n\n"
                continue
            before = torch.cuda.memory_allocated(device) if cuda else 0
            if cuda:
                torch.cuda.reset_peak_memory_stats(device)
            try:
                own = config_of(case, name, scratch / name, str(device), small=small)
                one = case.loop(own, device) if "loop" in name else Iterations(case.task, own)
                stack.callback(one.close)
                for _ in range(WARM_UP):
                    one.step()
                synchronize(device)
            except RuntimeError as error:  # out of memory, or the compiler failed
                traceback.print_exc()
                yield f"{name}: failed, {str(error).strip().partition(chr(10))[0]}\n\n"
                continue
            made[name] = one
            if cuda:
                memory[name] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
        turns = {
            name: Turn(x.step, BLOCK, partial(set_precision, x.precision))
            for name, x in made.items()
        }
        side = 64 if small else 16384
        a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
        turns["product"] = Turn(partial(torch.matmul, a, b, out=torch.empty_like(a)), 20)
        compiled, left = counters["frames"]["ok"], began + seconds - time.monotonic()
        found = alternate(turns, device, seconds=left)
        rate = 2 * side**3 / statistics.median(x.wall for x in found.pop("product"))
        lines = []
        for name, own in found.items():
            step = statistics.median(x.wall for x in own)
            line = {"variant": name, "step, ms": spread([1e3 * x.wall for x in own])}
            line |= {"TFLOP/s": f"{flop / step / 1e12:.1f}", "share": f"{flop / step / rate:.2f}"}
            line |= {f"{x} / it": ratios(found[x], own) for x in found if "loop" in x}
            lines.append(line | {"GiB": f"{memory[name]:.2f}" if cuda else "–"})
        yield (
            f"{table_of(lines)}\n\n{len(own)} rounds. Share: of the rate of a {side} × {side} "
            f"product in bfloat16, {rate / 1e12:.1f} TFLOP/s, measured in turn with them. Aim: "
            f"ours at least {case.aim} times as fast as the loop.\n"
        )
        if again := counters["frames"]["ok"] - compiled:
            yield f"\n**{again} functions were compiled meanwhile: do not use it.**\n"
        if OURS in made:
            set_precision(made[OURS].precision)
            yield f"\n{prove_no_wait(made[OURS].step, WATCHED, device)}\n"


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trainer", choices=CASES)
    parser.add_argument("--device", default="cuda", help="a GPU, such as cuda; cpu with --small")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--small", action="store_true", help="to try it")
    given = parser.parse_args(words)
    device, seconds = find_device(given.device), 60 * given.minutes
    for text in measured(CASES[given.trainer], device, seconds, small=given.small):
        print(text, end="", flush=True)


if __name__ == "__main__":
    main()
