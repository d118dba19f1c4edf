from __future__ import annotations

import sys

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import load_data


def test_digits_are_the_images_of_scikit_learn_each_once():
    data = load_data("digits")
    assert data.train_x.shape == (1437, 1, 8, 8)
    assert data.valid_x.shape == (0, 1, 8, 8)
    assert data.test_x.shape == (360, 1, 8, 8)
    assert data.train_x.dtype == torch.uint8
    assert data.train_y.dtype == data.valid_y.dtype == torch.int64
    assert (data.classes, data.levels, data.pad, data.flip) == (10, 16, 0, False)
    ours = torch.cat([data.train_x, data.test_x]).flatten(1)
    assert (int(ours.min()), int(ours.max())) == (0, 16)
    labels = torch.cat([data.train_y, data.test_y])
    bundle = load_digits()
    found = sorted((*row, y) for row, y in zip(ours.tolist(), labels.tolist(), strict=True))
    theirs = sorted((*row, y) for row, y in zip(bundle.data, bundle.target, strict=True))
    assert found == theirs


def test_scaled_digits_are_the_floats_and_the_order_of_scikit_learns_split():
    bundle = load_digits()
    train, test = train_test_split(
        range(1797), test_size=360, stratify=bundle.target, random_state=0
    )
    floats = torch.from_numpy(bundle.images).to(torch.float32).div(8.0).sub(1.0).unsqueeze(1)
    data = load_data("digits")
    assert data.scale(data.train_x).dtype == torch.float32
    assert torch.equal(data.scale(data.train_x), floats[train])
    assert torch.equal(data.scale(data.test_x), floats[test])
    assert data.train_y.tolist() == bundle.target[train].tolist()
    share = data.test_y.bincount(minlength=10) / 360
    assert (share - 0.1).abs().max() < 0.01
    assert data.test_y.tolist() == bundle.target[test].tolist()


def test_counts_cut_the_split_without_reordering_it():
    full = load_data("digits")
    data = load_data("digits", train_images=100, valid_images=50, test_images=7)
    assert torch.equal(data.valid_x, full.train_x[:50])
    assert torch.equal(data.train_x, full.train_x[50:150])
    assert torch.equal(data.train_y, full.train_y[50:150])
    assert torch.equal(data.test_y, full.test_y[:7])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"train_images": 0}, "train_images is 0, expected 1 or more"),
        ({"valid_images": -1}, "valid_images is -1, expected 0 or more"),
        ({"test_images": 0}, "test_images is 0, expected 1 or more"),
        ({"train_images": 1438}, "train_images is 1438, expected at most 1437"),
        ({"train_images": 1388, "valid_images": 50}, "train_images is 1388, expected at most 1387"),
        ({"valid_images": 1437}, "valid_images is 1437, expected at most 1436"),
        ({"test_images": 361}, "test_images is 361, expected at most 360"),
    ],
)
def test_counts_that_the_set_does_not_have(counts, message):
    with pytest.raises(ConfigError, match=message):
        load_data("digits", **counts)


def test_without_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'pip install "ebmguard\[train\]"'):
        load_data("digits")


def test_to_moves_every_tensor():
    data = load_data("digits").to(torch.device("meta"))
    tensors = [x for x in vars(data).values() if isinstance(x, torch.Tensor)]
    assert [x.device.type for x in tensors] == ["meta"] * 6
    assert data.sample_shape == (1, 8, 8)
