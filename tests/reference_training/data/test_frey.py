"""The Frey faces, from files of the published format."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from scipy.io import savemat

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import load_data
from ebmguard.reference_training.data.published import FREY_FILE as FILE


def write(folder, **arrays):
    savemat(folder / FILE, arrays)


def faces():
    return np.random.default_rng(0).integers(256, size=(560, 1965), dtype=np.uint8)


def test_each_column_is_an_image_and_the_last_ones_are_for_the_test(tmp_path):
    columns = faces()
    write(tmp_path, ff=columns)
    data = load_data("frey", tmp_path, valid_images=300)
    assert data.train_x.shape == (1400, 1, 28, 20)
    assert (data.levels, data.classes, data.sample_shape) == (255, 1, (1, 28, 20))
    assert int(data.test_x[7, 0, 3, 5]) == columns[3 * 20 + 5, 1700 + 7]
    rows = torch.from_numpy(columns.T.copy())
    assert torch.equal(data.valid_x.flatten(1), rows[1400:1700])
    assert torch.equal(data.test_x.flatten(1), rows[1700:])
    assert sorted(data.train_x.flatten(1).tolist()) == sorted(rows[:1400].tolist())


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"gg": faces()}, r"holds no array by the name of ff, expected \(560, 1965\) of uint8"),
        ({"ff": faces().T}, r"an array \(1965, 560\) of uint8 by the name of ff"),
        ({"ff": faces() / 255}, "an array .* of float64"),
        ({"ff": faces() // 4}, "grey levels 0 to 63, expected most of 0 to 255"),
    ],
)
def test_other_files_are_refused(tmp_path, arrays, message):
    write(tmp_path, **arrays)
    with pytest.raises(ConfigError, match=message):
        load_data("frey", tmp_path, valid_images=0)


def test_what_is_no_file_of_matlab_is_refused(tmp_path):
    (tmp_path / FILE).write_bytes(b"not a matrix" * 50)
    with pytest.raises(ConfigError, match="no file of MATLAB"):
        load_data("frey", tmp_path, valid_images=0)


def test_without_the_file_the_digits_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="take the digits in their place"):
        load_data("frey", tmp_path, valid_images=0)
    monkeypatch.delenv("EBMGUARD_DATA", raising=False)
    with pytest.raises(ConfigError, match="or take the digits, which need none"):
        load_data("frey", valid_images=0)


def test_without_scipy_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(ImportError, match=r'pip install "ebmguard\[train\]"'):
        load_data("frey", tmp_path, valid_images=0)
