"""Data sets of the reference trainers: labelled images, their split, their order, augmentation.

Pixels stay bytes until :meth:`ImageData.scale`; everything random is drawn on the device.
"""

from __future__ import annotations

from .augment import augment
from .load import DATA_SETS, ROOT_VARIABLE, ImageData, kept_data, load_data
from .order import EpochOrder

__all__ = [
    "DATA_SETS",
    "ROOT_VARIABLE",
    "EpochOrder",
    "ImageData",
    "augment",
    "kept_data",
    "load_data",
]
