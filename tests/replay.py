"""A stand-in for a CUDA graph: operations on CPU tensors, recorded and run again."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def count_replays_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the guard take what a :class:`Replay` records for a CUDA graph."""
    names = "sampling.tempering", "sampling.recording", "retrofit.step"
    for name in names:
        module = import_module(f"ebmguard.{name}")  # `guard` is also a function of its package
        monkeypatch.setattr(module, "is_capturing", lambda: Replay.recording)


def capture_as_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the trainers take the CPU for a GPU, on which CUDA graphs are :class:`Replay`."""
    monkeypatch.setattr("ebmguard.reference_training.engine.graphs._is_gpu", lambda device: True)
    count_replays_as_graphs(monkeypatch)
    monkeypatch.setattr("torch.cuda.CUDAGraph", Replay)
    monkeypatch.setattr("torch.cuda.graph", lambda graph, **options: graph)
    streams = "device", "stream", "Stream", "current_stream", "synchronize"
    for name in (*streams, "graphs.graph_pool_handle"):
        monkeypatch.setattr(f"torch.cuda.{name}", MagicMock())  # of which nothing is asked


class Replay(TorchDispatchMode):
    """Records a block's operations; :meth:`replay` runs them on the same storages.

    As with a CUDA graph, nothing has been computed when the block ends, a replay runs none of the
    Python code, and what it writes lies where it lay before.
    """

    recording = False

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __enter__(self) -> Replay:
        Replay.recording = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Replay.recording = False
        for *_, fresh in self._operations:
            for out in fresh:
                if out.is_floating_point():
                    out.data.fill_(torch.nan)  # not seen by autograd, as on a GPU

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        is_view = not writes and any(each.alias_info for each in func._schema.returns)
        if not is_view:
            fresh = [] if writes else [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            self._operations.append((func, args, kwargs, fresh))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, fresh in self._operations:
            result = func(*args, **kwargs)
            for old, new in zip(fresh, tree_leaves(result), strict=False):
                old.data.copy_(new)
