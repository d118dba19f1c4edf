"""The sinks, to which rows, alerts and rollbacks go: any object like :class:`Sink`, also yours.

The sinks of files are imported when one is first used: a run without ``log_dir`` writes none.
"""

from typing import TYPE_CHECKING

from ..errors import lazy
from .protocol import LEVEL_NUMBERS, MARKER_PREFIX, TAG_PREFIX, Sink, prefixed
from .writer import LOCK, PatientSink, Writer, as_sink, is_gone, lock_folder

if TYPE_CHECKING:
    from .jsonl import JsonlSink, read_jsonl, to_json
    from .tensorboard import AddScalarSink, TensorBoardSink, alert_markdown, marker_tag

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

if not TYPE_CHECKING:
    __getattr__ = lazy(
        __name__,
        {
            **dict.fromkeys(("JsonlSink", "read_jsonl", "to_json"), ".jsonl"),
            **dict.fromkeys(
                ("AddScalarSink", "TensorBoardSink", "alert_markdown", "marker_tag"), ".tensorboard"
            ),
            "WebhookSink": "ebmguard.adapters.webhook",  # its former home was this package
        },
    )
