"""Where rows, alerts and rollbacks go: any object like :class:`Sink`, also your own."""

from .jsonl import JsonlSink, read_jsonl, to_json
from .protocol import LEVEL_NUMBERS, MARKER_PREFIX, TAG_PREFIX, Sink, prefixed
from .tensorboard import AddScalarSink, TensorBoardSink, alert_markdown, marker_tag
from .writer import LOCK, PatientSink, Writer, as_sink, is_gone, lock_folder

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
