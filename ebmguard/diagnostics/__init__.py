"""Pure functions of detached tensors: named numbers, one file per family.

Nothing waits for the device.
"""
from .raw_energies import *
from .weights import *
