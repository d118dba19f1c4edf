"""Adapters: one file per codebase or framework, imported where it is used."""
