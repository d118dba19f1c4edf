"""Run folders and what a person sees of them: reads what sinks and trainers wrote."""

from .folder import RecordedRun

__all__ = ["RecordedRun"]
