"""Tracks chains that a loop feeds back, ``c = sample(f, c)``, and puts them back in place."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..sampling import is_opaque, variables_of

__all__ = ["ChainTracker"]

_log = logging.getLogger("ebmguard")

_STALE = 20  # sampler calls in which a buffer is written to, whatever it is for
_UNWRITTEN = (
    "The attached buffer is no longer the one that the loop writes to: nothing in it changes. If "
    "the loop makes a new one (torch.cat, list + list), a rollback puts back what nobody reads. "
    "Write buffer[:] = new, or attach an object with state_dict() that holds the buffer."
)
_CALLS = 8  # of the sampler that are looked at: of two steps at least, with several samplers too
_READ = 3  # of which values are compared
_ENTRIES = 16  # of a sample, by which its copy is known


class ChainTracker:
    """Follows tensors from a sampler's result to its next arguments, by their memory.

    Values that are written to this memory are what the loop passes next. A chain has a number,
    which a result of the sampler inherits from the argument that it continues.

    Attributes:
        held: the latest tensor of every chain, by its number.
        feedback: "kept" if the loop passes results on, "copied" if it passes copies, else empty.
    """

    def __init__(self) -> None:
        self.held: dict[int, Tensor] = {}
        self.feedback = ""
        self._known = set[int]()  # chains that came in again
        self._versions: dict[int, int] = {}  # of tensors that were arguments only
        self._written = set[int]()  # chains that the sampler itself wrote to
        self._inputs: list[tuple[int, Tensor]] = []  # arguments of the call under way
        self._numbers, self._calls, self._is_over = count(), 0, False
        # The buffer's last versions, their age in calls, the age to read its values at, these.
        self._buffer: tuple[Any, int, int, Any] = None, 0, _STALE, None

    def enter(
        self, call: object, args: Sequence[Any], kwargs: Mapping[str, Any], buffer: object
    ) -> None:
        """Take the arguments of a sampler call. Snapshots themselves put the buffer back."""
        self._watch(buffer)
        if self._is_over:
            return
        numbers = self._numbers_by_memory()
        results = [x for i, x in self.held.items() if i not in self._versions]
        reads = 0 < self._calls < _READ and not self._known
        self._inputs = []
        for x in _tensors([*tree_leaves((args, kwargs)), *_kept(call)]):
            number = numbers.get(_memory(x))
            whole = x if x._base is None else x._base
            repeats = reads and any(_has_rows_of(whole, chain) for chain in results)
            if number is None:
                self.feedback = self.feedback or ("copied" if repeats else "")
                if x is buffer or self._calls >= _CALLS:
                    continue
                number = numbers[_memory(x)] = next(self._numbers)
                # All of its memory: the next call may get another part of it.
                self.held[number] = x.detach().new_empty(0).set_(x.untyped_storage())
                self._versions[number] = _version(x)
            elif number not in self._versions:
                self._know(number)
            else:
                is_changed = self._versions[number] != _version(x)
                if number in self._written or (is_changed and repeats):
                    self._know(number)
                self._versions[number] = _version(x)
            self._inputs.append((number, x))

    def leave(self, result: object) -> None:
        """Take the result of the sampler call."""
        if self._is_over:
            return
        for i, x in self._inputs:
            if self._versions.get(i, _version(x)) != _version(x):
                self._versions[i] = _version(x)
                self._written.add(i)
        numbers = self._numbers_by_memory()
        used = [i for i, _ in self._inputs if i not in self._versions]
        largest: dict[int, Tensor] = {}
        for x in _tensors(tree_leaves(result)):
            if x.numel() > largest.setdefault(_memory(x), x).numel():
                largest[_memory(x)] = x
        for memory, x in largest.items():
            number = numbers.get(memory)
            if number is None:
                alike = [i for i in used if self.held[i].numel() == x.numel()]
                number = alike[0] if alike else next(self._numbers)
                self.held[number] = x.detach()
            elif number not in used and number not in self._versions:
                self._know(number)  # the sampler keeps it: it was never an argument
            self._versions.pop(number, None)
            used = [i for i in used if i != number]
        self._calls, self._inputs = self._calls + 1, []
        if self._calls >= _CALLS:
            self.held = {i: x for i, x in self.held.items() if i in self._known}
            self._is_over = not self.held

    def _watch(self, buffer: object) -> None:
        """Log once that a buffer of tensors is no longer written to."""
        rows = buffer if isinstance(buffer, list) else [buffer]
        tensors: list[Tensor] = [x for x in rows if isinstance(x, Tensor)]
        before, calls, patience, values = self._buffer
        if not patience or len(tensors) < len(rows):
            return
        now = [(id(x), _version(x)) for x in tensors[:1] + tensors[-1:]]
        calls = calls + 1 if now == before else 0
        if calls >= patience:
            # Writing through `.data`, or into the middle of a list, shows in the values alone.
            calls, last = 0, values
            values = [float(x.detach().float().sum()) for x in tensors]
            patience *= 0 if values == last else 2
            if not patience:
                _log.warning(_UNWRITTEN)
        self._buffer = now, calls, patience, values

    def put_back(self, saved: Mapping[int, Tensor]) -> None:
        """Write the saved values where the chains are now."""
        for number in self._known & {*saved} & {*self.held}:
            x = self.held[number]
            if saved[number].numel() == x.numel() and _is_writable(x):
                x.copy_(saved[number].reshape(x.shape))

    def _know(self, number: int) -> None:
        self._known.add(number)
        if self.feedback != "kept":
            self.feedback = "kept" if _is_writable(self.held[number]) else "copied"

    def _numbers_by_memory(self) -> dict[int, int]:
        return {_memory(x): number for number, x in self.held.items()}


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield plain tensors that have memory; parameters are left to the model."""
    plain = (x for x in values if type(x) is Tensor and not is_opaque(x))
    yield from (x for x in plain if x.ndim and x.numel() and not x.is_meta)


def _kept(call: object) -> Iterator[object]:
    """Yield what a sampler keeps: attributes of its object, closed-over and global variables."""
    function = call.func if isinstance(call, partial) else call
    kept = getattr(getattr(function, "__self__", function), "__dict__", {})
    yield from (*kept.values(), *kept.get("_buffers", {}).values(), *variables_of(call).values())


def _has_rows_of(x: Tensor, before: Tensor) -> bool:
    """Return whether a sample of ``before`` is in x, bit by bit."""
    if x.shape[1:] != before.shape[1:] or x.dtype != before.dtype or not x.is_floating_point():
        return False
    rows = [tensor.detach().reshape(len(tensor), -1) for tensor in (x, before.to(x.device))]
    thinned = [tensor[:, :: max(1, tensor.shape[1] // _ENTRIES)] for tensor in rows]
    return bool((thinned[0][:, None] == thinned[1]).all(-1).any())


def _is_writable(x: Tensor) -> bool:
    """Return whether values can be written into x: no entries share memory, no inference mode."""
    overlaps = any(not step and size > 1 for size, step in zip(x.shape, x.stride(), strict=True))
    return not (overlaps or x.is_inference())
