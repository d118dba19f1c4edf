"""Every study of the same small runs: its recorded numbers, its pictures and its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.image import imread

from ebmguard.cli import main
from ebmguard.errors import ConfigError, DiskError
from ebmguard.reference_training.bism.config import BismConfig
from ebmguard.reference_training.bism.methods import Levels
from ebmguard.reference_training.bism.train import train
from ebmguard.reference_training.jem.runs import find_runs
from ebmguard.reference_training.studies import command, shortrun
from ebmguard.reference_training.studies.bilevel import exact_posterior, gradient_bias
from ebmguard.reference_training.studies.command import MODULES, find, numbers, run
from ebmguard.reference_training.studies.config import BilevelFigure, ShortRunFigure, ToyFigure
from ebmguard.reference_training.studies.jem_tables import page
from ebmguard.reference_training.studies.study import frame_of, plain, text
from ebmguard.reference_training.studies.toy import FIGURES, load_run, training
from ebmguard.sinks import to_json
from tests.reference_training.jem import fabricate as jem
from tests.reference_training.jem.fabricate import OWN, made_up_evaluation
from tests.reference_training.parts import rbm, tiny_run, trained_folder
from tests.reference_training.studies import small
from tests.reference_training.studies.small import RECORDED, assert_no_text_on_text, assert_recorded
from tests.reference_training.studies.test_jem import made
from tests.reference_training.toy.fabricate import write_run


def test_every_study_is_recorded():
    # 21 to 25 are 20 of other scenarios.
    assert set(RECORDED) == set(MODULES) - {"21", "22", "23", "24", "25"}


@pytest.mark.parametrize("name", FIGURES)
def test_toys(name: Any, tmp_path):
    config, runs = ToyFigure(name=name, out=tmp_path), []
    for scenario in FIGURES[name].scenarios:
        lost = scenario.startswith(("circles", "gmm-exploding")) and name in ("6", "mixture")
        own = training(config, scenario)
        write_run(own, diverged={"0": 1200} if lost else None, resolution=16, samples=20)
        runs.append(load_run(own.out))
    study = find(name)
    frame = study.numbers(runs, config)
    assert_recorded(name, numbers(study, frame)["rows"])
    if name in ("1d", "7", "8", "mixture"):  # each other layout is drawn where a figure is trained
        for figure in study.drawn(frame).values():
            assert_no_text_on_text(figure)


SHORT_RUNS: dict[str, tuple[Any, int | None]] = {
    "12": (small.courses, None),
    **dict.fromkeys(("13", "14"), (small.chains, 40)),
    "15": (small.chains, 16),
    "interpolation": (small.flows, 4),
    "steps": (small.chains, 12),
    "long-run": (small.long_chains, 12),
}


@pytest.mark.parametrize("name", SHORT_RUNS)
def test_short_runs(tmp_path, name):
    make, count = SHORT_RUNS[name]
    small.recorded(name, make(tmp_path) if name == "12" else make(), count)


@pytest.fixture(scope="module")
def jem_runs(tmp_path_factory):
    """Runs made by hand: healthy, lost, unfinished, of two setups and two scenarios."""
    folder = tmp_path_factory.mktemp("jem")
    lost = [{"rule": "energy_blowup", "level": "ERROR", "step": 457}]
    early, all_along = (0, 300, 400, 500), (0, *range(100, 1200, 100))
    runs: dict[str, dict[str, Any]] = {
        "zero": {"diverged_at": 460, "samples": early, "alerts": lost},
        "half-0": {"beta_star": 0.5, "samples": all_along},
        "half-1": {"beta_star": 0.5, "seed": 1},
        "ten": {"beta_star": 10, "steps": 700, "finished": False, "samples": (0, 600)},
    }
    own: dict[str, Any] = {"scenario": "2", "data": "digits"}
    own["evaluate"] = lambda *given: made_up_evaluation(*given) | OWN
    runs |= {f"other-{beta_star}": own | {"beta_star": beta_star} for beta_star in (0, 1)}
    small: dict[str, Any] = {"iterations": 1200, "steps_per_epoch": 100, "depth": 10, "width": 1}
    for name, settings in runs.items():
        jem.write_run(folder / name, train_images=640, **small, **settings)
    return folder


@pytest.mark.parametrize("name", ["3", "4", "16", "17", "18", "19", "20"])
def test_jem(name: Any, jem_runs):
    found = made(name, jem_runs)[1]
    kept = [{k: row[k] for k in told} for row, told in zip(found, RECORDED[name], strict=True)]
    assert kept == RECORDED[name]


def test_tables_of_jem_runs(jem_runs):
    assert page(find_runs([jem_runs])) == (Path(__file__).parent / "jem_tables.md").read_text(
        encoding="utf-8"
    )


def test_a_run_is_opened_drawn_and_written(tmp_path, capsys):
    path = trained_folder(tmp_path / "run")
    capsys.readouterr()
    picture = tmp_path / "there.png"
    config = ShortRunFigure(name="12", runs=(path,), out=picture, device="cpu")
    assert command.run(config) == 0
    printed = capsys.readouterr().out
    assert "- run: digits, β* = 0.02, K = 3, 6 updates, nf " in printed
    assert "with every step up of β*: cannot be told.\n" in printed
    assert printed.endswith(f"picture: {picture}\nnumbers: {tmp_path / 'there.json'}\n")
    assert imread(picture).shape[1] > 500
    (row,) = json.loads((tmp_path / "there.json").read_text())["rows"]
    assert row["updates"] == len(row["f_pos"]) == 6
    (tmp_path / "there.json").unlink()
    (tmp_path / "there.json").mkdir()
    with pytest.raises(DiskError, match=r"there\.json could not be written"):
        command.run(config)


def test_numbers_as_text_and_as_plain_values():
    rows = [
        {"about": "a: digits", "run": "a", "f": np.nan, "n": 1234, "images": torch.zeros(2)},
        {"about": "b: digits", "run": "b", "f": np.inf, "course": np.array([1.5, np.nan])},
    ]
    frame = frame_of(rows)
    assert text(frame) == (
        "- a: digits\n- b: digits\n\n"
        "| run |         f |     n |\n"
        "| --- | --------: | ----: |\n"
        "| a   | undefined | 1,234 |\n"
        "| b   |         ∞ |     – |"
    )
    assert to_json(plain(frame)) == [
        {"about": "a: digits", "run": "a", "f": "NaN", "n": 1234},
        {"about": "b: digits", "run": "b", "f": "Infinity", "course": [1.5, "NaN"]},
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"count": 0}, "count is 0, expected 1 or more"),
        ({"runs": (), "seed": -1}, r"seed is -1, expected 0 or more(.|\n)*runs is empty, expected"),
        ({"out": "x.json"}, r"a picture's name ends in one of .*png"),
        ({"out": "folder.png"}, r"folder\.png cannot be written: expected a file"),
        ({"device": "quantum"}, "device is 'quantum'"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_opened(
    settings, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(shortrun, "load_run", lambda *_: pytest.fail("a run was opened"))
    (tmp_path / "folder.png").mkdir()
    given = {"runs": (tmp_path,), "out": "x.png", **settings}
    given["out"] = tmp_path / given["out"]
    with pytest.raises(ConfigError, match=words):
        command.run(ShortRunFigure(name="long-run", **given))


def refused(name: Any, words: str, runs: int = 1, **given: Any) -> None:
    """The study of so many runs ends in an error of these words."""
    own = [tiny_run(f"kept{i}", activation="gelu", **given) for i in range(runs)]
    with pytest.raises(ConfigError, match=words):
        command.find(name).numbers(own, ShortRunFigure(name=name, runs=()))


@pytest.mark.parametrize("name", ["13", "15", "steps", "reconstruction"])
def test_persistent_chains_are_refused(name):
    what = f"^Figure {name} draws negatives as in training"
    words = what + ".*kept0 were persistent and are not kept.*--init noise"
    refused(name, words, init="persistent", buffer_size=20)


@pytest.mark.parametrize(("name", "room"), [("steps", 12), ("likelihood", 4)])
def test_more_runs_than_there_is_room_for_are_refused(name, room):
    refused(name, f"room for {room} runs, and {room + 1} were given", runs=room + 1)


@pytest.mark.parametrize(
    ("name", "column", "values", "verdict"),
    [
        ("12", "gap", (0.1, 0.2, 0.3, 9.0, 0.9), "holds."),
        ("12", "gap", (0.1, 0.2, 0.9, 0.8, 0.5), "does not hold."),
        ("13", "above", (0.6, 0.2, 0.25, 0.3, 0.9), "holds."),
        ("15", "distance", (0.1, 0.4, np.nan, 0.3, 0.9), "cannot be told."),
        ("14", "rise", (0.1, 2.0, None, 2.5, 3.0), "holds."),
        ("14", "rise", (0.1, -2.0, None, -1.0, 3.0), "does not hold."),
    ],
)
def test_claims_on_beta_are_told_by_the_medians_of_seeds(name, column, values, verdict):
    rows = [
        {"beta_star": beta_star, column: value}
        for beta_star, value in zip((0.0, 2.0, 2.0, 2.0, 3.0), values, strict=True)
    ]
    # Of Figure 15 there are rows of data too.
    others = [{"beta_star": None, column: 9.0}] if name == "15" else []
    assert command.find(name).verdict(frame_of([*rows, *others])).endswith(f": {verdict}")


@pytest.mark.parametrize("follows", [True, False])
def test_where_the_upper_loss_is_quadratic_all_is_known(follows):
    # J = a/2 |phi|^2 + b <phi, phi*(theta)>: its second derivatives are a and b everywhere.
    model, a, b = rbm(), 0.7, 0.4
    goal = exact_posterior(model)
    size = torch.cat([x.reshape(-1) for x in goal.values()]).norm().item()
    apart = {n: torch.full_like(x, 0.1) for n, x in goal.items()}
    after = {n: (x if follows else x.detach()) + apart[n] for n, x in goal.items()}

    def upper(phi):
        return sum(a / 2 * x.square().sum() + b * (x * goal[n]).sum() for n, x in phi.items())

    before = {n: x.detach() + 3 * apart[n] for n, x in goal.items()}
    norms, error = gradient_bias(model, Levels(before, after, upper))
    distance = 0.1 * 12**0.5
    assert norms["distance"] == pytest.approx(distance)
    assert norms["drift"] == pytest.approx(2 * distance)
    assert norms["left"] == pytest.approx(1 / 3)
    assert norms["gradient"] == pytest.approx((a + 2 * b) * size)
    assert norms["error"] == pytest.approx(error.norm().item())
    if follows:  # D_N = D*: nothing but the distance is left, and the bound is met
        assert norms["error"] == pytest.approx((a + b) * distance)
        assert norms["bound"] == pytest.approx((a + b) * distance)
    else:
        assert norms["bound"] == pytest.approx(b * distance + (a + b) * size)
        assert norms["error"] < norms["bound"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    options: dict[str, Any] = {"iterations": 5, "batch": 20, "evaluations": 1, "test_samples": 50}
    for n, k, seed in ((2, 2, 0), (2, 2, 1), (0, 2, 0), (2, 0, 0)):
        own: dict[str, Any] = {"unrolled_steps": n, "inner_steps": k, "seed": seed}
        out = folder / f"{n}_{k}_{seed}"
        train(*BismConfig(out=out, fresh_inner=k == 0, **own, **options).open())
    train(*BismConfig(out=folder / "dsm", method="dsm", **options).open())
    return folder


def test_figure_of_runs(runs, tmp_path):
    words = [str(path) for path in sorted(runs.glob("?_*"))]
    options = ["--minibatches", "3", "--out", str(tmp_path / "f.png")]
    assert main(["figure", "bilevel", "--runs", *words, *options]) == 0
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert_recorded("bilevel", rows)
    steps = [(row["unrolled_steps"], row["inner_steps"], row["runs"]) for row in rows]
    assert steps == [(0, 2, 1), (2, 0, 1), (2, 2, 2)]
    assert (rows[0]["drift"], rows[0]["left"]) == (0, 1)
    files = [runs / f"2_2_{seed}" / "results.json" for seed in range(2)]
    of_seeds = [json.loads(file.read_text())["log_likelihood"] for file in files]
    assert rows[2]["log_likelihood"] == pytest.approx(sum(of_seeds) / 2)
    study = find("bilevel")
    for figure in study.drawn(pd.DataFrame(rows)).values():
        assert_no_text_on_text(figure)
    with pytest.raises(ConfigError, match=r"dsm holds no run of .* by bidsm, bissm or bimdsm"):
        run(BilevelFigure(name="bilevel", out=tmp_path / "g.png", runs=(runs / "dsm",)))
