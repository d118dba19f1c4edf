"""Every kind of run of every trainer that Ctrl-C stops goes on to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ebmguard.reference_training.bism import deep_train
from ebmguard.reference_training.bism import train as rbm_train
from ebmguard.reference_training.bism.config import BismConfig
from ebmguard.reference_training.bism.deep_config import DeepConfig
from ebmguard.reference_training.jem import train as jem_train
from ebmguard.reference_training.shortrun import train as shortrun_train
from ebmguard.reference_training.toy import train as toy_train
from tests.reference_training.bism.parts import SMALL
from tests.reference_training.jem.parts import (
    Silent,
    assert_same_run,
    newest,
    same,
    saved,
    steps_of,
)
from tests.reference_training.jem.parts import config_for as jem
from tests.reference_training.shortrun.parts import config_for as shortrun
from tests.reference_training.toy.parts import config_for as toy
from tests.reference_training.toy.parts import small_evaluations


class Trainer(NamedTuple):
    train: Callable[..., dict[str, Any] | None]
    config_for: Callable[..., Any]
    stops: tuple[int, ...]
    kinds: dict[str, dict[str, Any]]


def of_bism(kind: Any) -> Callable[..., Any]:
    return lambda out, **options: kind(out=out, **{**SMALL[kind], **options})


TOYS = ("gmm-default", "circles-degenerate", "mixture1d-restricted", "gmm-good+exploding")
BETAS = (("0", "0.5"), ("0:0.9", "0.3"), ("0.1+0.5+0.9", "0.3"), ("0.1+0.2:0.9", "0.3"))
PSEUDO: dict[str, Any] = {"model": "wide", "method": "pcd2"}
TRAINERS = {
    "jem": Trainer(
        jem_train.train,
        jem,
        (4,),
        {
            "no guard": {"beta_star": 0.0},
            "a classifier": {"p_x_weight": 0.0, "n_labelled": 5, "valid_images": 30},
            "p(x, y)": {"p_x_weight": 0.0, "p_x_y_weight": 1.0},
            "all": {"p_x_y_weight": 0.5, "class_conditional": True, "n_labelled": 5},
            "quality": {"quality_samples": 20, "valid_images": 30},
            "epochs": {
                "scenario": "2",
                "depth": 10,
                "width": 1,
                "n_labelled": 5,
                "train_images": 40,
            },
            "variant": {"variant": "true", "noise_std": 0.0},
        },
    ),
    "jem at any step": Trainer(jem_train.train, jem, (1, 3, 4, 8), {"": {}}),
    "shortrun": Trainer(
        shortrun_train.train,
        shortrun,
        (9,),
        {
            "no guard": {"beta_star": 0.0},
            "random K": {"most_sgld_steps": 7},
            "persistent": {"init": "persistent", "buffer_size": 20, "optimizer": "sgd"},
            "finer steps": {"beta_star": 2000.0, "most_steps": 4, "most_sgld_steps": 5, "lr": 0.01},
            "bfloat16": {"precision": "bfloat16", "sample_every": 1, "checkpoint_every": 100},
        },
    ),
    "toy": Trainer(
        toy_train.train,
        toy,
        (7,),
        {name: {"scenario": name, "betas": b} for name, b in zip(TOYS, BETAS, strict=True)},
    ),
    "rbm": Trainer(
        rbm_train.train,
        of_bism(BismConfig),
        (17,),
        {
            "bidsm": {},
            "fresh": {"fresh_inner": True},
            "vnce": {"method": "vnce"},
            "pcd3": {"method": "pcd3"},
        },
    ),
    "deep": Trainer(
        deep_train.train,
        of_bism(DeepConfig),
        (8,),
        {
            "bimdsm": {},
            "unrolled": {"unrolled_steps": 2},
            "bits": {"posterior": "bernoulli", "method": "bidsm"},
            "visible": {"model": "visible"},
            "pcd2": PSEUDO,
            "cold": {"method": "sr3"},
            "warm": {"method": "psr3"},
        },
    ),
}
LONGER = {"shortrun": {"iterations": 12}}


@pytest.mark.parametrize(
    ("name", "kind", "stop"),
    [
        (name, kind, stop)
        for name, own in TRAINERS.items()
        for kind in own.kinds
        for stop in own.stops
    ],
)
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, monkeypatch, name, kind, stop):
    small_evaluations(monkeypatch)
    train, config_for, _, kinds = TRAINERS[name]
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def go(config: Any, reporter: Silent) -> dict[str, Any] | None:
        return train(*config.open(), reporter)

    def config(out: Path) -> Any:
        return config_for(out, **LONGER.get(name, {}), **kinds[kind])

    assert go(config(whole), Silent()) is not None
    assert go(config(cut), Silent(interrupt_after=stop)) is None
    assert newest(cut).name == f"step-{stop:08d}.pt"
    assert steps_of(cut, "metrics.jsonl") == list(range(stop))
    assert not (cut / "results.json").exists()
    resumed = Silent()
    assert go(type(config(cut))(out=cut, resume=True), resumed) is not None
    assert resumed.started[1] == stop
    assert_same_run(whole, cut)


@pytest.mark.parametrize("name", ["jem", "shortrun", "toy", "rbm", "deep"])
def test_the_same_seed_is_the_same_bits_and_another_one_others(tmp_path, monkeypatch, name):
    small_evaluations(monkeypatch)
    train, config_for, _, _ = TRAINERS[name]
    for run, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(*config_for(tmp_path / run, seed=seed).open(), Silent())
    assert_same_run(tmp_path / "a", tmp_path / "b")
    a, c = saved(tmp_path / "a"), saved(tmp_path / "c")
    for part in a.keys() & {"network", "model", "optimizer", "update", "buffer", "draws"}:
        assert not same(a[part], c[part]), part
