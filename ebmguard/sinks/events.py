"""TensorBoard's event file: records of serialised protobufs with checksums.

Not with the package's own writers: their checksum, byte by byte in Python, is two thirds of the
cost of a row, and what a kill loses from their queue is left to chance. Imported only when a sink
is made, since it needs the package tensorboard (and numpy, which comes with it).
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.text import metadata as text
from tensorboard.util.tensor_util import make_tensor_proto

from .jsonl import AppendFile
from .protocol import Histograms, Scalars

__all__ = ["EventFile", "crc32c"]

_SUFFIX = ".guard"
_CHUNK = 1024
_HISTOGRAM_BINS = 30
# Values beyond this are left out of histograms, whose edges TensorBoard turns into float32.
_HISTOGRAM_LIMIT = 1e38
_file_numbers = itertools.count()


def _shifted_tables() -> np.ndarray:
    """Row k: the CRC-32C register after each single byte followed by k zero bytes."""
    # The checksum is linear over GF(2): that of n bytes is the XOR of one entry per byte.
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    rows = [table]
    for _ in range(_CHUNK - 1):
        rows.append(table[rows[-1] & 0xFF] ^ (rows[-1] >> 8))
    return np.stack(rows)


# Reversed, so that the last n rows belong to the bytes of a chunk of n in their order.
_TABLE = _shifted_tables()[::-1].ravel()
_OFFSETS = np.arange(_CHUNK, dtype=np.int64) * 256


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of the bytes, as RFC 3720, appendix B.4, defines it."""
    register = 0xFFFFFFFF
    view = np.frombuffer(data, dtype=np.uint8)
    for start in range(0, len(view), _CHUNK):
        chunk = view[start : start + _CHUNK].astype(np.int64)
        head = min(len(chunk), 4)
        # The register so far enters through the first four bytes; what is left of it after a
        # shorter chunk is shifted on.
        chunk[:head] ^= np.frombuffer(struct.pack("<I", register), dtype=np.uint8)[:head]
        entries = _TABLE.take(_OFFSETS[-len(chunk) :] + chunk)
        register = int(np.bitwise_xor.reduce(entries)) ^ (register >> (8 * head))
    return register ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> bytes:
    # TFRecord masks its checksums, so that a record that holds records has no fixed point.
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


class EventFile(AppendFile):
    """One new event file in a folder; events are kept in memory until :meth:`flush`.

    Attributes:
        is_continued: whether the folder held files of this class before.
    """

    def __init__(self, folder: Path) -> None:
        self.is_continued = any(folder.glob(f"*{_SUFFIX}"))
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}."
            f"{os.getpid()}.{next(_file_numbers)}{_SUFFIX}"
        )
        super().__init__(folder / name)
        self._add(0, file_version="brain.Event:2")

    def add_row(
        self, step: int, scalars: Scalars, histograms: Histograms, prefix: str = ""
    ) -> None:
        """One event with all scalars and histograms of a step, their tags behind a prefix.

        Scalars of event files are float32: what is beyond its range is stored as an infinity.
        """
        self.add(partial(_row, time.time(), step, prefix, dict(scalars), dict(histograms)))

    def add_text(self, step: int, tag: str, markdown: str) -> None:
        """One event with a text for the Text page."""
        metadata = text.create_summary_metadata(display_name=None, description=None)
        self._add_tensor(step, tag, [markdown.encode()], metadata)

    def add_layout(self, layout: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        """One event with the layout of the Custom Scalars page.

        Args:
            layout: category to chart title to tags: regular expressions, one line for each tag
                that matches; or ``("margin", value, lower, upper)``, a line in a band.
        """
        message = layout_pb2.Layout()
        for title, charts in layout.items():
            category = message.category.add(title=title)
            for chart_title, tags in charts.items():
                chart = category.chart.add(title=chart_title)
                if tags[0] == "margin":
                    chart.margin.series.add(value=tags[1], lower=tags[2], upper=tags[3])
                else:
                    chart.multiline.tag.extend(tags)
        tag, metadata = custom_scalar.CONFIG_SUMMARY_TAG, custom_scalar.create_summary_metadata()
        # Before every step, so that no restart voids it.
        self._add_tensor(-1, tag, message.SerializeToString(), metadata)

    def add_restart(self, step: int) -> None:
        """Void what was written for this step and later ones.

        Only some readers go by such events. They void all tags of a folder, so nothing is done if
        other writers' event files lie in it.
        """
        if all(path.name.endswith(_SUFFIX) for path in self.path.parent.glob("*tfevents*")):
            # Twice: a reader takes the first one in a folder for the beginning of the run.
            for _ in range(2):
                self._add(step, session_log=SessionLog(status=SessionLog.START))

    def _add_tensor(self, step: int, tag: str, value: bytes | list[bytes], metadata: Any) -> None:
        tensor = make_tensor_proto(value)
        self._add(step, summary={"value": [{"tag": tag, "tensor": tensor, "metadata": metadata}]})

    def _add(self, step: int, **content: Any) -> None:
        self.add(_record(Event(wall_time=time.time(), step=step, **content)))


def _record(event: Event) -> bytes:
    data = event.SerializeToString()
    header = struct.pack("<Q", len(data))
    return b"".join((header, _masked_crc(header), data, _masked_crc(data)))


def _row(
    wall_time: float, step: int, prefix: str, scalars: Scalars, histograms: Histograms
) -> bytes:
    event = Event(wall_time=wall_time, step=step)
    add = event.summary.value.add
    for tag, value in scalars.items():
        # A group that stands first is not below the prefix.
        add(tag=tag if tag.startswith("_") else prefix + tag, simple_value=value)
    for tag, values in histograms.items():
        drawn = np.asarray(values, dtype=np.float64)
        drawn = drawn[np.abs(drawn) < _HISTOGRAM_LIMIT]  # NaN has no bin; nonfinite/* count it
        if drawn.size:
            add(tag=prefix + tag, histo=_histogram(drawn))
    return _record(event)


def _histogram(drawn: np.ndarray) -> HistogramProto:
    """Equal bins between the smallest and the largest value."""
    low, high = drawn.min(), drawn.max()
    bins = _HISTOGRAM_BINS if high > low else 1
    # Edges, since numpy refuses a number of bins for which there are too few numbers between.
    counts, edges = np.histogram(drawn, np.linspace(low, high, bins + 1))
    return HistogramProto(
        min=low,
        max=high,
        num=drawn.size,
        sum=drawn.sum(),
        sum_squares=drawn @ drawn,
        bucket_limit=edges[1:],
        bucket=counts,
    )
