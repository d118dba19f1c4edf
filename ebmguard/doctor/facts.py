"""All that was read out of one trainer, which the checks of its source look at."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from .differences import Difference, find_differences
from .sampling import Sampler, find_samplers
from .source import Source
from .usage import Usage, find_usages

__all__ = ["Facts"]


@dataclass(frozen=True)
class Facts:
    """A trainer's file.

    Attributes:
        source: the file.
        beside: other files of its folder that it imports, which may define the network.
        samplers: sampling loops of the file, and of files beside it whose function it imports.
        differences, usages: what was found in the file itself.
    """

    source: Source
    beside: Sequence[Source]
    samplers: Sequence[Sampler]
    differences: Sequence[Difference]
    usages: Sequence[Usage]

    @classmethod
    def of(cls, source: Source, beside: Sequence[Source] = ()) -> Facts:
        """Read a parsed file."""
        imported = {
            alias.asname or alias.name
            for node in ast.walk(source.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        samplers = find_samplers(source)
        samplers += [
            sampler
            for each in beside
            for sampler in find_samplers(each)
            if sampler.name in imported and not sampler.is_inline
        ]
        differences = find_differences(source, samplers)
        return cls(source, beside, samplers, differences, find_usages(source))
