"""Run folders for people: reads the files of sinks and trainers, and shows them."""

from .folder import RecordedRun

__all__ = ["RecordedRun"]
