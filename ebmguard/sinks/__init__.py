"""Where rows of diagnostics, alerts and rollbacks are written.

A sink is anything with the four methods of :class:`Sink`. ``log_dir=`` makes the two that are
built in, :class:`JsonlSink` and :class:`TensorBoardSink`; a logger with
``add_scalar(tag, value, step)`` is wrapped by :class:`AddScalarSink`; :class:`WebhookSink` sends
alerts to a web address. The names of tags and the text of alerts are here for sinks of your own.
"""

from .jsonl import JsonlSink, read_jsonl, to_json
from .protocol import (
    LEVEL_NUMBERS,
    MARKER_PREFIX,
    TAG_PREFIX,
    Sink,
    alert_markdown,
    marker_tag,
    recovery_markdown,
)
from .tensorboard import AddScalarSink, TensorBoardSink
from .webhook import WebhookSink
from .writer import PatientSink, Writer, as_sink, open_log_dir

__all__ = [
    "LEVEL_NUMBERS",
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
    "marker_tag",
    "open_log_dir",
    "read_jsonl",
    "recovery_markdown",
    "to_json",
]
