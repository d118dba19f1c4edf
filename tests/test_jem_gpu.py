"""The GPU benchmark of the JEM trainer, tried on the CPU: what its parts measure and write."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

from benchmarks import jem_gpu, jem_parts
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


def test_turns_alternate_there_and_back():
    calls: list[str] = []
    turns = {
        name: jem_parts.Turn(partial(calls.append, name), 2, partial(calls.append, "|"))
        for name in "ab"
    }
    found = jem_parts.alternate(turns, jem_parts.Clock(0), CPU)
    assert "".join(calls) == "|aa|bb|bb|aa|aa|bb"
    assert {name: len(values) for name, values in found.items()} == {"a": 3, "b": 3}


def test_compilations_are_counted():
    before = jem_parts.compilations()
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
    assert jem_parts.compilations() == before + 1


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


def waits():
    warnings.warn("called a synchronizing CUDA operation", stacklevel=1)


def test_synchronising_calls_are_found_with_their_place():
    with jem_parts.synchronising_calls() as places:
        for _ in range(3):
            waits()
    ((place, times),) = places.items()
    assert times == 3
    assert "warnings.warn(" in place
    assert "test_jem_gpu.py" in place


def test_the_place_is_the_projects_own_line():
    within: dict[str, Callable[..., None]] = {}
    exec(compile("def call(f):\n    f()\n", "/at/reference_training/some.py", "exec"), within)
    with jem_parts.synchronising_calls() as places:
        within["call"](waits)
    assert [place.endswith("at/reference_training/some.py:2)") for place in places] == [True]


def test_other_warnings_are_shown():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with jem_parts.synchronising_calls() as places:
            warnings.warn("something else", stacklevel=1)
    assert not places
    assert [str(warning.message) for warning in shown] == ["something else"]


def test_whole_iterations_are_watched():
    modes: list[tuple[int, str]] = []
    now = 0
    watch = jem_parts.SyncWatch(2, 3, lambda mode: modes.append((now, mode)))
    for now in range(1, 9):
        watch.step(now, {})
    assert modes == [(2, "warn"), (5, "default")]


# -- what is written ---------------------------------------------------------------------------


def test_a_section_is_replaced_and_all_else_is_kept(tmp_path):
    file = tmp_path / "results" / "jem.md"
    document = jem_gpu.Document(file)
    document.put("Peak memory", "old")
    text = file.read_text().replace(jem_gpu.HEADER, jem_gpu.HEADER + "\nA word before.\n")
    file.write_text(text + "\n## What it means\n\nBy hand.\n")
    document.put("Time of a step", "first")
    document.put("Peak memory", "new")
    assert file.read_text() == (
        "# The JEM trainer on a GPU\n\nA word before.\n\n"
        "## Time of a step\n\nfirst\n\n## Peak memory\n\nnew\n\n## What it means\n\nBy hand.\n"
    )


def test_a_part_that_is_cut_short_leaves_what_it_had(tmp_path):
    document = jem_gpu.Document(tmp_path / "jem.md")

    def part():
        yield "known\n"
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        jem_gpu.write_part(document, "Time of a step", "source", part())
    assert document.path.read_text().endswith(f"source\n\nknown\n\n{jem_gpu.UNFINISHED}\n")


def test_time_of_a_step(command):
    text = command("step")
    assert jem_gpu.UNFINISHED not in text
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
    assert found.record.diverged_at == 2
    assert found.record.next_step == 4
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
    bench = jem_parts.Bench(SIZES["full"], CPU, jem_parts.Clock(1), tmp_path, tmp_path)
    for part in (jem_parts.diverge_part, jem_parts.energies_part):
        assert "".join(part(bench)).startswith("Left out: EBMGUARD_DATA")


def test_all_parts_share_the_time(monkeypatch):
    asked: dict[str, float] = {}

    def run(words, *, check, timeout):
        if words[0] == "floor":
            raise subprocess.CalledProcessError(1, words)
        assert check
        asked[words[0]] = timeout

    monkeypatch.setattr(subprocess, "run", run)
    # Time stands still, so that every part gets its first share of all of it.
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    failed = list(jem_gpu.run_all(lambda part, minutes: [part, f"{minutes:.2f}"], 12))
    assert len(failed) == 1
    assert failed[0].startswith("floor: ")
    assert list(asked) == ["step", "sync", "diverge", "energies", "memory"]
    assert asked["step"] == pytest.approx(12 * 60 * 3 / 12 + jem_gpu.GRACE)


def test_what_finds_no_time_is_said(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("no time is left"))
    failed = list(jem_gpu.run_all(lambda part, minutes: [part], 0))
    assert failed == [f"{part}: no time" for part in jem_gpu.SHARES]


def test_without_a_gpu_the_command_says_how_to_try_it(capsys, monkeypatch, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert jem_gpu.main(["--part", "step", "--out", str(tmp_path / "x.md")]) == 2
    assert "--device cpu --size toy" in capsys.readouterr().out
    assert not (tmp_path / "x.md").exists()
    assert sys.modules["benchmarks.jem_gpu"] is jem_gpu
