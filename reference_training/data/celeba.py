"""CelebA (Liu et al. 2015): 202,599 aligned faces, colour JPEGs of 178x218, made 64x64.

The images are those of the published archive img_align_celeba.zip (md5
00d2c5bc6d35e252742224ab0c1e8fcb), with the published split by their numbers. They are made small as
in the code that the first author of short-run models has published with faces
(github.com/enijkamp/short_run_inf): the short side is resized to 64 pixels, and the central square
cropped. Others crop the central 140x140 or 108x108 first, which shows less of the head; scores of
different crops do not compare.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ebmguard.errors import ConfigError

from .cache import cached
from .images import Images

PAGE = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
ARCHIVE = "img_align_celeba.zip"
ARCHIVE_MD5 = "00d2c5bc6d35e252742224ab0c1e8fcb"
FOLDERS = ("celeba/img_align_celeba", "img_align_celeba", "celeba")
"""Below the root, in the order in which they are tried; the first is torchvision's."""
TRAIN, VALID, TEST = 162_770, 19_867, 19_962
"""Images of the published parts, whose numbers follow each other from 1 on."""
MODE, WIDTH, HEIGHT = "RGB", 178, 218
SIZE = 64
CACHE = "ebmguard-cache"
AT_ONCE, SAID_EVERY, THREADS = 1000, 10_000, 8
NAMED = 5
_logger = logging.getLogger("ebmguard.data")


def read_celeba(root: Path) -> Images:
    """The published training, validation and test images, 64x64, decoded when they are asked for.

    What has been decoded is kept in the folder `ebmguard-cache` below the root.

    Args:
        root: folder of the data sets.

    Returns:
        the images, all with the label 0.

    Raises:
        ConfigError: not all images are there. Indexing raises it too, for an image that cannot be
            decoded or is not a colour JPEG of 178x218.
        ImportError: Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ImportError(
            'CelebA is read by Pillow, which is not installed: pip install "ebmguard[train]"'
        ) from error
    folder = _find(root)
    firsts = (1, TRAIN + 1, TRAIN + VALID + 1)
    train, valid, test = (
        Faces(folder, range(first, first + count), root / CACHE)
        for first, count in zip(firsts, (TRAIN, VALID, TEST), strict=True)
    )
    train_y, valid_y, test_y = (
        np.zeros(len(faces), dtype=np.int64) for faces in (train, valid, test)
    )
    return Images(train, train_y, test, test_y, (valid, valid_y))


class Faces:
    """Images of a part of the data, which are decoded when they are indexed.

    Args:
        folder: of the files.
        numbers: of the images, as in their names.
        cache: folder where decoded images are kept.
    """

    def __init__(self, folder: Path, numbers: range, cache: Path) -> None:
        self._folder = folder
        self._numbers = numbers
        self._cache = cache

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Images by their rows, (N,) -> (N, 3, 64, 64).

        Raises:
            ConfigError: an image cannot be decoded or has another size or other channels.
        """
        files = [self._folder / _name(self._numbers[row]) for row in rows]
        if not files:
            return np.empty((0, 3, SIZE, SIZE), dtype=np.uint8)
        return cached(
            self._cache, "celeba64", _recipe(files), (len(files), 3, SIZE, SIZE), _decoder(files)
        )


def face(file: Path) -> NDArray[np.uint8]:
    """One image, (3, 64, 64).

    It is resized to 64x78, bilinearly with antialiasing, and the central rows are taken.

    Raises:
        ConfigError: the file cannot be decoded, or is not a colour JPEG of 178x218.
    """
    from PIL import Image

    remedy = f"Unpack {ARCHIVE} from {PAGE} again"
    try:
        with Image.open(file, formats=("JPEG",)) as image:
            if (image.mode, *image.size) != (MODE, WIDTH, HEIGHT):
                raise ConfigError(
                    f"{file} is an image of {image.width}x{image.height} in mode {image.mode}, "
                    f"expected {WIDTH}x{HEIGHT} in {MODE}. {remedy}"
                )
            small = image.resize(_RESIZED, Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{file} cannot be decoded as a JPEG: {error}. {remedy}") from error
    pixels: NDArray[np.uint8] = np.asarray(small)[_TOP : _TOP + SIZE]
    return pixels.transpose(2, 0, 1)


_RESIZED = (SIZE, SIZE * HEIGHT // WIDTH)
_TOP = (_RESIZED[1] - SIZE) // 2


def _name(number: int) -> str:
    return f"{number:06d}.jpg"


def _find(root: Path) -> Path:
    """The first folder with all images."""
    expected = [_name(number) for number in range(1, TRAIN + VALID + TEST + 1)]
    lacks = []
    for folder in (root / name for name in FOLDERS):
        found = set(os.listdir(folder)) if folder.is_dir() else set()
        missing = [name for name in expected if name not in found]
        if not missing:
            return folder
        if len(missing) == len(expected):
            lacks.append(f"{folder} has none of them")
        else:
            more = ", ..." if len(missing) > NAMED else ""
            lacks.append(
                f"{folder} lacks {len(missing):,} of them: {', '.join(missing[:NAMED])}{more}"
            )
    raise ConfigError(
        f"CelebA's {len(expected):,} aligned images, {expected[0]} to {expected[-1]}, were not "
        f"found under {root}:\n  " + "\n  ".join(lacks) + "\n"
        f"They are published at {PAGE} as {ARCHIVE} (md5 {ARCHIVE_MD5}): unpack it into "
        f"{root / 'celeba'}, or name the folder that holds celeba by --data-root or the "
        "environment variable EBMGUARD_DATA."
    )


def _recipe(files: Sequence[Path]) -> str:
    """What determines the decoded images; the sizes of its files tell a set from a recoded one."""
    content = hashlib.blake2b(digest_size=16)
    for file in files:
        content.update(f"{file.name} {file.stat().st_size}\n".encode())
    return (
        f"{len(files)} files {content.hexdigest()}, resized to {_RESIZED[0]}x{_RESIZED[1]} by "
        f"Pillow's bilinear filter, {SIZE} rows from row {_TOP}"
    )


def _decoder(files: Sequence[Path]) -> Callable[[], NDArray[np.uint8]]:
    def decode() -> NDArray[np.uint8]:
        _logger.info("decoding %s faces, which are then kept", f"{len(files):,}")
        pixels = np.empty((len(files), 3, SIZE, SIZE), dtype=np.uint8)

        def put(row: int) -> None:
            pixels[row] = face(files[row])

        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, len(files), AT_ONCE):
                end = min(start + AT_ONCE, len(files))
                # A part at a time: an error does not wait for all the rest.
                for _ in pool.map(put, range(start, end)):
                    pass
                if end % SAID_EVERY == 0:
                    _logger.info("%s of %s", f"{end:,}", f"{len(files):,}")
        return pixels

    return decode
