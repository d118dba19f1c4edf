"""TensorBoard's event file: records of serialised protobufs with checksums.

Written here instead of with ``torch.utils.tensorboard`` for two reasons. Its checksum runs byte by
byte in Python, which is two thirds of the cost of a row (250 of 360 microseconds, on a thread that
competes with the trainer for the interpreter); and its queue is written when the thread gets to it,
so that what a kill loses is left to chance.

It needs the package tensorboard (and numpy, which comes with it), so that only
:mod:`ebmguard.sinks.tensorboard` imports it, and only when a sink is made.
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

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData

from .jsonl import AppendFile

__all__ = ["EventFile", "crc32c"]

_SUFFIX = ".guard"
_CHUNK = 1024
_HISTOGRAM_BINS = 30
# Values beyond this are left out of histograms, whose edges TensorBoard turns into float32.
_HISTOGRAM_LIMIT = 1e38
_file_numbers = itertools.count()


def _shifted_tables() -> np.ndarray:
    """Row k: the CRC-32C register after each single byte followed by k zero bytes.

    The checksum is linear over GF(2): that of n bytes is the XOR of one entry per byte, so that one
    look-up for all bytes replaces a loop in Python.
    """
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


class EventFile:
    """One new event file in a folder; events are kept in memory until :meth:`flush`.

    Attributes:
        is_continued: whether the folder held files of this class before.

    Raises:
        ConfigError: at construction, if the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.is_continued = any(folder.glob(f"*{_SUFFIX}"))
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}."
            f"{os.getpid()}.{next(_file_numbers)}{_SUFFIX}"
        )
        self._file = AppendFile(folder / name)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add_row(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]],
        prefix: str = "",
    ) -> None:
        """One event with all scalars and histograms of a step, their tags behind a prefix.

        Scalars of event files are float32: what is beyond its range is stored as an infinity.
        """
        self._file.add(partial(_row, time.time(), step, prefix, dict(scalars), dict(histograms)))

    def add_text(self, step: int, tag: str, markdown: str) -> None:
        """One event with a text for the Text page."""
        content = TextPluginData(version=0).SerializeToString()
        self._add_tensor(step, tag, "text", content, markdown.encode(), dims=(1,))

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
                    _, value, lower, upper = tags
                    chart.margin.series.add(value=value, lower=lower, upper=upper)
                else:
                    chart.multiline.tag.extend(tags)
        self._add_tensor(
            -1,  # before every step, so that no restart voids it
            "custom_scalars__config__",
            "custom_scalars",
            b"",
            message.SerializeToString(),
            dims=(),
        )

    def add_restart(self, step: int) -> None:
        """Void what was written for this step and later ones.

        Some readers go by such events; others drop, tag by tag, the steps that a later event has
        gone back to, and ignore them. It voids all tags of a folder, so nothing is done if other
        writers' event files lie in it.
        """
        files = self._file.path.parent.glob("*tfevents*")
        if not all(path.name.endswith(_SUFFIX) for path in files):
            return
        start = SessionLog(status=SessionLog.START)
        # Twice: a reader takes the first one in a folder for the beginning of the run.
        for _ in range(2):
            self._add(Event(wall_time=time.time(), step=step, session_log=start))

    def flush(self) -> None:
        """Append the kept events to the file.

        Raises:
            OSError: if the disk does not take them; they are kept for the next flush.
        """
        self._file.flush()

    def _add_tensor(
        self, step: int, tag: str, plugin: str, content: bytes, value: bytes, dims: tuple[int, ...]
    ) -> None:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in dims])
        event = Event(wall_time=time.time(), step=step)
        event.summary.value.add(
            tag=tag,
            tensor=TensorProto(dtype="DT_STRING", string_val=[value], tensor_shape=shape),
            metadata=SummaryMetadata(
                plugin_data=SummaryMetadata.PluginData(plugin_name=plugin, content=content)
            ),
        )
        self._add(event)

    def _add(self, event: Event) -> None:
        self._file.add(_record(event))


def _record(event: Event) -> bytes:
    data = event.SerializeToString()
    header = struct.pack("<Q", len(data))
    return b"".join((header, _masked_crc(header), data, _masked_crc(data)))


def _row(
    wall_time: float,
    step: int,
    prefix: str,
    scalars: Mapping[str, float],
    histograms: Mapping[str, Sequence[float]],
) -> bytes:
    event = Event(wall_time=wall_time, step=step)
    add = event.summary.value.add
    for tag, value in scalars.items():
        add(tag=prefix + tag, simple_value=value)
    for tag, values in histograms.items():
        histogram = _histogram(values)
        if histogram is not None:
            add(tag=prefix + tag, histo=histogram)
    return _record(event)


def _histogram(values: Sequence[float]) -> HistogramProto | None:
    """Equal bins between the smallest and the largest value; None if no value can be drawn.

    NaN and infinite values have no bin. The row's ``nonfinite/*`` tags count them.
    """
    drawn = np.asarray(values, dtype=np.float64).ravel()
    drawn = drawn[np.abs(drawn) < _HISTOGRAM_LIMIT]
    if not drawn.size:
        return None
    low, high = float(drawn.min()), float(drawn.max())
    bins = _HISTOGRAM_BINS if high > low else 1
    width = (high - low) / bins
    edges = low + width * np.arange(1, bins + 1)
    # A range of a few ulps has bins of width 0: everything then lies in the last.
    index = (drawn - low) / width if width > 0 else np.full(drawn.shape, bins - 1.0)
    counts = np.bincount(np.minimum(index, bins - 1).astype(np.int64), minlength=bins)
    return HistogramProto(
        min=low,
        max=high,
        num=drawn.size,
        sum=float(drawn.sum()),
        sum_squares=float(drawn @ drawn),
        bucket_limit=edges.tolist(),
        bucket=counts.tolist(),
    )
