"""Kept images: read instead of made, and believed only where they are what was written."""

from __future__ import annotations

import logging
import os
from multiprocessing.pool import ThreadPool

import numpy as np
import pytest
import torch

from ebmguard.recovery import save_durably
from ebmguard.reference_training.data.cache import cached

SHAPE = (6, 3, 4, 4)
IMAGES = np.random.default_rng(0).integers(256, size=SHAPE, dtype=np.uint8)


class Maker:
    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return IMAGES.copy()


def through(folder, make, recipe="recipe", shape=SHAPE):
    images = cached(folder, "name", recipe, shape, make)
    np.testing.assert_array_equal(images, IMAGES)
    return images


def test_images_are_made_once(tmp_path):
    make = Maker()
    for _ in range(3):
        images = through(tmp_path / "cache", make)
        images[:] = 0  # a caller's changes are its own
    assert make.calls == 1
    (file,) = (tmp_path / "cache").iterdir()
    assert file.name.startswith("name-")


def test_each_recipe_has_its_own_file(tmp_path):
    make = Maker()
    through(tmp_path, make, "one")
    through(tmp_path, make, "two")
    assert make.calls == 2
    assert len(list(tmp_path.iterdir())) == 2
    through(tmp_path, make, "one")
    assert make.calls == 2


def flipped_byte(file):
    content = bytearray(file.read_bytes())
    place = content.find(IMAGES.tobytes()[:16])
    assert place > 0
    content[place] ^= 1
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def of_another_recipe(file):
    save_durably(file, {"recipe": "other", "images": torch.from_numpy(IMAGES)})


def of_another_shape(file):
    save_durably(file, {"recipe": "recipe", "images": torch.from_numpy(IMAGES[:5])})


def of_another_type(file):
    save_durably(file, {"recipe": "recipe", "images": torch.from_numpy(IMAGES).float()})


def without_images(file):
    save_durably(file, {"recipe": "recipe", "images": "none"})


@pytest.mark.parametrize(
    "spoil",
    [flipped_byte, cut, of_another_recipe, of_another_shape, of_another_type, without_images],
)
def test_a_file_that_is_not_what_was_written_is_made_again(tmp_path, spoil, caplog):
    make = Maker()
    through(tmp_path, make)
    (file,) = tmp_path.iterdir()
    spoil(file)
    with caplog.at_level(logging.WARNING, "ebmguard.data"):
        through(tmp_path, make)
    assert make.calls == 2
    (message,) = caplog.messages
    assert str(file) in message
    assert message.endswith("the images are made again")
    through(tmp_path, make)  # and the new file is a good one
    assert make.calls == 2


def test_a_folder_that_cannot_be_written_costs_only_the_file(tmp_path, caplog):
    (tmp_path / "file").touch()  # no folder, not even for root
    make = Maker()
    for _ in range(2):
        through(tmp_path / "file", make)
    assert make.calls == 2
    assert [m.split(":")[0] for m in caplog.messages] == [
        "the images are not kept, and are made anew next time"
    ] * 2


def test_nothing_is_left_of_a_write_that_fails(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    through(tmp_path / "cache", Maker())
    assert not list((tmp_path / "cache").iterdir())
    assert "no space left" in caplog.text


def test_what_cannot_be_made_is_not_written(tmp_path):
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cached(tmp_path / "cache", "name", "recipe", SHAPE, fail)
    assert not (tmp_path / "cache").exists()


def test_several_write_at_once(tmp_path):
    with ThreadPool(4) as pool:
        pool.map(lambda _: through(tmp_path, Maker()), range(12))
    make = Maker()
    through(tmp_path, make)
    assert make.calls == 0
    assert len(list(tmp_path.iterdir())) == 1
