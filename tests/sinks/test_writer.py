"""What a guard writes, when it is flushed, whose folder it is, and where there is no room."""

from __future__ import annotations

import gc
import os
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest

from ebmguard import guard
from ebmguard.errors import ConfigError
from ebmguard.sinks import JsonlSink, Writer, read_jsonl
from tests import forks
from tests.parts import Memory, energies
from tests.sinks.parts import scalars


def test_every_sink_gets_everything_and_is_flushed_every_so_many_rows():
    first, second = Memory(), Memory()
    writer = Writer([first, second], flush_every=3)
    for step in range(7):
        writer.write(step, {"a": float(step)}, {"f": [5.0]} if step == 5 else {})
    assert first.rows == second.rows == [(step, {"a": float(step)}) for step in range(7)]
    assert first.histograms == [(5, {"f": [5.0]})]
    assert first.flushed_rows == [3, 6]
    writer.write_alerts([])
    assert first.flushed_rows == [3, 6]
    writer.write_alerts([{"rule": "r"}, {"rule": "s"}])
    writer.write_recovery({"restored_step": 4})
    assert first.alerts == [{"rule": "r"}, {"rule": "s"}]
    assert first.recoveries == second.recoveries == [{"restored_step": 4}]
    assert first.flushed_rows == [3, 6, 7, 7]
    for step in (8, 9, 10):  # the count starts again after any flush
        writer.write(step, {}, {})
    assert first.flushed_rows == [3, 6, 7, 7, 10]


def test_an_interrupt_while_a_row_is_written_loses_none(tmp_path, monkeypatch):
    write, interrupts = JsonlSink.write_row, [5]

    def interrupted(sink, step, *row):
        if step in interrupts:
            interrupts.remove(step)
            raise KeyboardInterrupt
        write(sink, step, *row)

    monkeypatch.setattr(JsonlSink, "write_row", interrupted)
    writer = Writer((), flush_every=50, folder=tmp_path)
    for step in range(20):
        with pytest.raises(KeyboardInterrupt) if step in interrupts else nullcontext():
            writer.write(step, {"loss": 1.0}, {})
    writer.flush()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [*range(20)]
    writer.close()


def test_rows_that_come_again_are_cut_off_with_those_that_wait(tmp_path):
    writer = Writer((), flush_every=50, folder=tmp_path)
    for steps in (range(10), range(5, 8)):
        writer.rewind(5, 0)
        for step in steps:
            writer.write(step, {"loss": 1.0}, {})
    writer.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [*range(8)]


def test_two_guards_do_not_write_to_one_folder(tmp_path):
    """Their rows could not be told apart: 240 rows for 120 steps."""
    first = guard(None, None, beta_star=0.5, log_dir=tmp_path)
    first.loss_fn(*energies())
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="in use by another guard of this process"):
        guard(None, None, beta_star=0.5, log_dir=tmp_path / ".")
    assert sorted(tmp_path.iterdir()) == before
    guard(None, None, beta_star=0.5, log_dir=tmp_path / "other")
    first.close()
    second = guard(None, None, beta_star=0.5, log_dir=tmp_path)
    del second, first
    gc.collect()  # nobody has closed the second one
    guard(None, None, beta_star=0.5, log_dir=tmp_path).close()


FORKS = """
    import os, sys, torch
    from ebmguard import guard
    torch.set_num_threads(1)  # threads do not outlive a fork; a child would wait for them
    g = guard(None, None, beta_star=0.5, log_dir=sys.argv[1])
    for _ in range(7):
        g.loss_fn(torch.randn(3), torch.randn(3))
    child = os.fork()
    if child == 0:
        g.loss_fn(torch.randn(3), torch.randn(3))
        if sys.argv[2] == "close":
            g.close()
        sys.exit()  # runs what is to run at exit
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("ending", ["exit", "close"])
def test_a_forked_child_does_not_write_its_parents_rows(tmp_path, ending):
    code = textwrap.dedent(FORKS)
    assert forks.run("-c", code, str(tmp_path), ending).returncode == 0
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(7))


# Files of a process may be limited in size; writing beyond raises OSError, as a full disk does.
FULL = """
import os, resource, sys
import torch
from ebmguard import guard


def train(folder, room_again, steps=30):
    torch.manual_seed(0)
    f = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(f.parameters(), lr=0.01)
    g = guard(None, None, beta_star=0.5, log_dir=folder, flush_every=4)
    g.attach(model=f, optimizer=optimizer)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for step in range(steps):
        if step == 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
        if step == room_again:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        optimizer.zero_grad()
        g.loss(f(torch.randn(8, 2)), f(torch.randn(8, 2))).backward()
        optimizer.step()
    print("trained", g.step)


for room_again in sys.argv[2:]:
    if os.fork() == 0:
        train(f"{sys.argv[1]}/{room_again}", int(room_again))
        break
    os.wait()
    print("over", file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a run for each case, and what each said."""
    folder = tmp_path_factory.mktemp("runs")
    os.mkfifo(folder / "said")  # to which the limit does not apply
    process = forks.start("-c", FULL, str(folder), "20", "-1", stdout=folder / "said")
    said = (folder / "said").read_text()
    assert forks.statuses(process) == [0]
    assert said.count("trained 30\n") == 2
    return folder, said.split("over\n")


@pytest.mark.parametrize(("case", "room_again"), [(0, 20), (1, -1)])
def test_a_run_outlives_a_full_disk_and_says_what_is_lost(
    ended: tuple[Path, list[str]], case: int, room_again: int
) -> None:
    folder, said = ended[0] / str(room_again), ended[1][case]
    written = 30 if room_again > 0 else 8
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == list(range(written))
    for name in ("JsonlSink", "TensorBoardSink"):
        assert said.count(f"{name} cannot write") == 1
        taken = f"{name} takes its rows again: everything was written"
        lost = f"{name} has not taken up to 22 rows and alerts until the end"
        assert (taken in said, lost in said) == (room_again > 0, room_again < 0)
    if room_again > 0:
        assert [step for step, _ in scalars(folder, "guard/energy_gap")] == list(range(30))
