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
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ebmguard.errors import ConfigError
from ebmguard.recovery import load_durably, save_durably

from .files import Images, find_folder

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
SAID_EVERY, THREADS = 10_000, 8
_RESIZED = (SIZE, SIZE * HEIGHT // WIDTH)
_TOP = (_RESIZED[1] - SIZE) // 2
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
    import PIL.Image  # noqa: F401

    names = [f"{number:06d}.jpg" for number in range(1, TRAIN + VALID + TEST + 1)]
    folder = find_folder(
        root,
        FOLDERS,
        names,
        f"CelebA's {len(names):,} aligned images, {names[0]} to {names[-1]}, were",
        f"They are published at {PAGE} as {ARCHIVE} (md5 {ARCHIVE_MD5}): unpack it into "
        f"{root / 'celeba'}, or name the folder that holds celeba by --data-root or the "
        "environment variable EBMGUARD_DATA.",
    )
    ends = {"train": TRAIN, "valid": TRAIN + VALID, "test": len(names)}
    return {
        part: (
            Faces([folder / name for name in names[begin:end]], root / CACHE),
            np.zeros(end - begin, dtype=np.int64),
        )
        for (part, end), begin in zip(ends.items(), (0, *ends.values()), strict=False)
    }


@dataclass(frozen=True)
class Faces:
    """Images of a part of the data, which are decoded when they are indexed.

    What was decoded is kept in a file, whose name has all that determines it. Where the file is
    damaged the images are decoded again; where it cannot be written, at every call.

    Attributes:
        files: of the images.
        cache: folder where decoded images are kept.
    """

    files: Sequence[Path]
    cache: Path

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Images by their rows, (N,) -> (N, 3, 64, 64).

        Raises:
            ConfigError: an image cannot be decoded or has another size or other channels.
        """
        files = [self.files[row] for row in rows]
        if not files:
            return np.empty((0, 3, SIZE, SIZE), dtype=np.uint8)
        # The sizes of its files tell a set from a recoded one.
        content = hashlib.blake2b(f"Pillow's bilinear {_RESIZED} from {_TOP}".encode())
        for file in files:
            content.update(f"{file.name} {file.stat().st_size}\n".encode())
        kept = self.cache / f"celeba64-{content.hexdigest()[:32]}.pt"
        if kept.is_file():
            try:
                found: NDArray[np.uint8] = load_durably(kept)["images"].numpy()
            except ConfigError as error:
                _logger.warning("%s; the images are made again", error)
            else:
                return found
        images = _decoded(files)
        try:
            kept.parent.mkdir(exist_ok=True)
            # A folder of its own: other processes may be writing the same file.
            with tempfile.TemporaryDirectory(prefix="partial-", dir=kept.parent) as folder:
                save_durably(Path(folder) / kept.name, {"images": torch.from_numpy(images)})
                os.replace(Path(folder) / kept.name, kept)
        except OSError as error:
            _logger.warning("the images are not kept, and are made anew next time: %s", error)
        return images


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


def _decoded(files: Sequence[Path]) -> NDArray[np.uint8]:
    _logger.info("decoding %s faces, which are then kept", f"{len(files):,}")
    pixels = np.empty((len(files), 3, SIZE, SIZE), dtype=np.uint8)
    with ThreadPool(THREADS) as pool:
        for row, image in enumerate(pool.imap(face, files)):
            pixels[row] = image
            if (row + 1) % SAID_EVERY == 0:
                _logger.info("%s of %s", f"{row + 1:,}", f"{len(files):,}")
    return pixels
