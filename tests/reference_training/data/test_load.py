"""The published sets: real files where they lie, and files of the same format where they do not."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.io import savemat

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import DATA_SETS, load, load_data
from ebmguard.reference_training.data.published import (
    CIFAR100,
    MNIST,
    SVHN,
    read_cifar100,
    read_mnist,
    read_svhn,
)


def published_as_they_are(files, folder):
    """`files` with the checksums of what the test wrote."""
    md5 = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in files.md5}
    return replace(files, md5=md5)


def pickled(content):
    """Protocol 2 or 3 names NumPy's function by where it lies; old files know it as numpy.core."""
    return pickle.dumps(content, protocol=3).replace(b"numpy._core.multi", b"numpy.core.multi")


@pytest.fixture
def cifar100(tmp_path):
    """Fabricated CIFAR-100: root, files, images (N, 3, 32, 32) and labels of both parts."""
    rng = np.random.default_rng(0)
    parts = {}
    (tmp_path / "cifar-100-python").mkdir()
    for name, count in (("train", 60), ("test", 20)):
        images = rng.integers(256, size=(count, 3, 32, 32), dtype=np.uint8)
        labels = rng.permutation(100)[:count]
        content = {
            b"data": images.reshape(count, 3072),
            b"fine_labels": labels.tolist(),
            b"coarse_labels": [0] * count,
        }
        (tmp_path / "cifar-100-python" / name).write_bytes(pickled(content))
        parts[name] = (images, labels)
    return tmp_path, published_as_they_are(CIFAR100, tmp_path / "cifar-100-python"), parts


@pytest.fixture
def load_cifar100(cifar100, monkeypatch):
    root, files, _ = cifar100
    spec = replace(load._SETS["cifar100"], read=partial(read_cifar100, files=files))
    monkeypatch.setitem(load._SETS, "cifar100", spec)
    return partial(load_data, "cifar100", root)


def test_cifar100_is_read_with_its_fine_labels(cifar100):
    root, files, parts = cifar100
    images = read_cifar100(root, files)
    assert [x.dtype for x in images["train"]] == [np.uint8, np.int64]
    assert_parts(images, parts["train"], parts["test"])


def assert_parts(found, train, test):
    """These are the images and the labels of both parts."""
    for part, own in (("train", train), ("test", test)):
        for array, expected in zip(found[part], own, strict=True):
            np.testing.assert_array_equal(array, expected)


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
    found = read_svhn(tmp_path, published_as_they_are(SVHN, tmp_path / folder))
    assert found["train"][0].dtype == np.uint8
    assert_parts(found, (images[:20], labels[:20]), (images[20:], labels[20:]))


def test_svhn_without_scipy_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(ImportError, match=r'pip install "ebmguard\[train\]"'):
        read_svhn(tmp_path)


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
    found = read_mnist(tmp_path, published_as_they_are(MNIST, folder))
    train_x, train_y, test_x, test_y = arrays.values()
    assert_parts(found, (train_x[:, None], train_y), (test_x[:, None], test_y))
    assert found["test"][1].dtype == np.int64


def test_split_is_that_of_jem(load_cifar100, cifar100):
    train_x, train_y = cifar100[2]["train"]
    state = np.random.get_state()
    np.random.seed(1234)
    order = list(range(60))
    np.random.shuffle(order)
    np.random.set_state(state)
    data = load_cifar100(valid_images=15)
    np.testing.assert_array_equal(data.valid_x.numpy(), train_x[order[:15]])
    np.testing.assert_array_equal(data.valid_y.numpy(), train_y[order[:15]])
    np.testing.assert_array_equal(data.train_x.numpy(), train_x[order[15:]])
    np.testing.assert_array_equal(data.train_y.numpy(), train_y[order[15:]])
    np.testing.assert_array_equal(data.test_x.numpy(), cifar100[2]["test"][0])


def test_fewer_training_images_leave_the_validation_set_as_it_is(load_cifar100):
    full = load_cifar100(valid_images=15)
    few = load_cifar100(valid_images=15, train_images=10, test_images=4)
    assert torch.equal(few.valid_x, full.valid_x)
    assert torch.equal(few.train_x, full.train_x[:10])
    assert torch.equal(few.train_y, full.train_y[:10])
    assert torch.equal(few.test_x, full.test_x[:4])


def test_scale_maps_bytes_to_minus_one_and_one(load_cifar100):
    scaled = load_cifar100(valid_images=0).scale(torch.arange(256, dtype=torch.uint8))
    expected = torch.linspace(-1, 1, 256, dtype=torch.float64)
    assert scaled.dtype == torch.float32
    assert (scaled[0], scaled[-1]) == (-1, 1)
    torch.testing.assert_close(scaled.double(), expected, rtol=0, atol=1e-7)


def test_default_validation_set_is_5000_images(load_cifar100):
    with pytest.raises(ConfigError, match="valid_images is 5000, expected at most 59"):
        load_cifar100()


class Bomb:
    """What a forged pickle may hold: a call, which reading it makes."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return open, (str(self.trace), "w")


def test_file_that_is_not_the_published_one_is_not_parsed(cifar100, tmp_path):
    root, files, _ = cifar100
    path, trace = root / "cifar-100-python" / "test", tmp_path / "executed"
    forged = pickle.dumps({b"data": Bomb(trace)})
    path.write_bytes(forged)
    with pytest.raises(ConfigError) as caught:
        read_cifar100(root, files)
    message = str(caught.value)
    for part in (str(path), hashlib.md5(forged).hexdigest(), files.md5["test"]):
        assert part in message
    assert "fetch it again from https://www.cs.toronto.edu/~kriz/cifar.html" in message
    assert not trace.exists()
    # The checksums that count are the published ones.
    with pytest.raises(ConfigError, match="expected 16019d7e3df5f24257cddd939b257f8d"):
        read_cifar100(root)


def test_missing_files_are_named_with_where_they_were_looked_for(tmp_path):
    (tmp_path / "svhn").mkdir()
    (tmp_path / "svhn" / "train_32x32.mat").touch()
    with pytest.raises(ConfigError) as caught:
        load_data("svhn", tmp_path)
    message = str(caught.value)
    assert f"{tmp_path / 'svhn'} lacks test_32x32.mat\n" in message
    assert f"{tmp_path} lacks train_32x32.mat, test_32x32.mat\n" in message
    for part in ("EBMGUARD_DATA", "--data-root", "http://ufldl.stanford.edu/housenumbers/"):
        assert part in message


@pytest.mark.parametrize(
    ("variable", "name", "root", "says"),
    [
        (".", "mnist", None, "MNIST was not found under {}:"),
        (".", "mnist", "other", "MNIST was not found under {}/other:"),
        (None, "cifar10", None, "--data-root or the environment variable EBMGUARD_DATA"),
        ("", "cifar10", None, "--data-root or the environment variable EBMGUARD_DATA"),
        (".", "cifar10", "gone", "gone, which is not a folder: name another"),
        (".", "cifar", None, "data is 'cifar', expected one of digits, mnist, cifar10, cifar100"),
    ],
)
def test_where_a_data_set_is_looked_for(tmp_path, monkeypatch, variable, name, root, says):
    (tmp_path / "other").mkdir()
    monkeypatch.delenv("EBMGUARD_DATA", raising=False)
    if variable is not None:
        monkeypatch.setenv("EBMGUARD_DATA", str(tmp_path) if variable else "")
    with pytest.raises(ConfigError, match=says.format(tmp_path)):
        load_data(name, root and tmp_path / root)


def test_settings_of_the_sets_are_those_of_jem():
    assert DATA_SETS == ("digits", "mnist", "cifar10", "cifar100", "svhn", "celeba64", "frey")
    assert {name: (s.classes, s.pad, s.flip) for name, s in load._SETS.items()} == {
        "digits": (10, 0, False),
        "mnist": (10, 0, False),
        "cifar10": (10, 4, True),
        "cifar100": (100, 4, True),
        "svhn": (10, 4, False),
        "celeba64": (1, 0, False),
        "frey": (1, 0, False),
    }


def test_real_cifar10(data_root):
    data = load_data("cifar10", data_root)
    assert data.train_x.shape == (45000, 3, 32, 32)
    assert data.valid_x.shape == (5000, 3, 32, 32)
    assert data.test_x.shape == (10000, 3, 32, 32)
    assert {data.train_x.dtype, data.valid_x.dtype, data.test_x.dtype} == {torch.uint8}
    assert (data.name, data.levels, data.sample_shape) == ("cifar10", 255, (3, 32, 32))
    labels = torch.cat([data.train_y, data.valid_y])
    assert labels.bincount().tolist() == [5000] * 10
    assert data.test_y.bincount().tolist() == [1000] * 10
    # The mean colour that is published with the data's usual normalisation.
    images = torch.cat([data.train_x, data.valid_x])
    mean = images.flatten(2).sum(2, dtype=torch.int32).sum(0).double() / (50000 * 1024 * 255)
    expected = torch.tensor([0.4914, 0.4822, 0.4465], dtype=torch.float64)
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-4)


def test_real_mnist(data_root):
    data = load_data("mnist", data_root, valid_images=10000)
    assert data.train_x.shape == (50000, 1, 28, 28)
    assert data.valid_x.shape == (10000, 1, 28, 28)
    assert data.test_x.shape == (10000, 1, 28, 28)
    assert data.sample_shape == (1, 28, 28)
    counts = torch.cat([data.train_y, data.valid_y]).bincount().tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    pixels = torch.cat([data.train_x, data.valid_x]).double() / 255
    assert float(pixels.mean()) == pytest.approx(0.1307, abs=1e-4)
    assert float(pixels.std()) == pytest.approx(0.3081, abs=1e-4)
