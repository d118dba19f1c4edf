"""Where rows of diagnostics, alerts and rollbacks are written.

A sink is anything with the four methods of :class:`Sink`. ``log_dir=`` makes the two that are
built in, :class:`JsonlSink` and :class:`TensorBoardSink`; a logger with
``add_scalar(tag, value, step)`` is wrapped by :class:`AddScalarSink`; :class:`WebhookSink` sends
alerts to a web address.
"""

from .jsonl import JsonlSink, read_jsonl, to_json
from .protocol import PatientSink, Sink
from .resolve import AddScalarSink, as_sink, open_log_dir
from .tensorboard import TensorBoardSink
from .webhook import WebhookSink
from .writer import Writer

__all__ = [
    "AddScalarSink",
    "JsonlSink",
    "PatientSink",
    "Sink",
    "TensorBoardSink",
    "WebhookSink",
    "Writer",
    "as_sink",
    "open_log_dir",
    "read_jsonl",
    "to_json",
]
