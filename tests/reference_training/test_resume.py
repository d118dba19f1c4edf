"""Every kind of run of every trainer goes on from its last checkpoint but one to the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from ebmguard.reference_training.bism import deep_train
from ebmguard.reference_training.bism import train as rbm_train
from ebmguard.reference_training.bism.config import BismConfig, DeepConfig
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
)
from tests.reference_training.jem.parts import config_for as jem
from tests.reference_training.shortrun.parts import config_for as shortrun
from tests.reference_training.toy.parts import config_for as toy
from tests.reference_training.toy.parts import small_evaluations


class Trainer(NamedTuple):
    train: Callable[..., dict[str, Any] | None]
    config_for: Callable[..., Any]
    every: int  # steps between checkpoints
    kinds: dict[str, dict[str, Any]]


def of_bism(kind: Any) -> Callable[..., Any]:
    return lambda out, **options: kind(out=out, **{**SMALL[kind], **options})


TOYS = {
    "gmm-default": ("0:0.9", "0.3"),
    "circles-degenerate": ("0", "0.5"),
    "mixture1d-restricted": ("0.1+0.5+0.9", "0.3"),
    "gmm-good+exploding": ("0", "0.5"),
}
PSEUDO: dict[str, Any] = {"model": "wide", "method": "pcd2"}
TRAINERS = {
    "jem": Trainer(
        jem_train.train,
        jem,
        4,
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
    "shortrun": Trainer(
        shortrun_train.train,
        shortrun,
        9,
        {
            "no guard": {"beta_star": 0.0},
            "random K": {"most_sgld_steps": 7},
            "persistent": {"init": "persistent", "buffer_size": 20, "optimizer": "sgd"},
            "bfloat16": {"precision": "bfloat16", "sample_every": 1, "checkpoint_every": 100},
        },
    ),
    "toy": Trainer(
        toy_train.train,
        toy,
        7,
        {name: {"scenario": name, "betas": betas} for name, betas in TOYS.items()},
    ),
    "rbm": Trainer(
        rbm_train.train,
        of_bism(BismConfig),
        17,
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
        8,
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
    ("name", "kind"), [(name, kind) for name, own in TRAINERS.items() for kind in own.kinds]
)
def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path, monkeypatch, name, kind):
    """Ctrl-C writes one as it does every so many steps: see test_fourth_task.py."""
    small_evaluations(monkeypatch)
    train, config_for, every, kinds = TRAINERS[name]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = {**LONGER.get(name, {}), **kinds[kind], "checkpoint_every": every}
    config, resumed = config_for(whole, **settings), Silent()
    assert train(*config.open(), Silent()) is not None
    shutil.copytree(whole, cut)
    newest(cut).unlink()
    (cut / "results.json").unlink()
    assert train(*type(config)(out=cut, resume=True).open(), resumed) is not None
    assert 0 < resumed.started[1] < resumed.started[2]
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
