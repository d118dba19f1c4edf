"""The command line. Each command is a settings dataclass and the function that it is given to.

Nothing is imported before the command is known: neither tyro, which only the command line needs,
nor the module of another command.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from .errors import EbmguardError, printable

__all__ = ["COMMANDS", "Command", "main"]

USAGE_ERROR = 2
INTERRUPTED = 130
ALTERNATIVES = "|"
COLUMN = 12


class Command(NamedTuple):
    """Where a command lives, and one line for the list of commands."""

    config: str  # "module:name" of the settings, a dataclass whose docstrings are the help
    run: str  # "module:name" of a function that takes the settings and returns the exit status
    summary: str


# Of each command its words, of which one of those joined by "|" is given (a figure's is its first
# argument), its package with the module and the name of settings and function; and its summary.
_TABLE = """\
train jem = reference_training.jem options:from_words command:run
    train a joint energy-based model, watched by the guard
train shortrun = reference_training.shortrun config:ShortRunConfig command:run
    train a short-run MCMC energy-based model
train toy = reference_training.toy config:ToyConfig command:run
    train ensembles of small EBMs on known densities
train bism = reference_training.bism config:BismConfig command:run
    train a latent-variable model by bi-level score matching, or by what it is compared with
train bism deep = reference_training.bism deep_config:DeepConfig command:run_deep
    train a deep latent-variable model of images
sweep bism = reference_training.sweep grids:BismGrid command:run
    train latent-variable models by several methods, or go on with it
sweep jem = reference_training.sweep grids:JemGrid command:run
    train a grid of JEM runs, or go on with one
sweep shortrun = reference_training.sweep grids:ShortRunGrid command:run
    train a grid of short-run models, or go on with one
sweep toy = reference_training.sweep grids:ToyGrid command:run
    train a grid of toy ensembles, or go on with one
evaluate jem = reference_training.judge jem:EvaluateJem jem:run
    accuracy, calibration, samples, out-of-distribution scores and likelihood of a JEM run
evaluate shortrun = reference_training.judge shortrun:EvaluateShortRun shortrun:run
    FID and Inception score of a short-run model's samples, and its likelihood
evaluate bism = reference_training.judge bism:EvaluateBism bism:run
    samples, latents, FID and Inception score of a deep latent-variable model
evaluate toy = reference_training.judge toy:EvaluateToy toy:run
    KL of each member of a toy run, by quadrature and by annealing
table jem = reference_training.jem.table config:TableConfig command:run
    Tables 1 and 2 of the paper beside the numbers of JEM runs
figure 1d|2|5|6|7|8|9|10|11|mixture|broken = \
    reference_training.toy.figures config:FigureConfig command:run
    a toy figure of the paper: train what it needs, draw it, print its numbers
figure 3|4|16|17|18|19|20|21|22|23|24|25 = \
    reference_training.jem.figures config:FigureConfig command:run
    a JEM figure of the paper, drawn from runs that are there, with its numbers
figure 12|13|14|15|steps|interpolation|reconstruction|likelihood|long-run = \
    reference_training.shortrun.figures config:FigureConfig command:run
    a figure or study of short-run models, from runs that are there, with its numbers
figure bilevel = reference_training.bism.figures config:FigureConfig bilevel:run
    bias of bi-level gradients and its bound by unrolled and inner steps, from runs that are there
watch = report watch:WatchConfig watch:watch
    a run on the terminal while it goes on: diagnostics, bands, alerts, rollbacks
report = report page:ReportConfig page:report
    runs as one HTML file: charts, alerts, rollbacks, what to do next
check = report problems:CheckConfig problems:check
    every problem of a run, each with its fix
trace = trace command:TraceConfig command:trace
    run a trainer for a few steps: its sampler measured, the two lines that guard it, proven
compare = reference_training compare:CompareConfig compare:compare
    draw runs side by side
demo = reference_training demo:DemoConfig demo:run
    the same JEM run without and with the guard
"""


def _commands(table: str) -> Iterator[tuple[tuple[str, ...], Command]]:
    lines = iter(table.splitlines())
    for line, summary in zip(lines, lines, strict=True):
        words, _, places = line.partition(" = ")
        package, *names = places.split()
        config, run = (f"ebmguard.{package}.{name}" for name in names)
        yield tuple(words.split()), Command(config, run, summary.strip())


COMMANDS = dict(_commands(_TABLE))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, of these words after the program's name or of those of the process.

    Returns:
        Exit status: 0, 2 for a command line or settings that cannot be meant, 130 after Ctrl-C, or
        the command's own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        print(f"ebmguard {importlib.import_module('ebmguard').__version__}")
        return 0
    found, taken = find(words)
    if len(found) > 1 or taken < len(found[0]):
        wanted_help = words[taken : taken + 1] in (["-h"], ["--help"])
        print(usage(found), file=sys.stdout if wanted_help else sys.stderr)
        if words[taken:] and not wanted_help:
            print(f"\nerror: {unknown(words[: taken + 1], found)}", file=sys.stderr)
        return 0 if wanted_help else USAGE_ERROR
    (name,) = found
    taken -= name[0] == "figure"
    try:
        import tyro
    except ImportError:
        print('the command line needs tyro: pip install "ebmguard[cli]"', file=sys.stderr)
        return USAGE_ERROR
    command = COMMANDS[name]
    try:
        options = _apart(words[taken:]) if name == ("trace",) else words[taken:]
        prog = " ".join(("ebmguard", *words[:taken]))
        config = tyro.cli(load(command.config), prog=prog, args=options)
        return int(load(command.run)(config))
    except (EbmguardError, ImportError) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _apart(words: Sequence[str]) -> list[str]:
    """Options of the command, then all that is a script's and its own arguments' behind "--"."""
    end = 0
    while end < len(words) and words[end].startswith("-") and words[end] not in ("-h", "--help"):
        end += 1 if "=" in words[end] or words[end] == "--" else 2
    is_help = words[end : end + 1] in (["-h"], ["--help"])
    return [*words] if is_help or "--" in words[:end] else [*words[:end], "--", *words[end:]]


def load(location: str) -> Any:
    """The object that "module:name" stands for."""
    module, _, name = location.partition(":")
    return getattr(importlib.import_module(module), name)


def find(words: Sequence[str]) -> tuple[list[tuple[str, ...]], int]:
    """The commands that share the most words, and how many; a whole name stands alone."""
    names, taken = list(COMMANDS), 0
    for word in words:
        longer = [n for n in names if taken < len(n) and word in n[taken].split(ALTERNATIVES)]
        if not longer:
            break
        names, taken = longer, taken + 1
    return [name for name in names if len(name) == taken] or names, taken


def unknown(words: Sequence[str], names: Sequence[tuple[str, ...]]) -> str:
    """Why no command begins with these words, of which all but the last one begin these names."""
    known = {each for name in names for each in name[len(words) - 1].split(ALTERNATIVES)}
    close = get_close_matches(words[-1], sorted(known), cutoff=0.5)
    meant = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"unknown command {printable(' '.join(words))}{meant}"


def usage(names: Sequence[tuple[str, ...]]) -> str:
    lines = ["usage: ebmguard COMMAND [options]   (or --version)", "", "commands:"]
    for name in names:
        words = " ".join(name)
        # A name that is too long for its column has a line of its own.
        words += f"\n  {'':{COLUMN}}" if len(words) > COLUMN else ""
        lines.append(f"  {words:{COLUMN}} {COMMANDS[name].summary}")
    return "\n".join([*lines, "", "ebmguard COMMAND --help lists the options of a command."])
