"""The GPU benchmarks of the trainers, tried on the CPU: what they measure and write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr

from benchmarks import jem_gpu
from benchmarks.contenders import Iterations, JemLoop, ShortRunLoop, step_flop
from benchmarks.gpu_cases import LOOPS, OURS, Bench, RandomImages
from benchmarks.gpu_parts import main, profiled
from benchmarks.jem_gpu import JEM
from benchmarks.shortrun_gpu import SHORTRUN
from benchmarks.timing import Clock
from benchmarks.toy import stage
from ebmguard.errors import ConfigError
from ebmguard.reference_training.jem.runs import so_far
from ebmguard.reference_training.jem.scenarios import SCENARIOS
from ebmguard.reference_training.shortrun.network import EnergyNet
from ebmguard.reference_training.shortrun.presets import CIFAR10
from ebmguard.samplers import sgld
from ebmguard.sinks import read_jsonl

CPU = torch.device("cpu")
CASES = {"jem": JEM, "shortrun": SHORTRUN}
K, LAYERS = 2, 3
"""Langevin steps of the toys, and convolutions of that of short runs."""


def bench_of(case, folder: Path, size="toy") -> Bench:
    folder.mkdir(exist_ok=True)
    return Bench(case, case.sizes[size], CPU, Clock(0), folder / "runs", folder)


def exact(case, out: Path, **options):
    return bench_of(case, out.parent).config(out, **{"precision": "float32", **options})


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture
def command(tmp_path, capsys):
    def run(case, part, *more, minutes="0"):
        """What a part prints."""
        words = ["--measure", part, "--device", "cpu", "--size", "toy", "--minutes", minutes]
        assert main(case, [*words, "--runs", str(tmp_path / "runs"), *more]) == 0
        return capsys.readouterr().out

    return run


def rows(text: str, first: str) -> list[list[str]]:
    """Cells of the table rows that begin with `first`."""
    cells = ([x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines())
    return [row for row in cells if row and row[0] == first]


# -- what is measured --------------------------------------------------------------------------


def jem_layers():
    layers = [(3, 16, 3, 32)]  # channels in and out, kernel, output resolution
    channels = 16
    for wide, before, after in ((160, 32, 32), (320, 32, 16), (640, 16, 8)):
        layers += [(channels, wide, 3, before), (wide, wide, 3, after)]
        layers += [(channels, wide, 1, after)] + 6 * [(wide, wide, 3, after)]
        channels = wide
    return [*layers, (640, 10, 1, 1)]


# At nf = 64.
SHORT = [(3, 64, 3, 32), (64, 128, 4, 16), (128, 256, 4, 8), (256, 512, 4, 4), (512, 1, 4, 1)]


@pytest.mark.parametrize(
    ("loop", "settings", "layers", "langevin", "images"),
    [
        (JemLoop, SCENARIOS["1"], jem_layers(), 20 * 64, 192),
        (JemLoop, SCENARIOS["2"], jem_layers(), 5 * 64, 192),
        (JemLoop, SCENARIOS["3"], jem_layers(), 20 * 8, 136),
        (ShortRunLoop, CIFAR10, SHORT, 100 * 64, 128),
    ],
)
def test_operations_of_a_step(loop, settings, layers, langevin, images):
    flop = [2 * i * o * k * k * r * r for i, o, k, r in layers]
    # No gradient of the images is needed for the parameters'.
    expected = langevin * 2 * sum(flop) + images * (3 * sum(flop) - flop[0])
    assert step_flop(loop, settings, (3, 32, 32)) == expected


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8)])
def test_the_loop_of_short_runs_has_the_same_network(shape):
    channels, size, _ = shape
    ours = EnergyNet(in_channels=channels, image_size=size, nf=4).double()
    settings = exact(SHORTRUN, Path("unused")).settings
    twin = ShortRunLoop.network(settings, shape, 10).double()
    values = zip(twin.state_dict(), ours.state_dict().values(), strict=True)
    twin.load_state_dict(dict(values))
    x = torch.rand(5, *shape, dtype=torch.float64) * 2 - 1
    expected = ours(x)
    assert expected.std() > 0
    torch.testing.assert_close(twin(x), expected)


def test_a_loop_climbs_as_the_samplers_do(case, tmp_path):
    loop = case.loop(exact(case, tmp_path / "run", noise_std=1e-30), CPU)
    x = torch.rand(4, *loop.shape) * 2 - 1
    expected = sgld(loop.f, x, steps=K, step_size=loop.settings.step_size, noise_std=0.0)
    moved = loop.climb(x)
    assert not torch.equal(moved, x)
    torch.testing.assert_close(moved, expected, rtol=0, atol=0)


def test_jems_loop_writes_its_chains_back(tmp_path):
    loop = JemLoop(exact(JEM, tmp_path / "run"), CPU)
    before = loop.buffer.clone()
    x = loop.sample()
    changed = (loop.buffer != before).flatten(1).any(1)
    assert 1 <= int(changed.sum()) <= len(x)
    assert all((row == x).flatten(1).all(1).any() for row in loop.buffer[changed])


def test_jems_loop_trains_on_the_same_objective_as_the_unguarded_trainer(tmp_path, monkeypatch):
    """The same images, chains and weights: the same update as our trainer's at beta_star = 0."""
    options = {"lr": 1e-3, "warmup": 0, "beta_star": 0.0}
    loop = JemLoop(exact(JEM, tmp_path / "loop", **options), CPU)
    ours = Iterations(JEM.task, exact(JEM, tmp_path / "ours", **options))
    trainer = ours.task.trainer
    loop.f.load_state_dict(trainer.network.state_dict())
    batch, x_neg = loop._batches[0], torch.rand(8, 1, 8, 8) * 2 - 1
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
    loop = ShortRunLoop(exact(SHORTRUN, tmp_path / "run"), CPU)
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


def test_the_loop_of_short_runs_draws_noisy_images_and_chains(tmp_path):
    loop = ShortRunLoop(exact(SHORTRUN, tmp_path / "run", batch=2000, noise_std=0.5), CPU)
    x = loop.draw()
    # Of nearest images, the rest is the noise.
    apart = (x[:50, None] - loop.images).flatten(2).square().mean(2).min(1).values.sqrt()
    assert apart.mean() == pytest.approx(loop.settings.data_noise, rel=0.05)
    for p in loop.f.parameters():
        p.data.zero_()
    chains = loop.sample()  # on a flat energy: U(-1, 1) and the noise of each step
    assert chains.var() == pytest.approx(1 / 3 + K * 0.5**2, rel=0.02)


def test_one_iteration_at_a_time_is_the_whole_training(case, tmp_path):
    whole, stepped = (exact(case, tmp_path / name, iterations=3) for name in "ab")
    assert case.train(*whole.open()) is not None
    run = Iterations(case.task, stepped)
    for _ in range(3):
        run.step()
    run.close()
    run.close()
    for name in ("metrics.jsonl",):
        found = [list(read_jsonl(each.out / name)) for each in (whole, stepped)]
        assert len(found[0]) == 3
        pd.testing.assert_frame_equal(*map(pd.DataFrame, found), check_exact=True)


def test_without_data_random_images_stand_in_for_cifar10(case, monkeypatch, tmp_path):
    monkeypatch.delenv("EBMGUARD_DATA", raising=False)
    bench = bench_of(case, tmp_path, "full")
    config = bench.config(tmp_path / "run", train_images=20, test_images=10)
    assert isinstance(config, RandomImages)
    data = config.load_data()
    assert (len(data.train_x), len(data.test_x), data.sample_shape) == (20, 10, (3, 32, 32))
    assert "random bytes instead of cifar10" in str(bench)
    assert {"jem": "WRN-28-10", "shortrun": "nf = 64, batch 64, K = 100"}[
        case.command.split()[-1]
    ] in str(bench)
    for part in case.parts.values():
        assert "".join(part.text(bench)).startswith("Left out: EBMGUARD_DATA")


@pytest.mark.parametrize("logs", [False, True])
def test_toys_stand_still_and_write_where_that_is_asked(logs):
    with stage(CPU) as made:
        ensemble = made.ensemble("gmm-default", 1, logs=logs)
        parameters = list(ensemble.task.network.parameters())
        before = [p.detach().clone() for p in parameters]
        for _ in range(3):
            ensemble.step()
        ensemble.close()
        # Adam's steps are of the learning rate, under the last bit of weights.
        torch.testing.assert_close(parameters, before, rtol=0, atol=1e-11)
        rows = ensemble.task.record.folder.path / "metrics.jsonl"
        assert len(list(read_jsonl(rows)) if rows.is_file() else []) == 3 * logs


# -- how it is measured ------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [5, 10**6])
def test_rank_correlation_is_scipys(levels):
    x, noise = torch.randint(levels, (200,)).double(), torch.randint(levels, (200,)).double()
    y = x + noise
    expected = spearmanr(x.numpy(), y.numpy()).statistic
    assert jem_gpu.rank_correlation(x, y) == pytest.approx(expected, abs=1e-12)


def test_a_common_shift_of_one_side_is_a_difference_of_gaps():
    f_pos, f_neg = torch.randn(64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
    row = list(jem_gpu.agreement((f_pos + 0.25, f_neg), (f_pos, f_neg), 8))
    noise = jem_gpu.batch_gaps(f_pos, f_neg, 8).std()
    assert row[:2] == ["1.000000", "1.000000"]
    assert row[4] == "0.25"
    assert row[6].startswith("0.25 ± ")
    assert float(row[7]) == pytest.approx(float(0.25 / noise), rel=0.05)


@pytest.mark.parametrize(("name", "passes"), [("loop, TF32", 2), (OURS, 1)])
def test_operations_are_counted_as_the_profiler_sees_them(tmp_path, name, passes):
    """Of a convolution each: K calls by the sampler; the loop passes data and negatives apart."""
    counts, seconds = profiled(bench_of(SHORTRUN, tmp_path), name)
    assert counts["aten::convolution"] == (K + passes) * LAYERS
    assert seconds["aten::convolution"] > 0


# -- what is written ---------------------------------------------------------------------------


def test_time_of_a_step(case, command):
    text = command(case, "step")
    assert "do not use it" not in text
    for name in (OURS, *LOOPS):
        seconds, cells = rows(text, name)
        assert float(seconds[1]) >= 0
        assert len(cells) == 5
    assert rows(text, "loop, TF32")[1][3] == "1.00 (1.00 to 1.00)"
    assert rows(text, "ours, TF32") == [["ours, TF32", "left out: no time"]]


def test_a_variant_that_fails_does_not_stop_the_others(command, monkeypatch):
    made = Bench.made

    def broken(bench, name):
        if name == "loop, TF32":
            raise torch.OutOfMemoryError("no memory\nat all")
        return made(bench, name)

    monkeypatch.setattr(Bench, "made", broken)
    text = command(JEM, "step")
    assert rows(text, "loop, TF32") == [["loop, TF32", "failed: no memory"]]
    assert len(rows(text, "loop, float32")[1]) == 4


def test_floor_kernels_and_waiting(case, command):
    text = "".join(command(case, part) for part in ("floor", "kernels", "sync"))
    (cells,) = (line for line in text.splitlines() if line.endswith(") |"))
    assert cells.count("|") == 6
    assert f"{OURS}: " in text
    assert "`aten::" in text
    assert "loop, TF32: left out, no time." in text
    assert "Not on a GPU" in text
    assert "Found: none." in text


def test_peak_memory(case, command, monkeypatch):
    asked = []

    def run(words, **_):
        if "--memory-of" in words:
            asked.append(words)
        return subprocess.CompletedProcess(words, 0, stdout='noise\n{"first": 1.0, "later": 2.5}\n')

    monkeypatch.setattr(subprocess, "run", run)
    text = command(case, "memory")
    assert asked[0][-2:] == ["--memory-of", OURS]
    assert asked[0][:3] == [sys.executable, "-m", case.module]
    assert rows(text, OURS) == [[OURS, "1.00", "2.50"]]
    assert "loop, TF32: left out" in text


def test_memory_of_a_variant(case, command):
    said = command(case, "memory", "--memory-of", "loop, float32")
    first, later = json.loads(said.splitlines()[-1]).values()
    assert 0 < first <= later


def test_who_diverges_and_a_second_command_goes_on(command, tmp_path):
    text = command(JEM, "diverge")
    (first, *others) = rows(text, "2")
    assert int(first[2]) < JEM.sizes["toy"].more["iterations"]
    assert first[3] == "not"
    assert [cells[2] for cells in others] == ["left out: no time"]
    text = command(JEM, "diverge", minutes="5")
    for scenario in "26":
        assert [cells[2:4] for cells in rows(text, scenario)] == [["4", "not"], ["4", "not"]]
    run = tmp_path / "runs" / "scenario-2-beta-star-0"
    gaps = [row["energy_gap"] for row in read_jsonl(run / "metrics.jsonl")]
    assert len(gaps) == 4
    assert rows(text, "0")[0][1].endswith(f"({max(map(abs, gaps)):.3g})")


def test_a_diverged_run_is_told_from_its_rows(tmp_path):
    gaps = [1.0, -2.0, "Infinity", 5e5]
    lines = ({"step": i, "cross_entropy": 2.0, "energy_gap": gap} for i, gap in enumerate(gaps))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    alerts = [("INFO", 0), ("WARN", 1), ("WARN", 2), ("ERROR", 3)]
    (tmp_path / "alerts.jsonl").write_text(
        "".join(
            json.dumps({"rule": "r", "level": level, "tag": "t", "step": step}) + "\n"
            for level, step in alerts
        )
    )
    assert jem_gpu.first_alerts(tmp_path) == "WARN r (t) at 1; ERROR r (t) at 3"
    assert jem_gpu.gaps_by_hundred(tmp_path).to_dict() == {0: "2.5e+05 (inf)"}
    assert so_far(tmp_path) == (4, 2)


def test_energies(command):
    text = command(JEM, "energies")
    for title in ("as initialised", "after 2 updates"):
        exact, tf32, half = rows(text, title)
        assert exact[1:4] == ["float32", "1.000000", "1.000000"]
        assert exact[6] == "0"
        assert tf32[1] == "tf32"
        assert half[1] == "bfloat16"
        assert float(half[6]) > 0
        assert float(half[2]) > 0.9


def test_a_training_is_judged_and_a_second_command_goes_on(command, tmp_path):
    text = command(SHORTRUN, "train")
    assert "1 of 40 updates, 1 of them by this command" in text
    assert len(rows(text, "0")) == 1
    for judged in ("samples, 2 steps from noise", "held-out images", "uniform noise"):
        assert float(rows(text, judged)[0][-1]) >= 0
    assert "classifier" in text
    judge = ("--features", str(tmp_path / "runs" / "classifier"))
    text = command(SHORTRUN, "train", *judge, minutes="5")
    assert "40 of 40 updates, 39 of them by this command" in text
    assert len(rows(text, "0")) == 1
    assert len(rows(text, "30")) == 1
    assert "Nothing was left" in command(SHORTRUN, "train", *judge, minutes="5")


def test_features_that_are_none_are_refused_before_the_training(command, tmp_path):
    with pytest.raises(ConfigError, match="features"):
        command(SHORTRUN, "train", "--features", "nothing")
    assert not (tmp_path / "runs").exists()


def test_without_a_gpu_the_command_says_how_to_try_it(case, capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(case, ["--part", "step", "--out", str(tmp_path / "x.md")]) == 2
    assert "--device cpu --size toy" in capsys.readouterr().out
    assert not (tmp_path / "x.md").exists()
