"""Data sets by name and as they were published: their files, splits, sizes and smaller images."""

from __future__ import annotations

import gzip
import hashlib
import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.io import savemat
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import load, load_data
from ebmguard.reference_training.data.published import (
    CIFAR100,
    FREY_FILE,
    MNIST,
    SVHN,
    read_cifar100,
    read_digits,
    read_frey,
    read_mnist,
    read_svhn,
)


@pytest.fixture
def sixty(tmp_path, monkeypatch):
    """A set of 60 training images that lies in files, each all of one value: its place."""
    images = np.arange(80, dtype=np.uint8)[:, None, None, None].repeat(4, 2).repeat(4, 3)
    labels = np.arange(80, dtype=np.int64) % 10
    parts = {"train": (images[:60], labels[:60]), "test": (images[60:], labels[60:])}
    monkeypatch.setitem(load._SETS, "mnist", load._DataSet(lambda root: parts))
    return partial(load_data, "mnist", tmp_path)


def places(x):
    return x[:, 0, 0, 0].tolist()


def test_split_is_that_of_jem(sixty):
    state = np.random.get_state()
    np.random.seed(1234)
    order = list(range(60))
    np.random.shuffle(order)
    np.random.set_state(state)
    data = sixty(valid_images=15)
    assert places(data.valid_x) == order[:15]
    assert places(data.train_x) == order[15:]
    assert places(data.test_x) == [*range(60, 80)]
    for x, y in ((data.train_x, data.train_y), (data.valid_x, data.valid_y)):
        assert [place % 10 for place in places(x)] == y.tolist()
    few = sixty(valid_images=15, train_images=10, test_images=4)
    assert places(few.valid_x) == order[:15]
    assert places(few.train_x) == order[15:25]
    assert places(few.test_x) == [*range(60, 64)]
    with pytest.raises(ConfigError, match="valid_images is 5000, expected at most 59"):
        sixty()


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
        ({"image_size": 5}, r"expected one of 1, 2, 4, 8$"),
    ],
)
def test_counts_that_the_set_does_not_have(counts, message):
    with pytest.raises(ConfigError, match=message):
        load_data("digits", **counts)


@pytest.mark.parametrize(
    ("variable", "name", "root", "says"),
    [
        (
            ".",
            "mnist",
            None,
            r"MNIST was not found under {}:\n.*lacks train.*\nIt is published at http",
        ),
        (".", "svhn", None, r"\n  {}/svhn lacks train_32x32.mat, test_32x32.mat\n  {} lacks train"),
        (".", "mnist", "other", "MNIST was not found under {}/other:"),
        (None, "cifar10", None, "--data-root or the environment variable EBMGUARD_DATA"),
        ("", "frey", None, "or take the digits, which need none"),
        (".", "cifar10", "gone", "gone, which is not a folder: name another"),
        (".", "cifar", None, "data is 'cifar', expected one of digits, mnist, cifar10, cifar100"),
    ],
)
def test_where_a_data_set_is_looked_for(tmp_path, monkeypatch, variable, name, root, says):
    (tmp_path / "other").mkdir()
    monkeypatch.delenv("EBMGUARD_DATA", raising=False)
    if variable is not None:
        monkeypatch.setenv("EBMGUARD_DATA", str(tmp_path) if variable else "")
    with pytest.raises(ConfigError, match=says.replace("{}", str(tmp_path))):
        load_data(name, root and tmp_path / root)


# -- smaller images --------------------------------------------------------------------------


def as_they_are(files, folder):
    """`files` with the checksums of what the test wrote."""
    md5 = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in files.md5}
    return replace(files, md5=md5)


def pickled(content):
    """Protocol 2 or 3 names NumPy's function by where it lies; old files know it as numpy.core."""
    return pickle.dumps(content, protocol=3).replace(b"numpy._core.multi", b"numpy.core.multi")


def write_cifar100(root):
    """Fabricated CIFAR-100: files, and images (N, 3, 32, 32) and labels of both parts."""
    rng, parts, folder = np.random.default_rng(0), {}, root / "cifar-100-python"
    folder.mkdir()
    for name, count in (("train", 60), ("test", 20)):
        images = rng.integers(256, size=(count, 3, 32, 32), dtype=np.uint8)
        labels = rng.permutation(100)[:count]
        content = {
            b"data": images.reshape(count, 3072),
            b"fine_labels": labels.tolist(),
            b"coarse_labels": [0] * count,
        }
        (folder / name).write_bytes(pickled(content))
        parts[name] = (images, labels)
    return as_they_are(CIFAR100, folder), parts


def assert_parts(found, train, test):
    """These are the images and the labels of both parts."""
    for part, own in (("train", train), ("test", test)):
        assert [x.dtype for x in found[part]] == [np.uint8, np.int64]
        for array, expected in zip(found[part], own, strict=True):
            np.testing.assert_array_equal(array, expected)


def test_cifar100_has_its_fine_labels_and_other_files_are_not_parsed(tmp_path):
    files, parts = write_cifar100(tmp_path)
    assert_parts(read_cifar100(tmp_path, files), parts["train"], parts["test"])
    path, trace = tmp_path / "cifar-100-python" / "test", tmp_path / "executed"
    forged = pickle.dumps({b"data": Bomb(trace)})
    path.write_bytes(forged)
    with pytest.raises(ConfigError) as caught:
        read_cifar100(tmp_path, files)
    message = str(caught.value)
    for part in (str(path), hashlib.md5(forged).hexdigest(), files.md5["test"]):
        assert part in message
    assert "fetch it again from https://www.cs.toronto.edu/~kriz/cifar.html" in message
    assert not trace.exists()
    # The checksums that count are the published ones.
    with pytest.raises(ConfigError, match="expected 16019d7e3df5f24257cddd939b257f8d"):
        read_cifar100(tmp_path)


@pytest.mark.parametrize("folder", ["svhn", "."])
def test_svhn_is_read_with_ten_as_the_digit_zero(tmp_path, folder):
    rng = np.random.default_rng(0)
    (tmp_path / folder).mkdir(exist_ok=True)
    images = rng.integers(256, size=(30, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(10, size=30)
    assert 0 in labels[:20]
    for name, part in (("train_32x32.mat", slice(20)), ("test_32x32.mat", slice(20, 30))):
        y = np.where(labels[part] == 0, 10, labels[part]).astype(np.uint8)[:, None]
        mat = {"X": images[part].transpose(2, 3, 1, 0), "y": y}
        savemat(tmp_path / folder / name, mat, do_compression=True)
    found = read_svhn(tmp_path, as_they_are(SVHN, tmp_path / folder))
    assert_parts(found, (images[:20], labels[:20]), (images[20:], labels[20:]))


def test_mnist_is_read_from_idx_files(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte.gz": rng.integers(256, size=(300, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte.gz": rng.integers(10, size=300, dtype=np.uint8),
        "t10k-images-idx3-ubyte.gz": rng.integers(256, size=(5, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte.gz": rng.integers(10, size=5, dtype=np.uint8),
    }
    for name, array in arrays.items():
        sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
        header = bytes([0, 0, 8, array.ndim]) + sizes
        (folder / name).write_bytes(gzip.compress(header + array.tobytes()))
    found = read_mnist(tmp_path, as_they_are(MNIST, folder))
    train_x, train_y, test_x, test_y = arrays.values()
    assert_parts(found, (train_x[:, None], train_y), (test_x[:, None], test_y))


def test_digits_are_scikit_learns_in_the_order_of_its_split_with_sixteen_levels():
    bundle = load_digits()
    train, test = train_test_split(
        range(1797), test_size=360, stratify=bundle.target, random_state=0
    )
    images = bundle.images[:, None]
    found = read_digits()
    assert_parts(found, (images[train], bundle.target[train]), (images[test], bundle.target[test]))
    assert found["train"][0].max() == 16
    (train_x, train_y), (test_x, _) = read_digits().values()
    data = load_data("digits", train_images=100, valid_images=50, test_images=7)
    np.testing.assert_array_equal(data.valid_x, train_x[:50])
    np.testing.assert_array_equal(data.train_x, train_x[50:150])
    np.testing.assert_array_equal(data.train_y, train_y[50:150])
    np.testing.assert_array_equal(data.test_x, test_x[:7])
    assert torch.equal(data.scale(data.train_x), data.train_x.float().div(8).sub(1))
    assert load_data("digits").valid_x.shape == (0, 1, 8, 8)


def frames():
    return np.random.default_rng(0).integers(256, size=(560, 1965), dtype=np.uint8)


def test_each_column_of_the_frey_faces_is_an_image_and_the_last_ones_are_for_the_test(tmp_path):
    columns = frames()
    savemat(tmp_path / FREY_FILE, {"ff": columns})
    found = read_frey(tmp_path)
    images = {part: x for part, (x, _) in found.items()}
    assert {part: x.shape for part, x in images.items()} == {
        "train": (1400, 1, 28, 20),
        "valid": (300, 1, 28, 20),
        "test": (265, 1, 28, 20),
    }
    assert images["test"][7, 0, 3, 5] == columns[3 * 20 + 5, 1700 + 7]
    every = np.concatenate([x.reshape(len(x), 560) for x in images.values()])
    np.testing.assert_array_equal(every, columns.T)
    assert not any(y.any() for _, y in found.values())


class Bomb:
    """What a forged pickle may hold: a call, which reading it makes."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return open, (str(self.trace), "w")


def test_real_cifar10(data_root):
    data = load_data("cifar10", data_root)
    assert data.train_x.shape == (45000, 3, 32, 32)
    assert data.valid_x.shape == (5000, 3, 32, 32)
    assert data.test_x.shape == (10000, 3, 32, 32)
    assert {data.train_x.dtype, data.valid_x.dtype, data.test_x.dtype} == {torch.uint8}
    labels = torch.cat([data.train_y, data.valid_y])
    assert labels.bincount().tolist() == [5000] * 10
    assert data.test_y.bincount().tolist() == [1000] * 10
    # The mean colour that is published with the data's usual normalisation.
    images = torch.cat([data.train_x, data.valid_x])
    mean = images.flatten(2).sum(2, dtype=torch.int32).sum(0).double() / (50000 * 1024 * 255)
    expected = torch.tensor([0.4914, 0.4822, 0.4465], dtype=torch.float64)
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-4)
