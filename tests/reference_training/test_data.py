from __future__ import annotations

import sys

import pytest
import torch
from sklearn.datasets import load_digits as sklearn_digits

from ebmguard.reference_training.data import load_digits


def test_digits_are_the_images_of_scikit_learn_each_once():
    data = load_digits()
    assert data.train_x.shape == (1437, 1, 8, 8)
    assert data.test_x.shape == (360, 1, 8, 8)
    assert data.train_x.dtype == torch.float32
    assert data.train_y.dtype == torch.int64
    ours = torch.cat([data.train_x, data.test_x]).flatten(1)
    assert (float(ours.min()), float(ours.max())) == (-1, 1)
    labels = torch.cat([data.train_y, data.test_y])
    bundle = sklearn_digits()
    grey = (ours + 1) * 8
    found = sorted((*row, y) for row, y in zip(grey.tolist(), labels.tolist(), strict=True))
    theirs = sorted((*row, y) for row, y in zip(bundle.data, bundle.target, strict=True))
    assert found == theirs


def test_split_is_stratified_and_fixed():
    data = load_digits()
    share = data.test_y.bincount(minlength=10) / 360
    assert (share - 0.1).abs().max() < 0.01
    assert torch.equal(load_digits().test_x, data.test_x)


def test_without_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'pip install "ebmguard\[train\]"'):
        load_digits()


def test_to_moves_every_tensor():
    data = load_digits().to(torch.device("meta"))
    assert {data.train_x.device.type, data.train_y.device.type} == {"meta"}
    assert {data.test_x.device.type, data.test_y.device.type} == {"meta"}
    assert data.sample_shape == (1, 8, 8)
