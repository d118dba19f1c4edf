"""`ebmguard doctor`: what is wrong with a trainer's source, which is read and never run."""

from .problems_of_source import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
