"""TensorBoard's event file: records of serialised protobufs with checksums.

This module frames records itself: tensorboard's writers need 0.3 ms a row for checksums, this
0.02, and they cannot go on at the right byte after a full disk.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG, create_summary_metadata
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.util.tensor_util import make_tensor_proto

from .jsonl import AppendFile
from .protocol import Histograms, Scalars, prefixed

__all__ = ["EventFile", "crc32c"]

_SUFFIX = ".guard"
_HISTOGRAM_BINS = 30
_HISTOGRAM_LIMIT = 1e38  # TensorBoard turns the edges of bins into float32
_BLOCK = 1024  # bytes
_BEGIN = b"Td\x1fd"  # brings the checksum's register from zeros to the ones that it begins with


def _table() -> np.ndarray:
    """Rows of 256 numbers: the CRC-32C register after that byte and the zeros that follow it."""
    table = np.arange(256, dtype="<u4")
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    rows = [table]
    while len(rows) < _BLOCK:
        rows.append(table[rows[-1] & 0xFF] ^ (rows[-1] >> 8))
    return np.concatenate(rows[::-1])


_TABLE = _table()
_ROWS = np.arange(_BLOCK) * 256


@lru_cache(8)  # nearly all events have the length of one before
def crc32c(record: bytes) -> int:
    """The CRC-32C (Castagnoli), as RFC 3720, appendix B.4, defines it."""
    # It is linear over GF(2): the XOR of one entry per byte. Zeros before the beginning add
    # nothing, and the register so far enters through the first bytes of the next block.
    data = bytearray(-len(_BEGIN + record) % _BLOCK) + _BEGIN + record
    register = np.zeros(1, "<u4")
    for block in np.frombuffer(data, np.uint8).reshape(-1, _BLOCK):
        block[:4] ^= register.view(np.uint8)
        register = np.bitwise_xor.reduce(_TABLE.take(_ROWS + block), keepdims=True)
    return int(~register[0])


class EventFile(AppendFile):
    """A new event file in a folder; events are kept in memory until :meth:`flush`."""

    def __init__(self, folder: Path, made: list[Path]) -> None:
        self.is_continued = any(folder.glob(f"*{_SUFFIX}"))  # it held such files before
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        file = folder / f"{name}.{time.perf_counter_ns()}{_SUFFIX}"
        super().__init__(file, self._encoded, made)
        self._blank = lru_cache(8)(_blank)  # rows have the same names as the one before
        self._add(0, file_version="brain.Event:2")

    def add_row(self, step: int, scalars: Scalars, histograms: Histograms) -> None:
        """Add one event with all numbers of a row; scalars beyond float32 are infinities."""
        self.add((time.time(), step, dict(scalars), dict(histograms)))

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Add one event with one number."""
        self.add_row(step, {tag: value}, {})

    def add_text(self, tag: str, markdown: str, step: int) -> None:
        """Add one event with a text for the Text page."""
        self._add(step, summary=text_pb(tag, markdown))

    def add_layout(self, layout: Mapping[str, Mapping[str, str]]) -> None:
        """Add one event with the layout of the Custom Scalars page."""
        message = Layout()
        for title, charts in layout.items():
            category = message.category.add(title=title)
            for chart_title, tags in charts.items():
                chart = category.chart.add(title=chart_title)
                first, *rest = map(prefixed, tags.split())
                if first == "margin":
                    value, lower, upper = rest
                    chart.margin.series.add(value=value, lower=lower, upper=upper)
                else:  # the page needs to match only the start of a tag
                    chart.multiline.tag.extend(f"{tag}$" for tag in (first, *rest))
        summary = Summary()
        tensor = make_tensor_proto(message.SerializeToString())
        summary.value.add(tag=CONFIG_SUMMARY_TAG, metadata=create_summary_metadata(), tensor=tensor)
        self._add(-1, summary=summary)  # before every step, so that no restart voids it

    def add_restart(self, step: int) -> None:
        """Void this step and later ones, unless other writers use the folder too."""
        if all(path.name.endswith(_SUFFIX) for path in self.path.parent.glob("*tfevents*")):
            # Twice: a reader takes the first one in a folder for the beginning of the run.
            for _ in range(2):
                self._add(step, session_log=SessionLog(status=SessionLog.START))

    def _add(self, step: int, **content: Any) -> None:
        self.add(Event(wall_time=time.time(), step=step, **content).SerializeToString())

    def _encoded(self, event: Any) -> bytes:
        if not isinstance(event, bytes):
            event = self._row(*event)
        record = b""
        for part in (struct.pack("<Q", len(event)), event):
            crc = crc32c(part)
            # Masked, so that a record that holds records has no fixed point.
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
            record += part + struct.pack("<I", masked)
        return record

    def _row(self, wall_time: float, step: int, scalars: Scalars, histograms: Histograms) -> bytes:
        event, values = self._blank(tuple(scalars))
        event.wall_time, event.step = wall_time, step
        for value, number in zip(values, scalars.values(), strict=True):
            value.simple_value = number
        for name, numbers in histograms.items():
            drawn = np.asarray(numbers, dtype=np.float64)
            drawn = drawn[np.abs(drawn) < _HISTOGRAM_LIMIT]  # NaN has no bin; nonfinite/* count it
            if drawn.size:
                event.summary.value.add(tag=prefixed(name), histo=_histogram(drawn))
        data: bytes = event.SerializeToString()
        del event.summary.value[len(values) :]
        return data


def _blank(names: tuple[str, ...]) -> tuple[Event, list[Any]]:
    """An event with these scalars, and the places of their values."""
    event = Event()
    return event, [event.summary.value.add(tag=prefixed(name)) for name in names]


def _histogram(drawn: np.ndarray) -> HistogramProto:
    low, high = drawn.min(), drawn.max()
    bins = _HISTOGRAM_BINS if high > low else 1
    # Edges, since numpy refuses a number of bins for which there are too few numbers between.
    counts, edges = np.histogram(drawn, np.linspace(low, high, bins + 1))
    moments = {"num": drawn.size, "sum": drawn.sum(), "sum_squares": drawn @ drawn}
    return HistogramProto(min=low, max=high, bucket_limit=edges[1:], bucket=counts, **moments)
