"""Check the first losses: do they get the energies of the samples that the sampler drew?

Only equal numbers show where energies come from. An input is a sample if the sampler returned the
same row. An energy is the module's if the module returned it. Samples that are augmented in
between, or that bypass the module's hook, are never refused.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import ConfigError, LossError
from ..sampling import Measured, Tempering, is_capturing, is_compiled, is_opaque
from ..trainer import leaves
from .calibration import Calibration
from .matching import (
    check_scale,
    contains,
    functions,
    functions_of,
    host_rows,
    is_linear,
    is_mean,
    nonlinear_function,
    row_hashes,
)
from .strength import Settings

__all__ = ["FirstLosses"]

_log = logging.getLogger("ebmguard")

_LOSSES = 5  # checked losses, until one is certain
_MOST = 1000  # calls that are kept of what comes between two losses

_RIGHT = "Write loss_fn(f(x), f(samples)), x from the data and samples from the sampler."
_SAME = f"f_pos and f_neg are one tensor: their difference is 0, and nothing trains. {_RIGHT}"
_SAMPLES = f"%s is what the sampler returned, not its energies. {_RIGHT}"
_TWICE = f"f_pos and f_neg are energies of the same samples: nothing trains. {_RIGHT}"
_MEAN = f"f_neg is a mean over the batch; weights need the energy of each sample. {_RIGHT}"
_SWAPPED = (
    "The sides are swapped: f_pos is the energy of what the sampler returned, and f_neg is not; "
    f"such a loss trains backwards. {_RIGHT} If f is low on data, guard(convention='energy') says "
    "so; the order stays."
)
_HEADS = (
    "The energies have shape %s, %d numbers a sample; the sampler follows one number, another "
    "output of the network. Pass that one: logits.logsumexp(1) of a classifier's logits, or "
    "heads.sum(1) of heads whose sum is the energy."
)
_OTHER = (
    "The sampler follows {0} of the network's {2} outputs, and the loss gets {1} of them: another "
    "energy than is sampled. Pass net(x).logsumexp(1) of a classifier's logits, on both sides."
)
_JOINED = (
    "The sampler follows more than the network: other terms join its gradient (a prior, a decay of "
    "x), untempered, and the loss does not get the network's own output. Let the network return "
    "the whole energy, to both; or use g.temper(energy) in the sampler and guard(loss_fn, None, "
    "...)."
)
_MEANS = (
    "f_neg is one number of the %d energies in each row of samples, as if it were one negative. "
    'Pass them all, loss_fn(f(x, y), f(x, samples), groups="rows"), of shapes (N,) and (N, M).'
)
_UNLIKE = (
    "f_pos is the {0} of the network's outputs, and f_neg the {1}: no one energy. Pass the same of "
    "net(x) and net(samples)."
)
_CALLED = {"sum": "the sum", "logsumexp": "the logsumexp", "one output": "one"}
_CALLED |= {"values": "the values of each", "log-probability": "a label's log-probability"}
_BENT = (
    "f_neg is the %s of the energies that the sampler follows, so that it samples another density "
    "than the loss trains. Pass the module's own output, and add other functions of it outside."
)
_DETACHED = (
    "{0} has had no gradient since the first step (a `.detach()`, or `torch.no_grad()` around it), "
    "and the other side has: half of the loss trains nothing. Write {0} = f({1}) with gradients "
    "enabled; only {1} may be detached."
)


class _Calls:
    """A forward hook that keeps the marks of inputs, and the outputs that carry a gradient.

    The hook of a copy of the module, or of one that is read from a file, keeps nothing.
    """

    only_looks = True  # and returns no other output

    def __init__(self, tempering: Tempering | None = None) -> None:
        self.tempering = tempering
        self.handle: RemovableHandle | None = None
        self.kept = deque[tuple[Tensor, Tensor]](maxlen=8)
        self._left = 0 if tempering is None else _MOST

    def __reduce__(self) -> tuple[Any, ...]:
        return _Calls, ()

    def __call__(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling() or self.tempering is None or not self._left:
            return
        owner = getattr(vars(module).get(self.tempering.energy), "__self__", None)
        if owner is self.tempering or not (_is_plain(output) and output.requires_grad):
            return
        self._left -= 1
        # Labels and noise levels may be those of other samples: the largest argument tells.
        inputs = [x for x in (*args, *kwargs.values()) if _is_plain(x) and len(x) == len(output)]
        most = max((x[0].numel() for x in inputs), default=0)
        marks = [row_hashes(x) for x in inputs if x[0].numel() == most]
        self.kept.append((torch.stack(marks) if marks else output[:0], output.detach().clone()))


class FirstLosses:
    """Compares the first losses with the returned samples, until one can be identified."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._left = _LOSSES
        self._calls = _Calls()
        self._samples: list[Tensor] = []  # their marks, since the loss before
        self._are_old = self._have_moved = self._follows_one = False
        self._follows, self._is_joined, self._decays = "", False, False
        self._waits_for: set[str] = {"f_pos", "f_neg"}  # sides without a gradient so far
        self._first_step: int | None = None

    def sampled(
        self, tempering: Tempering | None, samples: object, parts: Sequence[Any], watch: Calibration
    ) -> None:
        """Record that the sampler was called and returned the samples.

        ``parts`` are the sampler, the energy and the arguments; ``watch`` knows what it follows.
        """
        if watch.is_joined > self._is_joined or watch.decays > self._decays:
            self._left = _LOSSES  # what was right before it was tempered may be so no longer
        self._follows, self._is_joined, self._decays = watch.follows, watch.is_joined, watch.decays
        if not self._left or tempering is None:
            return
        if self._are_old:
            self._samples, self._are_old = [], False
        batches = [x for x in leaves(samples) if _is_plain(x)]
        shape = tempering.gradients.output_shape
        self._follows_one = bool(shape) and shape.numel() in map(len, batches)
        # Of two alike one may be the data; and states that are whole numbers may be data's, too.
        alike = [x.shape[1:] for x in batches]
        batches = [
            x for x in batches if alike.count(x.shape[1:]) == 1 and bool((x.float() % 1).any())
        ]
        marks = [row_hashes(x).cpu() for x in batches]
        shapes = [x.shape for x in batches]
        before = [row_hashes(x).cpu() for x in parts[2:] if _is_plain(x) and x.shape in shapes]
        self._have_moved = not any(contains(before, x) for x in marks)
        self._samples += marks
        if len(self._samples) > _MOST:
            self.stop()
        elif self._calls.tempering is not tempering:
            self._unhook()
            if not any(map(is_compiled, (tempering.module, *parts))):
                self._calls = calls = _Calls(tempering)
                # Modules of torch.jit refuse theirs, and run this one.
                hook = nn.Module.register_forward_hook
                calls.handle = hook(tempering.module, calls, with_kwargs=True)

    def stop(self) -> None:
        """Check no more losses."""
        self._left = 0
        self._samples = []
        self._unhook()

    @property
    def _sees_energies(self) -> bool:
        """Return whether the hook sees the output that the sampler follows."""
        tempering = self._calls.tempering
        return tempering is not None and tempering.energy == "forward"

    def _unhook(self) -> None:
        if self._calls.handle is not None:
            self._calls.handle.remove()
        self._calls = _Calls()

    def check(
        self,
        f_pos: Tensor,
        f_neg: Tensor,
        measured: Measured | None,
        *,
        only_warns: bool,
        scale: float | None = None,
    ) -> None:
        """Refuse energies that certainly do not belong to data and to the sampler's samples.

        Args:
            scale: o, where it was measured.

        Raises:
            LossError: swapped or equal sides, samples instead of energies, or an output that the
                sampler does not follow; only logged if it ``only_warns``.
            ConfigError: the measured direction contradicts ``convention=``, or the measured scale
                is not that of the loss's energy.
        """
        if not (self._left and torch.is_grad_enabled() and _is_plain(f_pos) and _is_plain(f_neg)):
            return
        self._are_old = True
        calls = [(marks.cpu(), host_rows(output)) for marks, output in self._calls.kept]
        self._calls.kept.clear()
        try:
            is_decided = self._are_right(f_pos, f_neg, calls)
            self._check_direction(f_neg, calls, measured)
            if scale is not None and not only_warns:
                check_scale(f_neg, calls, scale)
        except (ConfigError, LossError) as error:
            if isinstance(error, ConfigError) or not only_warns:
                self._left = _LOSSES  # another one may come, in a notebook say
                self._unhook()
                raise
            is_decided = True
            _log.warning("%s", error)
        self._left -= 1
        if is_decided or not self._left:
            self.stop()

    def _are_right(
        self, f_pos: Tensor, f_neg: Tensor, calls: Sequence[tuple[Tensor, Tensor]]
    ) -> bool:
        """Return whether they are right for certain; refuse what is wrong for certain."""
        if f_pos.data_ptr() == f_neg.data_ptr() != 0:
            raise LossError(_SAME)
        if self._settings.models or not self._samples:
            return False
        every = [output for _, output in calls]
        pos, neg = host_rows(f_pos), host_rows(f_neg)
        for name, f, values in (("f_pos", f_pos, pos), ("f_neg", f_neg, neg)):
            is_leaf = (f if f._base is None else f._base).is_leaf
            if is_leaf and not contains(every, values):
                marks = row_hashes(f).cpu()
                if any(torch.equal(marks, sample) for sample in self._samples):
                    raise LossError(_SAMPLES % name)
        known, other = list[Tensor](), list[Tensor]()
        for marks, output in calls:
            if marks.numel():
                is_sample = torch.isin(marks, torch.cat(self._samples)).all(0)
                known.append(output[is_sample])
                other.append(output[~is_sample])
        sides = [(contains(known, x), contains(other, x)) for x in (pos, neg)]
        if sides == [(True, False), (False, True)]:
            raise LossError(_SWAPPED)
        is_same = torch.equal(pos, neg) and len(set(pos.flatten().tolist())) > 2
        if is_same and sum(sides[0]) == 1 and self._have_moved:
            raise LossError(_TWICE)
        if is_mean(known, neg):
            raise LossError(_MEAN)
        total, heads = neg.sum(1), neg.shape[1]
        energies = [x[:, 0] for x in known if x.shape == (len(neg), 1)]  # one number a sample
        is_sum = any(torch.allclose(total, x, 1e-3, 1e-6) for x in energies)
        if self._follows_one and heads > 1 and not is_sum:
            raise LossError(_HEADS % (tuple(f_neg.shape), heads))
        is_output = contains(every, neg)
        ways = functions_of([*every, *other], pos.sum(1)), functions_of([*every, *known], total)
        if all(ways) and ways[0].isdisjoint(ways[1]) and "sum" in ways[0] | ways[1]:
            raise LossError(_UNLIKE.format(*map(min, ways)))
        is_one = contains([x for x in every if x.shape[1] == 1], pos)
        for out in (x for x in [*every, *known] if x.shape[1] > 1 and len(x) == len(neg)):
            names = functions(out, total)
            if is_one and "sum" in names:
                raise LossError(_MEANS % out.shape[1])
            is_output |= bool(names)
            is_right = {"sum", "one output"} if self._follows == "values" else {self._follows}
            is_other = names and self._follows in _CALLED and is_right.isdisjoint(names)
            if is_other and contains(known, out):
                both = _CALLED[self._follows], _CALLED[names[0]]
                raise LossError(_OTHER.format(*both, out.shape[1]))
        if self._sees_energies and not is_output:
            decays = self._decays and not any(is_linear(total, x) for x in energies)
            if known and (decays or self._is_joined):
                raise LossError(_JOINED)
            for name in filter(None, (nonlinear_function(total, x) for x in energies)):
                raise LossError(_BENT % name)
        return contains(known, neg)

    def _check_direction(
        self, f_neg: Tensor, calls: Sequence[tuple[Tensor, Tensor]], measured: Measured | None
    ) -> None:
        """Refuse a sampler that goes the other way than ``convention=`` says."""
        if measured is None or not (measured.convention and calls and self._sees_energies):
            return
        energies, returned = host_rows(f_neg), torch.cat([x.flatten() for _, x in calls])
        same, turned = (bool(torch.isin(x, returned).all()) for x in (energies, -energies))
        goes_up = (measured.convention == "log_density") == same
        if same == turned or goes_up == (self._settings.sign > 0):
            return  # another function of them, or the right way
        stated, right = ("energy", "log_density") if goes_up else ("log_density", "energy")
        raise ConfigError(
            f"convention={stated!r} contradicts the sampler, whose steps go "
            f"{'up' if goes_up else 'down'} the energies that the loss gets. Such a trainer would "
            f"push data and samples the wrong way. Pass convention={right!r}; or turn the step of "
            "the sampler round if that is wrong."
        )

    def check_gradients(self, f_pos: Tensor, f_neg: Tensor, step: int, *, only_warns: bool) -> None:
        """Refuse a side that no loss since the first step could train.

        A step may have one loss per side, with the other side detached to save memory.
        """
        sides = {"f_pos": f_pos.requires_grad, "f_neg": f_neg.requires_grad}
        if not self._waits_for or not torch.is_grad_enabled() or not any(sides.values()):
            return
        self._waits_for -= {name for name, trains in sides.items() if trains}
        self._first_step = step if self._first_step is None else self._first_step
        if not self._waits_for or step <= self._first_step:
            return
        (name,) = self._waits_for
        wrong = _DETACHED.format(name, "x" if name == "f_pos" else "samples")
        if not only_warns:
            raise LossError(wrong)
        self._waits_for.clear()
        _log.warning("%s", wrong)


def _is_plain(x: object) -> TypeGuard[Tensor]:
    """Return whether it is a batch whose numbers can be read."""
    if not isinstance(x, Tensor) or is_capturing():
        return False
    has_numbers = not (x.is_meta or x.is_complex() or is_opaque(x))
    return has_numbers and x.ndim > 0 and x.numel() > 0
