"""Where rows, alerts and rollbacks are written: anything like :class:`Sink`, yours included.

``log_dir=`` makes a :class:`JsonlSink` and a :class:`TensorBoardSink`.
"""

from .jsonl import JsonlSink, read_jsonl, to_json
from .lock import LOCK, is_gone, lock_folder
from .protocol import (
    LEVEL_NUMBERS,
    MARKER_PREFIX,
    TAG_PREFIX,
    Sink,
    alert_markdown,
    marker_tag,
    prefixed,
)
from .tensorboard import AddScalarSink, TensorBoardSink
from .webhook import WebhookSink
from .writer import PatientSink, Writer, as_sink

__all__ = [
    "LEVEL_NUMBERS",
    "LOCK",
    "MARKER_PREFIX",
    "TAG_PREFIX",
    "AddScalarSink",
    "JsonlSink",
    "PatientSink",
    "Sink",
    "TensorBoardSink",
    "WebhookSink",
    "Writer",
    "alert_markdown",
    "as_sink",
    "is_gone",
    "lock_folder",
    "marker_tag",
    "prefixed",
    "read_jsonl",
    "to_json",
]
