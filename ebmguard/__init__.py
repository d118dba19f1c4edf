"""Keeps energy-based model training alive."""
