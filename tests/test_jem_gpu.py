"""The GPU benchmark of the JEM trainer, tried on the CPU: what its parts measure and write."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

from benchmarks import jem_gpu, jem_parts
from benchmarks.gpu_document import UNFINISHED
from benchmarks.gpu_timing import Clock
from benchmarks.jem_loop import SIZES, Engine, PublishedLoop, config_of, step_flop
from ebmguard.reference_training.jem.scenarios import SCENARIOS
from ebmguard.samplers import sgld

CPU = torch.device("cpu")


def toy_config(out: Path, **options):
    return config_of(SIZES["toy"], CPU, out, scenario="1", **{"precision": "float32", **options})


@pytest.fixture
def command(tmp_path):
    def run(part, *more, minutes="0"):
        words = ["--part", part, "--device", "cpu", "--size", "toy", "--minutes", minutes]
        out, runs = tmp_path / "results.md", tmp_path / "runs"
        status = jem_gpu.main([*words, "--out", str(out), "--runs", str(runs), *more])
        assert status == 0
        return out.read_text(encoding="utf-8") if out.exists() else ""

    return run


def rows(text: str, first: str) -> list[list[str]]:
    """Cells of the table rows that begin with `first`."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# -- what is measured --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "steps", "chains"), [("1", 20, 64), ("2", 5, 64), ("3", 20, 8)]
)
def test_operations_of_a_step(scenario, steps, chains):
    layers = [(3, 16, 3, 32)]  # channels in and out, kernel, output resolution
    channels = 16
    for stage, before, after in ((160, 32, 32), (320, 32, 16), (640, 16, 8)):
        layers += [(channels, stage, 3, before), (stage, stage, 3, after)]
        layers += [(channels, stage, 1, after)] + 6 * [(stage, stage, 3, after)]
        channels = stage
    forward = sum(2 * i * o * k * k * r * r for i, o, k, r in layers) + 2 * 640 * 10
    stem = 2 * 3 * 16 * 9 * 32 * 32  # no gradient of the images is needed for the parameters'
    images = 128 + chains
    expected = steps * chains * 2 * forward + images * (3 * forward - stem)
    assert step_flop(SCENARIOS[scenario]) == expected


def test_the_loop_climbs_as_the_samplers_do(tmp_path):
    loop = PublishedLoop(toy_config(tmp_path / "run", noise_std=0.0), CPU)
    x = torch.rand(4, 3, 32, 32) * 2 - 1
    settings = loop.settings
    expected = sgld(
        loop.f, x, steps=settings.sgld_steps, step_size=settings.step_size, noise_std=0.0
    )
    moved = loop.climb(x)
    assert not torch.equal(moved, x)
    torch.testing.assert_close(moved, expected, rtol=0, atol=0)


def test_the_loop_writes_its_chains_back(tmp_path):
    loop = PublishedLoop(toy_config(tmp_path / "run"), CPU)
    before = loop.buffer.clone()
    x = loop.sample()
    changed = (loop.buffer != before).flatten(1).any(1)
    assert 1 <= int(changed.sum()) <= len(x)
    assert all((row == x).flatten(1).all(1).any() for row in loop.buffer[changed])


def test_the_loop_trains_on_the_same_objective_as_the_unguarded_trainer(tmp_path, monkeypatch):
    """The same images, chains and weights: the same update as our trainer's at beta_star = 0."""
    options = {"lr": 1e-3, "warmup": 0, "beta_star": 0.0}
    loop = PublishedLoop(toy_config(tmp_path / "loop", **options), CPU)
    engine = Engine(toy_config(tmp_path / "ours", **options), CPU)
    loop.f.load_state_dict(engine.trainer.network.state_dict())
    batch, x_neg = loop._batches[0], torch.rand(8, 3, 32, 32) * 2 - 1
    monkeypatch.setattr(loop, "sample", lambda: x_neg)
    monkeypatch.setattr(engine.trainer, "sample_q", lambda *_: x_neg)
    monkeypatch.setattr(engine.trainer.draws, "batch", lambda _: batch)
    # Adam's first step is the gradient's sign almost everywhere: compare the gradients.
    start = [p.detach().clone() for p in loop.f.parameters()]
    with engine.trainer.loss_fn.guard.paused():
        engine.step()
    loop.step()
    engine.close()
    for before, ours, theirs in zip(
        start, engine.trainer.network.parameters(), loop.f.parameters(), strict=True
    ):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert not torch.equal(theirs, before)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


# -- how it is measured ------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [5, 10**6])
def test_rank_correlation_is_scipys(levels):
    x, noise = torch.randint(levels, (200,)).double(), torch.randint(levels, (200,)).double()
    y = x + noise
    expected = spearmanr(x.numpy(), y.numpy()).statistic
    assert jem_parts.rank_correlation(x, y) == pytest.approx(expected, abs=1e-12)


def test_a_common_shift_of_one_side_is_a_difference_of_gaps():
    f_pos, f_neg = torch.randn(64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
    row = list(jem_parts.agreement((f_pos + 0.25, f_neg), (f_pos, f_neg), 8))
    noise = jem_parts.batch_gaps(f_pos, f_neg, 8).std()
    assert row[:2] == ["1.000000", "1.000000"]
    assert row[4] == "0.25"
    assert row[6].startswith("0.25 ± ")
    assert float(row[7]) == pytest.approx(float(0.25 / noise), rel=0.05)


# -- what is written ---------------------------------------------------------------------------


def test_time_of_a_step(command):
    text = command("step")
    assert UNFINISHED not in text
    assert "random bytes" in text
    assert "do not use it" not in text
    for name in (jem_parts.OURS, *jem_parts.LOOPS):
        seconds, cells = rows(text, name)
        assert float(seconds[1]) > 0
        assert len(cells) == 5
    assert rows(text, "loop, TF32")[1][3] == "1.00 (1.00 to 1.00)"
    assert rows(text, "ours, TF32") == [["ours, TF32", "left out: no time"]]


def test_a_variant_that_fails_does_not_stop_the_others(command, monkeypatch):
    made = jem_parts.Bench.made

    def broken(bench, name):
        if name == "loop, TF32":
            raise torch.OutOfMemoryError("no memory\nat all")
        return made(bench, name)

    monkeypatch.setattr(jem_parts.Bench, "made", broken)
    text = command("step")
    assert rows(text, "loop, TF32") == [["loop, TF32", "failed: no memory"]]
    assert len(rows(text, "loop, float32")[1]) == 4


def test_floor(command):
    text = command("floor")
    (cells,) = (line for line in text.splitlines() if line.endswith(") |"))
    assert cells.count("|") == 6


def test_waiting(command):
    text = command("sync")
    assert "Not on a GPU" in text
    assert "Found: none." in text


def test_who_diverges_and_a_second_command_goes_on(command, tmp_path):
    text = command("diverge")
    (first, *others) = rows(text, "2")
    assert int(first[2]) < SIZES["toy"].iterations
    assert first[3] == "not"
    assert [cells[2] for cells in others] == ["left out: no time"]
    text = command("diverge", minutes="5")
    for scenario in "26":
        assert [cells[2:4] for cells in rows(text, scenario)] == [["4", "not"], ["4", "not"]]
    run = tmp_path / "runs" / "scenario-2-beta-star-0"
    lines = (run / "training.jsonl").read_text().splitlines()
    gaps = [json.loads(line)["energy_gap"] for line in lines]
    assert len(gaps) == 4
    assert rows(text, "0")[0][1].endswith(f"({max(map(abs, gaps)):.3g})")


def test_a_diverged_run_is_told_from_its_rows(tmp_path):
    gaps = [1.0, -2.0, "Infinity", 5e5]
    lines = ({"step": i, "cross_entropy": 2.0, "energy_gap": gap} for i, gap in enumerate(gaps))
    (tmp_path / "training.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    alerts = [("INFO", 0), ("WARN", 1), ("WARN", 2), ("ERROR", 3)]
    (tmp_path / "alerts.jsonl").write_text(
        "".join(
            json.dumps({"rule": "r", "level": level, "tag": "t", "step": step}) + "\n"
            for level, step in alerts
        )
    )
    found = jem_parts.Outcome.of(tmp_path)
    assert found.diverged_at == 2
    assert found.steps == 4
    assert found.alerts == ["WARN r (t) at 1", "ERROR r (t) at 3"]
    assert found.by_hundred() == ["2.5e+05 (inf)"]


def test_energies(command):
    text = command("energies")
    for title in ("as initialised", "after 2 updates"):
        exact, tf32, half = rows(text, title)
        assert exact[1:4] == ["float32", "1.000000", "1.000000"]
        assert exact[6] == "0"
        assert tf32[1] == "tf32"
        assert half[1] == "bfloat16"
        assert float(half[6]) > 0
        assert float(half[2]) > 0.9


def test_peak_memory(command):
    text = command("memory")
    ((_, first, later),) = rows(text, jem_parts.OURS)
    assert 0 < float(first) <= float(later)
    assert "loop, TF32: left out" in text


def test_without_data_nothing_is_said_of_divergence(monkeypatch, tmp_path):
    monkeypatch.delenv("EBMGUARD_DATA", raising=False)
    bench = jem_parts.Bench(SIZES["full"], CPU, Clock(1), tmp_path, tmp_path)
    for part in (jem_parts.diverge_part, jem_parts.energies_part):
        assert "".join(part(bench)).startswith("Left out: EBMGUARD_DATA")


def test_without_a_gpu_the_command_says_how_to_try_it(capsys, monkeypatch, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert jem_gpu.main(["--part", "step", "--out", str(tmp_path / "x.md")]) == 2
    assert "--device cpu --size toy" in capsys.readouterr().out
    assert not (tmp_path / "x.md").exists()
    assert sys.modules["benchmarks.jem_gpu"] is jem_gpu
