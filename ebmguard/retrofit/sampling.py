"""Runs the trainer's sampler on the tempered energy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ..errors import SamplerError
from ..samplers import Mixture
from ..tempering.tempering import Tempering, find_module
from .actions import Course
from .callables import refuse_deferred
from .measure import Meter
from .strength import Strength, StrengthAt

__all__ = ["Sampling"]


class Sampling:
    """Finds the energy module of a sampler call, tempers it, and shows the meter what came of it.

    Args:
        strength: whether the sampler's side is defined, and the model dimensions.
        model: the energy module; None finds it among the sampler's arguments.
        meter: gets the samples and what the tempering saw.
        course: says how many steps a call takes.

    Attributes:
        model: as given, or attached later.
        calls: how many there were.
        is_running: inside of a call.
    """

    def __init__(
        self, strength: Strength, model: nn.Module | None, meter: Meter, course: Course
    ) -> None:
        self.model = model
        self.calls = 0
        self.is_running = False
        self._strength = strength
        self._meter = meter
        self._course = course
        # Kept while their modules live: what a CUDA graph has captured is theirs.
        self._temperings = weakref.WeakKeyDictionary[nn.Module, Tempering]()

    def run(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        strength: StrengthAt,
        *,
        slow: bool,
    ) -> Any:
        """What the sampler returns on the tempered energy.

        Args:
            call: the sampler as it was given, with its arguments.
            strength: of this step.
            slow: whether this step has the tier that is not taken at every step.

        Raises:
            SamplerError: no energy module can be found, it was never called, or the sampler is a
                generator.
        """
        tempering = self._tempering_of(call, args, kwargs)
        kwargs = {**kwargs, **self._course.steps_for_call()}
        self.is_running = True
        try:
            if tempering is None:
                result = call(*args, **kwargs)
            else:
                remember = slow and self._meter.watches_steps
                result = tempering.run(call, args, kwargs, strength.factor, remember=remember)
        finally:
            self.is_running = False
        refuse_deferred(result)
        if tempering is not None and not tempering.reached and self._strength.tempers:
            raise SamplerError(
                f"The sampler never called {type(tempering.module).__name__}.forward, so it ran on "
                "the untempered energy (it calls another method such as `classify`, a copy, or a "
                "CUDA graph that no guarded call has captured, or takes no step). Temper inside it "
                "with g.temper(energy) and guard(loss_fn, None, ...), or name the module that it "
                "does call with model=."
            )
        self.calls += 1
        self._meter.saw_samples(
            tempering,
            result,
            slow=slow,
            refinement=self._course.refined_by,
            parts=call.parts if isinstance(call, Mixture) else None,
        )
        return result

    def _tempering_of(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tempering | None:
        module = self.model
        if module is None:
            try:
                module = find_module(call, args, kwargs)
            except SamplerError:
                if self._strength.tempers:
                    raise
                return None  # the sampler stays as it is, so nothing needs to be found
        if module not in self._temperings:
            self._temperings[module] = Tempering(module, self._strength.models)
        return self._temperings[module]
