"""The published sets: real files where they lie, and files of the same format where they do not."""

from __future__ import annotations

import gzip
import hashlib
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.io import savemat
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import load_data
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


def test_cifar100_is_read_with_its_fine_labels(tmp_path):
    files, parts = write_cifar100(tmp_path)
    assert_parts(read_cifar100(tmp_path, files), parts["train"], parts["test"])


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


def test_digits_are_scikit_learns_in_the_order_of_its_split():
    bundle = load_digits()
    train, test = train_test_split(
        range(1797), test_size=360, stratify=bundle.target, random_state=0
    )
    images = bundle.images[:, None]
    found = read_digits()
    assert_parts(found, (images[train], bundle.target[train]), (images[test], bundle.target[test]))
    assert found["train"][0].max() == 16


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


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"gg": frames()}, r"holds no array by the name of ff, expected \(560, 1965\) of uint8"),
        ({"ff": frames().T}, r"an array \(1965, 560\) of uint8 by the name of ff"),
        ({"ff": frames() / 255}, "an array .* of float64"),
        (None, "no file of MATLAB"),
    ],
)
def test_other_files_than_the_frey_faces_are_refused(tmp_path, arrays, message):
    with pytest.raises(ConfigError, match="take the digits in their place"):
        read_frey(tmp_path)
    if arrays is None:
        (tmp_path / FREY_FILE).write_bytes(b"not a matrix" * 50)
    else:
        savemat(tmp_path / FREY_FILE, arrays)
    with pytest.raises(ConfigError, match=message):
        read_frey(tmp_path)


class Bomb:
    """What a forged pickle may hold: a call, which reading it makes."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return open, (str(self.trace), "w")


def test_file_that_is_not_the_published_one_is_not_parsed(tmp_path):
    files, _ = write_cifar100(tmp_path)
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


def test_real_mnist(data_root):
    data = load_data("mnist", data_root, valid_images=10000)
    assert data.train_x.shape == (50000, 1, 28, 28)
    assert data.valid_x.shape == (10000, 1, 28, 28)
    assert data.test_x.shape == (10000, 1, 28, 28)
    counts = torch.cat([data.train_y, data.valid_y]).bincount().tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    pixels = torch.cat([data.train_x, data.valid_x]).double() / 255
    assert float(pixels.mean()) == pytest.approx(0.1307, abs=1e-4)
    assert float(pixels.std()) == pytest.approx(0.3081, abs=1e-4)
