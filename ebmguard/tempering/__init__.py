"""Runs a sampler on the tempered energy, and watches its gradients as they pass by."""

from .gradients import DifferentiatedCall
from .tempering import Tempering, find_module, is_capturing, scale

__all__ = ["DifferentiatedCall", "Tempering", "find_module", "is_capturing", "scale"]
