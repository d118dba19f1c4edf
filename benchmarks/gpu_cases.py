"""What is measured of a trainer on a GPU: its variants, its sizes, and a bench to try them on."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ebmguard.reference_training.data import ROOT_VARIABLE, ImageData

from .contenders import Iterations, PublishedLoop, step_flop
from .timing import Clock, Steps
from .watching import Deadline

SHAPE, CLASSES = (3, 32, 32), 10
NEVER = 10**6

# The most important first: what finds no time is left out.
VARIANTS: Mapping[str, Mapping[str, str]] = {
    "ours, bfloat16, compiled": {"precision": "bfloat16", "compile": "yes"},
    "loop, TF32": {"precision": "tf32"},
    "loop, float32": {"precision": "float32"},
    "ours, TF32, compiled": {"precision": "tf32", "compile": "yes"},
    "ours, bfloat16": {"precision": "bfloat16"},
    "ours, TF32": {"precision": "tf32"},
    "ours, float32": {"precision": "float32"},
    "ours, float32, compiled": {"precision": "float32", "compile": "yes"},
}
OURS, LOOPS = "ours, bfloat16, compiled", ("loop, TF32", "loop, float32")


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Attributes:
        options: settings over those of the trainer.
        data: the data set; of other ones than the digits, random bytes serve where there are none.
        compile: the variants that are said to be compiled are.
        block: steps of a variant before the next one has its turn.
        matrix: rows and columns of the matrix product that gives the floor.
        products: how many of them are measured at once.
        watched: iterations in which synchronising calls are looked for, after as many others.
        profiled: iterations whose kernels are counted.
        more: what the parts of one trainer alone need.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    data: str = "cifar10"
    compile: bool = True
    block: int = 5
    matrix: int = 16384
    products: int = 20
    watched: int = 120
    profiled: int = 2
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lacks_data(self) -> bool:
        """Whether the data are ones that the user has to name, and has not."""
        return self.data != "digits" and not os.environ.get(ROOT_VARIABLE)

    @property
    def images(self) -> str:
        """The images in words."""
        return f"random bytes instead of {self.data}" if self.lacks_data else self.data


# To try all parts on a CPU. Its numbers say nothing.
TOY = Size({}, "digits", False, block=1, matrix=64, products=2, watched=2, profiled=1)


class Part(NamedTuple):
    """A section of the file.

    Attributes:
        title: of the section.
        share: of the time that is left to it and those after it.
        text: yields Markdown as soon as it knows something.
    """

    title: str
    share: float
    text: Callable[[Bench], Iterator[str]]


@dataclass(frozen=True)
class Case:
    """One trainer.

    Attributes:
        command: words of `ebmguard` that train it.
        module: of its benchmark.
        title: of the file.
        config: its settings.
        task: what trains, step by step.
        train: the command as a function.
        loop: of the published structure.
        words: what is trained, from its resolved settings.
        quiet: settings of a run without evaluations.
        aim: how many times as fast as the loop it is to be.
        sizes: "full" and "toy".
        parts: those of this trainer alone.
    """

    command: str
    module: str
    title: str
    config: type[Any]
    task: Callable[..., Any]
    train: Callable[..., Any]
    loop: type[PublishedLoop]
    words: Callable[[Any], str]
    quiet: Mapping[str, Any]
    aim: float
    sizes: Mapping[str, Size]
    parts: Mapping[str, Part]


class RandomImages:
    """Settings of a run on random bytes, where only time and memory are measured."""

    settings: Any

    def load_data(self) -> ImageData:
        """As many images as CIFAR-10 has, or as the settings ask for."""
        valid = getattr(self.settings, "valid_images", 0)
        counts = self.settings.train_images, valid, self.settings.test_images
        sizes = zip(counts, (45_000, 5_000, 10_000), strict=True)
        return random_images(*(size if count is None else count for count, size in sizes))


@functools.lru_cache(maxsize=1)
def random_images(*counts: int) -> ImageData:
    """So many training, validation and test images of random bytes, with random labels."""
    generator = torch.Generator().manual_seed(0)
    images = (torch.randint(256, (n, *SHAPE), generator=generator).byte() for n in counts)
    labels = (torch.randint(CLASSES, (n,), generator=generator) for n in counts)
    parts = [tensor for pair in zip(images, labels, strict=True) for tensor in pair]
    return ImageData("random", *parts, classes=CLASSES, levels=255, pad=4, flip=True)


@dataclass
class Bench:
    """What all parts are given.

    Attributes:
        case: the trainer.
        size: how large everything is.
        device: where.
        clock: how long.
        runs: where runs are kept with which a second command goes on.
        scratch: for everything else.
        features: networks that judge samples, as `ebmguard evaluate shortrun` takes them.
        words: the command of this part.
    """

    case: Case
    size: Size
    device: torch.device
    clock: Clock
    runs: Path
    scratch: Path
    features: Sequence[str] = ()
    words: Sequence[str] = ()

    def config(self, out: Path, variant: str = OURS, **options: Any) -> Any:
        """Settings of a run, on random images where there are no others."""
        own = dict(VARIANTS[variant])
        if not self.size.compile:
            own["compile"] = "no"
        make = self.case.config
        if self.size.lacks_data:
            make = type(f"Random{make.__name__}", (RandomImages, make), {})
        fixed = {"out": out, "data": self.size.data, "device": str(self.device)}
        return make(**fixed, **{**self.size.options, **own, **options})

    def made(self, name: str) -> Steps:
        """A variant; with its guard at the trainer's own beta_star, if it is ours."""
        out = Path(tempfile.mkdtemp(dir=self.scratch)) / "run"
        if name.startswith("loop"):
            return self.case.loop(self.config(out, name), self.device)
        return Iterations(self.case.task, self.config(out, name, **self.case.quiet))

    @property
    def flop(self) -> int:
        """Floating-point operations of a step."""
        config = self.config(self.scratch)
        data = config.load_data()
        return step_flop(self.case.loop, config.settings, data.sample_shape, data.classes)

    def __str__(self) -> str:
        """What is trained, in words."""
        return f"{self.case.words(self.config(self.scratch).settings)}, on {self.size.images}"

    def trained(self, out: Path, seconds: float, **options: Any) -> float:
        """Train a run of our first variant, or go on with it, until it or the time is over.

        Returns:
            the seconds that it took.
        """
        clock = Clock(seconds / 60)
        if not (out / "results.json").is_file():
            resume = (out / "config.json").is_file()
            config = replace(self.config(out, **options), resume=resume)
            self.case.train(*config.open(), Deadline(seconds))
        return seconds - clock.left
