"""The benchmarks of speed and of a GPU, tried on the CPU: what they measure and write."""

from __future__ import annotations

import gc
import re
import shutil
import subprocess

import pytest
import torch

from benchmarks import gpu, long_run, overhead
from benchmarks.gpu_steps import CASES, config_of
from benchmarks.loops import JemLoop, ShortRunLoop, step_flop
from benchmarks.timing import Iterations
from ebmguard.reference_training.jem.scenarios import SCENARIOS
from ebmguard.reference_training.shortrun.config import CIFAR10
from ebmguard.report import RecordedRun

CPU = torch.device("cpu")
JEM, SHORTRUN = CASES.values()


def small(case, out, **options):
    return config_of(case, "loop, float32", out, "cpu", small=True, **options)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


# Channels in and out, kernel, output resolution.
WIDE = [(3, 16, 3, 32), (640, 10, 1, 1)]
for i, o, before, after in ((16, 160, 32, 32), (160, 320, 32, 16), (320, 640, 16, 8)):
    WIDE += [(i, o, 3, before), (i, o, 1, after), *7 * [(o, o, 3, after)]]
# At nf = 64.
SHORT = [(3, 64, 3, 32), (64, 128, 4, 16), (128, 256, 4, 8), (256, 512, 4, 4), (512, 1, 4, 1)]


@pytest.mark.parametrize(
    ("loop", "settings", "layers", "langevin", "images"),
    [
        (JemLoop, SCENARIOS["1"], WIDE, 20 * 64, 192),
        (JemLoop, SCENARIOS["3"], WIDE, 20 * 8, 136),
        (ShortRunLoop, CIFAR10, SHORT, 100 * 64, 128),
    ],
)
def test_operations_of_a_step(loop, settings, layers, langevin, images):
    flop = [2 * i * o * k * k * r * r for i, o, k, r in layers]
    # No gradient of the images is needed for the parameters'.
    expected = langevin * 2 * sum(flop) + images * (3 * sum(flop) - flop[0])
    assert step_flop(loop, settings, (3, 32, 32)) == expected


def test_jems_loop_trains_on_the_same_objective_as_the_unguarded_trainer(tmp_path, monkeypatch):
    """The same images, chains and weights: the same update as our trainer's at beta_star = 0."""
    options = {"lr": 1e-3, "warmup": 0, "beta_star": 0.0}
    loop = JemLoop(small(JEM, tmp_path / "loop", **options), CPU)
    ours = Iterations(JEM.task, small(JEM, tmp_path / "ours", **options))
    trainer = ours.task.trainer
    loop.f.load_state_dict(trainer.network.state_dict())
    batch, x_neg = loop.batches[0], torch.rand(8, 1, 8, 8) * 2 - 1
    monkeypatch.setattr(loop, "sample", lambda: x_neg)
    monkeypatch.setattr(trainer, "sample_q", lambda *_: x_neg)
    monkeypatch.setattr(trainer.draws, "batch", lambda _: batch)
    # Adam's first step is the gradient's sign almost everywhere: compare the gradients.
    start = [p.detach().clone() for p in loop.f.parameters()]
    with trainer.loss_fn.guard.paused():
        trainer.step(0)
    loop.step()
    ours.close()
    for before, own, theirs in zip(
        start, trainer.network.parameters(), loop.f.parameters(), strict=True
    ):
        assert own.grad is not None
        assert theirs.grad is not None
        assert not torch.equal(theirs, before)
        torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_the_loop_of_short_runs_learns_the_difference_of_mean_energies(tmp_path, monkeypatch):
    loop = ShortRunLoop(small(SHORTRUN, tmp_path / "run"), CPU)
    x_pos, x_neg = torch.rand(8, 1, 8, 8), -torch.rand(8, 1, 8, 8)
    parameters = list(loop.f.parameters())
    f = loop.f(torch.cat((x_pos, x_neg)))
    expected = torch.autograd.grad(f[8:].mean() - f[:8].mean(), parameters)
    start = [p.detach().clone() for p in parameters]
    monkeypatch.setattr(loop, "draw", lambda: x_pos)
    monkeypatch.setattr(loop, "sample", lambda: x_neg)
    loop.step()
    found = [p.grad for p in parameters]
    torch.testing.assert_close(found, list(expected), rtol=1e-4, atol=1e-6)
    moved = [not torch.equal(p, before) for p, before in zip(parameters, start, strict=True)]
    assert moved == [True] * (len(moved) - 1) + [False]  # a shift of f is no difference


# -- the plan of an hour -----------------------------------------------------------------------


def test_failures_and_what_takes_too_long_are_said_and_the_next_command_runs(tmp_path, monkeypatch):
    out = tmp_path / "gpu.md"
    bodies = (
        f"echo first; sleep 0.5; grep -c first {out}; exit 1",
        "echo '## next'; exec sleep 60",
    )

    class Popen(subprocess.Popen[str]):
        def __init__(self, words, **more):
            super().__init__([*words[:-4], "/bin/sh", "-c", words[-1]], **more)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(gpu, "commands", lambda *_, **__: [(body,) for body in bodies])
    words = ["--part", "toys", "--device", "cpu", "--minutes", "0.03", "--out", str(out)]
    assert gpu.main(words) == 1
    text = out.read_text(encoding="utf-8")
    # It was there before the command had ended.
    assert re.search(r"first\n[1-9]\n\n\*\*Failed\*\* with status 1\.\n", text)
    assert re.search(r"### next\n\nStopped after 0.03 minutes\.\n", text)
    out.write_text(text.replace("# A first hour", "By hand.\n\n# A first hour"))
    gpu.put(out, "jem", "a step")
    kept = out.read_text(encoding="utf-8")
    assert kept.startswith("By hand.")
    assert "\n\na step\n\n<!-- /jem -->" in kept
    assert "### next" in kept


def test_a_device_that_is_not_there_is_said_and_a_training_goes_on(tmp_path, capsys):
    assert gpu.main(["--device", "nowhere", "--out", str(tmp_path / "gpu.md")]) == 2
    assert "--device cpu --small" in capsys.readouterr().out
    (tmp_path / "jem-0").mkdir()
    assert "--resume" not in gpu.commands("train", "cpu", 1.0, tmp_path, small=True)[0]
    (tmp_path / "jem-0" / "config.json").write_text("{}")
    assert "--resume" in gpu.commands("train", "cpu", 1.0, tmp_path, small=True)[0]


# -- overhead and long runs ---------------------------------------------------------------------


@pytest.mark.slow
def test_two_checkouts_are_measured_in_turns(tmp_path, capsys):
    """The other has the same package, which says when it is imported."""
    for room in ("ebmguard", "reference_training"):
        shutil.copytree(overhead.HERE / room, tmp_path / room)
    own = tmp_path / "ebmguard" / "__init__.py"
    with own.open("a") as file:
        file.write(f"\nopen({str(tmp_path / 'imported')!r}, 'a').write(__file__ + '\\n')\n")
    overhead.main(["--only", "mlp", "--rounds", "2", "--steps", "1", "--against", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line[:2] == "| "][2:]
    assert [row[1] for row in rows] == ["before", "now"]
    assert all(float(cell.split()[0]) > 0 for row in rows for cell in row[2:4])
    assert lines[-1].startswith("before / now: plain ")
    # A process for each round had the other checkout, and all of its package; the rest did not.
    assert (tmp_path / "imported").read_text().splitlines() == 2 * [str(own)]


def test_a_folder_to_read_has_the_rows_that_are_asked_for(tmp_path):
    lines = ['"energy_gap": 0.5, "recovery/attempt": 0.0}']
    run = long_run.write_run(tmp_path / "run", 200, lines)
    found = RecordedRun.read(run, ["energy_gap"])
    assert (found.row_count, found.step, len(found.attempts)) == (200, 189, 2)
    assert min(long_run.taken(["watch", str(run), "--once"]).values()) > 0


def test_a_long_run_leaves_nothing_open_and_counts_its_bytes(tmp_path):
    training = long_run.Training(tmp_path)
    for _ in range(5):
        training.step()
    gc.collect()  # what earlier tests have left open in this process
    held = training.held()
    training.end()
    training.begin()
    training.blow_up()
    training.step()
    assert training.held() == held
    training.end()
    sizes = long_run.sizes(tmp_path)
    assert min(sizes[name] for name in ("metrics.jsonl", "event files")) > 0
