"""CelebA from a fabricated folder of the same format, with smaller parts."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import celeba, load_data

TRAIN, VALID, TEST = 7, 3, 4
COUNT = TRAIN + VALID + TEST


@cache
def picture(number: int) -> Image.Image:
    """A smooth picture of 178x218 with its own colours."""
    rng = np.random.default_rng(number)
    coarse = rng.integers(256, size=(9, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((178, 218), Image.Resampling.BICUBIC)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The data root, with all images where torchvision has them."""
    for name, count in (("TRAIN", TRAIN), ("VALID", VALID), ("TEST", TEST)):
        monkeypatch.setattr(celeba, name, count)
    folder = tmp_path / "celeba" / "img_align_celeba"
    folder.mkdir(parents=True)
    for number in range(1, COUNT + 1):
        picture(number).save(folder / f"{number:06d}.jpg", quality=90)
    return tmp_path


def load_faces(root, **settings):
    return load_data("celeba64", root, **{"valid_images": 0, **settings})


def expected(root, numbers):
    """Decoded pixels resized by PyTorch in float64, rows 7 to 70 of 78."""
    faces = []
    for number in numbers:
        file = root / "celeba" / "img_align_celeba" / f"{number:06d}.jpg"
        with Image.open(file) as image:
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].double()
        assert pixels.shape == (1, 3, 218, 178)
        small = F.interpolate(pixels, (78, 64), mode="bilinear", antialias=True)
        faces.append(small[0, :, 7:71])
    return torch.stack(faces)


def shuffled(count):
    order = list(range(1, count + 1))
    np.random.RandomState(1234).shuffle(order)
    return order


def assert_faces(x, root, numbers):
    assert x.dtype == torch.uint8
    assert x.shape == (len(numbers), 3, 64, 64)
    # Pillow rounds after each of its two passes.
    torch.testing.assert_close(x.double(), expected(root, numbers), rtol=0, atol=1.01)


def test_the_published_split_cropped_and_resized_and_fewer_images_are_the_first(root):
    data = load_faces(root, valid_images=2)
    assert_faces(data.train_x, root, shuffled(TRAIN))
    assert_faces(data.valid_x, root, [TRAIN + 1, TRAIN + 2])
    assert_faces(data.test_x, root, range(TRAIN + VALID + 1, COUNT + 1))
    for y, count in ((data.train_y, TRAIN), (data.valid_y, 2), (data.test_y, TEST)):
        assert torch.equal(y, torch.zeros(count, dtype=torch.int64))
    assert (data.name, data.classes, data.levels) == ("celeba64", 1, 255)
    assert (data.pad, data.flip, data.sample_shape) == (0, False, (3, 64, 64))
    (root / "celeba").rename(root / "img_align_celeba")
    (root / "img_align_celeba" / "img_align_celeba").rename(root / "celeba")
    assert torch.equal(load_faces(root).train_x, data.train_x)
    whole = load_faces(root)
    few = load_faces(root, train_images=4, test_images=1)
    assert torch.equal(few.train_x, whole.train_x[:4])
    assert torch.equal(few.test_x, whole.test_x[:1])
    assert few.valid_x.shape == (0, 3, 64, 64)
    # The validation set is published: no training image is lost to it.
    assert torch.equal(load_faces(root, valid_images=3).train_x, whole.train_x)
    with pytest.raises(ConfigError, match=f"valid_images is 9, expected at most {VALID}"):
        load_faces(root, valid_images=9)


def test_decoded_images_are_kept_and_read_again(root, monkeypatch):
    first = load_faces(root, train_images=5)
    files = {file.name for file in (root / "ebmguard-cache").iterdir()}
    assert len(files) == 2  # training and test images

    def refuse(file):
        raise AssertionError(file)

    with monkeypatch.context() as patch:
        patch.setattr(celeba, "face", refuse)
        again = load_faces(root, train_images=5)
    assert torch.equal(again.train_x, first.train_x)
    assert torch.equal(again.test_x, first.test_x)
    # Other images, or a file of another size, are something else.
    assert_faces(load_faces(root, train_images=4).train_x, root, shuffled(TRAIN)[:4])
    number = shuffled(TRAIN)[2]
    file = root / "celeba" / "img_align_celeba" / f"{number:06d}.jpg"
    picture(99).save(file, quality=95)
    changed = load_faces(root, train_images=5).train_x
    assert_faces(changed, root, shuffled(TRAIN)[:5])
    assert not torch.equal(changed[2], first.train_x[2])


def flipped(content):
    """One byte of the images, which lie in the second half, is another one."""
    place = 2 * len(content) // 3
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("spoil", [flipped, lambda content: content[:-100]])
def test_what_was_kept_and_is_damaged_is_decoded_again(root, caplog, spoil):
    first = load_faces(root, test_images=1)
    file = max((root / "ebmguard-cache").iterdir(), key=lambda file: file.stat().st_size)
    whole = file.read_bytes()
    file.write_bytes(spoil(whole))
    assert torch.equal(load_faces(root, test_images=1).train_x, first.train_x)
    (message,) = caplog.messages
    assert str(file) in message
    assert message.endswith("the images are made again")
    assert file.read_bytes() == whole


def another(size, mode="RGB", format="JPEG"):
    def spoil(file):
        picture(1).resize(size).convert(mode).save(file, format=format)

    return spoil


def truncated(kept):
    return lambda file: file.write_bytes(file.read_bytes()[:kept])


def gigantic(file):
    content = bytearray(file.read_bytes())
    place = content.find(b"\xff\xc0") + 5  # height and width of the frame
    content[place : place + 4] = b"\xff\xff\xff\xff"
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (another((176, 218)), "is an image of 176x218 in mode RGB, expected 178x218 in"),
        (another((178, 218), "L"), "is an image of 178x218 in mode L, expected 178x218 in"),
        *((truncated(kept), "cannot be decoded as a JPEG") for kept in (0, 3, 200, 700, -300)),
        (another((178, 218), format="PNG"), "cannot be decoded as a JPEG"),
        (gigantic, "cannot be decoded as a JPEG"),
    ],
)
def test_a_file_that_is_no_such_image_is_named(root, spoil, says):
    spoil(root / "celeba" / "img_align_celeba" / "000012.jpg")
    with pytest.raises(ConfigError, match=rf"000012\.jpg {says}.*Unpack img_align_celeba\.zip"):
        load_faces(root)
    written = (root / "ebmguard-cache").iterdir()
    assert len(list(written)) == 1  # the training images, which are whole
