"""The command line. Neither tyro nor a command's module is imported before it is known."""

from __future__ import annotations

import io
import pkgutil
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple

from .errors import SPELLED, EbmguardError, printable

__all__ = ["COMMANDS", "Command", "main"]

USAGE_ERROR = 2
ALTERNATIVES = "|"
_COLUMN = 12
_PAPER = "paper"  # before a command of the papers, or alone: their list
_HELP = ["-h"], ["--help"]
_TRAIN = ("PIL", "matplotlib", "pandas", "scipy", "sklearn", "torchmetrics")
_EXTRAS = {"tyro": "cli", **dict.fromkeys(_TRAIN, "train")}


class Command(NamedTuple):
    """The places of a command's settings and function, and its line in the list of commands."""

    config: str  # "module:name" of the settings, a dataclass whose docstrings are the help
    run: str  # "module:name" of a function that takes the settings and returns the exit status
    summary: str


# The words of a command, one of those joined by "|" (for a figure its first argument); its package,
# settings and function, command:run if none is named; and its summary.
_TABLE = """\
trace = trace config:TraceConfig command:trace
    write the lines that guard your trainer, and prove them
watch = report watch:WatchConfig watch:watch
    follow a run in the terminal
report = report page:ReportConfig page:report
    write one HTML file: charts, alerts, what to do next
check = report problems:CheckConfig problems:check
    list every problem of a run, with its fix
compare = report page:CompareConfig page:compare
    set two to six runs side by side: a table, and one HTML file
demo = reference_training demo:DemoConfig demo:run
    train the same JEM without and with the guard
train jem = reference_training.jem options:from_words train:run
    train a joint energy-based model, watched by the guard
train shortrun = reference_training.shortrun config:ShortRunConfig train:run
    train a short-run MCMC energy-based model
train toy = reference_training.toy config:ToyConfig train:run
    train ensembles of small EBMs on known densities
train bism = reference_training.bism config:BismConfig train:run
    train a latent-variable model by bi-level score matching, or by what it is compared with
train bism deep = reference_training.bism config:DeepConfig deep_train:run
    train a deep latent-variable model of images
sweep bism = reference_training.sweep grids:BismGrid grid:run
    train latent-variable models by several methods, or go on with it
sweep jem = reference_training.sweep grids:JemGrid grid:run
    train a grid of JEM runs, or go on with one
sweep shortrun = reference_training.sweep grids:ShortRunGrid grid:run
    train a grid of short-run models, or go on with one
sweep toy = reference_training.sweep grids:ToyGrid grid:run
    train a grid of toy ensembles, or go on with one
evaluate jem = reference_training.judge config:EvaluateJem jem:run
    accuracy, calibration, samples, out-of-distribution scores and likelihood of a JEM run
evaluate shortrun = reference_training.judge config:EvaluateShortRun shortrun:run
    FID and Inception score of a short-run model's samples, and its likelihood
evaluate bism = reference_training.judge config:EvaluateBism bism:run
    samples, latents, FID and Inception score of a deep latent-variable model
evaluate toy = reference_training.judge config:EvaluateToy toy:run
    KL of each member of a toy run, by quadrature and by annealing
table jem = reference_training.studies config:TableConfig jem_tables:run
    Tables 1 and 2 of the paper beside the numbers of JEM runs
figure 1d|2|5|6|7|8|9|10|11|mixture|broken = reference_training.studies config:ToyFigure
    a toy figure of the paper: train what it needs, draw it, print its numbers
figure 3|4|16|17|18|19|20|21|22|23|24|25 = reference_training.studies config:JemFigure
    a JEM figure of the paper, drawn from runs that are there, with its numbers
figure 12|13|14|15|steps|interpolation|reconstruction|likelihood|long-run = \
    reference_training.studies config:ShortRunFigure
    a figure or study of short-run models, from runs that are there, with its numbers
figure bilevel = reference_training.studies config:BilevelFigure
    bias of bi-level gradients and its bound by unrolled and inner steps, from runs that are there
"""
COMMANDS = {
    tuple(words.split()): Command(
        f"ebmguard.{pkg}.{config}", f"ebmguard.{pkg}.{run or 'command:run'}", summary
    )
    for words, pkg, config, run, summary in re.findall(r"(.+) = +(\S+) (\S+) ?(.*)\n +(.+)", _TABLE)
}
_OF_PAPERS = [name for name in COMMANDS if len(name) > 1]
load = pkgutil.resolve_name  # the object that "module:name" stands for


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of these words, else of the process's, and return the exit status.

    It is 2 for unknown words or impossible settings, and 130 after Ctrl-C.
    """
    for stream in sys.stdout, sys.stderr:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=SPELLED)
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        print(f"ebmguard {load('ebmguard:__version__')}")
        return 0
    names, taken = find(words)
    if words[:1] == [_PAPER]:
        words = words[1:]
        names, taken = find(words, _OF_PAPERS)
    name, rest = names[0], words[taken:]
    if len(names) > 1 or taken < len(name):
        if rest[:1] in _HELP:
            print(_usage(names))
            return 0
        print(_usage(names, words[: taken + 1] if rest else ()), file=sys.stderr)
        return USAGE_ERROR
    taken -= name[0] == "figure"
    try:
        import tyro

        options = _apart(rest) if name == ("trace",) else words[taken:]
        prog = " ".join(("ebmguard", *words[:taken]))
        config = tyro.cli(load(COMMANDS[name].config), prog=prog, args=options)
        return int(load(COMMANDS[name].run)(config))
    except (EbmguardError, ImportError) as error:
        extra = _EXTRAS.get(str(getattr(error, "name", None)).partition(".")[0])
        why = f'{error}: pip install ".[{extra}]" in a clone' if extra else error
        print(f"error: {printable(why)}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _apart(words: list[str]) -> list[str]:
    """Put "--" between the options of a command and the script with its arguments."""
    end = 0
    while end < len(words) and words[end].startswith("-") and [words[end]] not in _HELP:
        end += 1 if "=" in words[end] or words[end] == "--" else 2
    is_apart = words[end : end + 1] in _HELP or "--" in words[:end]
    return words if is_apart else [*words[:end], "--", *words[end:]]


def find(
    words: Sequence[str], names: Sequence[tuple[str, ...]] = tuple(COMMANDS)
) -> tuple[list[tuple[str, ...]], int]:
    """Return the commands that share the most words, and how many; a whole name stands alone."""
    taken = 0
    for word in words:
        longer = [n for n in names if taken < len(n) and word in n[taken].split(ALTERNATIVES)]
        if not longer:
            break
        names, taken = longer, taken + 1
    return [name for name in names if len(name) == taken] or list(names), taken


def _usage(names: Sequence[tuple[str, ...]], wrong: Sequence[str] = ()) -> str:
    """Return the list of these commands, and the error for words of which the last is wrong.

    In the list of all commands, those of the papers are one line.
    """
    is_whole = len(names) == len(COMMANDS)
    lines = ["usage: ebmguard COMMAND [options]   (or --version)", "", "commands:"]
    lines += [
        _line(name, COMMANDS[name].summary) for name in names if not is_whole or len(name) < 2
    ]
    if is_whole:
        groups = ", ".join(dict.fromkeys(name[0] for name in _OF_PAPERS))
        lines += [_line((_PAPER,), f"list the papers' commands: {groups}")]
    lines += ["", "ebmguard COMMAND --help lists the options of a command."]
    if wrong:
        known = {word for name in names for word in name[len(wrong) - 1].split(ALTERNATIVES)}
        close = get_close_matches(wrong[-1], sorted(known), cutoff=0.5)
        meant = f"; did you mean {' or '.join(close)}?" if close else ""
        lines += ["", f"error: unknown command {printable(' '.join(wrong))}{meant}"]
    return "\n".join(lines)


def _line(name: tuple[str, ...], summary: str) -> str:
    words = " ".join(name)
    # A name that is too long for its column has a line for itself.
    words += f"\n  {'':{_COLUMN}}" if len(words) > _COLUMN else ""
    return f"  {words:{_COLUMN}} {summary}"
