"""What is on the disk when a run ends, however it ends."""

from __future__ import annotations

import signal
import textwrap

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
        elif "hard" in ending:
            os._exit(7)
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
    "kill, optimizer": (-signal.SIGKILL, TWO_FLUSHES),
    "kill, lag, optimizer": (-signal.SIGKILL, TWO_FLUSHES),
    "hard": (7, TWO_FLUSHES),
    "normal": (0, ALL),
    "normal, lag, optimizer": (0, ALL),
    "error, optimizer": (1, ALL),
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
