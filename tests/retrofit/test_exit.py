"""What is on the disk when a run ends, however it ends; and what it says on the terminal."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest

from ebmguard.sinks import read_jsonl
from tests import forks

# Forks a trainer for each way to end.
TRAINERS = """
    import gc, os, signal, sys
    import torch
    from ebmguard import guard
    from ebmguard.sinks import JsonlSink

    torch.set_num_threads(1)
    f = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0))

    def sampler(f, x):
        x = x.clone().requires_grad_()
        return x.detach() + torch.autograd.grad(f(x).sum(), x)[0]

    def train(ending):
        g = guard(
            None, sampler, beta_star=1.0, output_scale=9.0, flush_every=10,
            sinks=[JsonlSink(os.path.join(sys.argv[1], ending))], judge_in_loss="lag" not in ending,
        )
        loss_fn, sample_q = g
        optimizer = torch.optim.SGD(f.parameters(), lr=0.0)
        if "optimizer" in ending:
            g.attach(optimizer=optimizer)
        for step in range(25):
            x = sample_q(f, torch.randn(4, 2))
            loss_fn(f(torch.randn(4, 2)), f(x)).backward()
            optimizer.step()
        if "kill" in ending:
            os.kill(os.getpid(), signal.SIGKILL)
        elif "error" in ending:
            raise RuntimeError("the trainer's own")
        elif "exit" in ending:
            sys.exit(3)
        elif "close" in ending:
            g.close()
            os._exit(0)
        elif "dropped" in ending:
            del g, loss_fn, sample_q
            gc.collect()
            os._exit(0)

    for ending in sys.argv[2:]:
        child = os.fork()
        if child == 0:
            train(ending)
            break
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
ALL, TWO_FLUSHES = list(range(25)), list(range(20))
# Way to end -> exit status, and the steps whose rows are on the disk. Without an optimizer the last
# step is still open; it is written under its own number nevertheless.
ENDINGS = {
    "kill, lag, optimizer": (-signal.SIGKILL, TWO_FLUSHES),
    "normal, lag, optimizer": (0, ALL),
    "error": (1, ALL),
    "exit, lag": (3, ALL),
    "close": (0, ALL),
    "dropped": (0, ALL),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ends")
    result = forks.run("-c", textwrap.dedent(TRAINERS), str(folder), *ENDINGS, OMP_NUM_THREADS="1")
    codes = [int(line) for line in result.stdout.split()]
    assert len(codes) == len(ENDINGS), result.stderr
    steps = [
        [row["step"] for row in read_jsonl(folder / ending / "metrics.jsonl")] for ending in ENDINGS
    ]
    return dict(zip(ENDINGS, zip(codes, steps, strict=True), strict=True))


@pytest.mark.parametrize("ending", list(ENDINGS))
def test_rows_on_the_disk(ended, ending):
    assert ended[ending] == ENDINGS[ending]


# -- what is said where a program has not set up logging, and where it has -------------------------

RUN = """
import torch
from ebmguard import guard

def langevin(f, x):
    return x + 0 * f(x).detach()

f = torch.nn.Linear(1, 1)
loss, sample = guard(None, langevin, model=f, beta_star=0.5, output_scale=2.0, log_dir={folder!r})
for step in range(3):
    x = sample(f, torch.zeros(4, 1))
    loss(f(x), f(x) / (step - 1))
"""
BEGINS = (
    "The loss and langevin are guarded. The loss weights the negatives "
    "(beta_star=0.5, substeps=auto, output_scale=2). To watch it: ebmguard watch runs/a"
)


def said(code: str, folder: object, path: Path) -> list[str]:
    """Lines on stderr."""
    done = forks.run("-c", code + RUN.format(folder=folder), cwd=path)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_every_line_begins_with_the_name(tmp_path):
    first, *alerts = said("", "runs/a", tmp_path)
    assert first == f"ebmguard: {BEGINS}"
    assert all(line.startswith("ebmguard: ") for line in alerts), alerts
    assert "nonfinite" in alerts[0]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        # A program with logging of its own keeps its format and level, and silence.
        ("logging.basicConfig(level='INFO', format='[%(name)s] %(message)s')", BEGINS),
        ("logging.basicConfig(level='WARNING', format='[%(name)s] %(message)s')", "nonfinite"),
        ("logging.getLogger('ebmguard').addHandler(logging.NullHandler())", None),
    ],
)
def test_a_program_that_has_set_up_logging_keeps_it(tmp_path, setting, expected):
    lines = said(f"import logging; {setting}", "runs/a", tmp_path)
    assert all(line.startswith("[ebmguard] ") for line in lines)
    assert expected in lines[0] if expected else not lines
