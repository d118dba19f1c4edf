"""The sources of random numbers of a run, which its checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ebmguard.errors import ConfigError


class Streams:
    """Base of what draws the random numbers of a step, from streams that go on after a resume.

    Args:
        streams: by name.
    """

    def __init__(self, streams: Mapping[str, torch.Generator]) -> None:
        self._streams = dict(streams)

    def state_dict(self) -> dict[str, Tensor]:
        """Where each stream stands."""
        return {name: rng.get_state() for name, rng in self._streams.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go back to a saved state.

        Raises:
            ConfigError: of other streams, or of a device of another kind, whose streams cannot go
                on here.
        """
        if state.keys() != self._streams.keys():
            raise ConfigError(
                f"the run's random numbers are of the streams {', '.join(state)}; expected "
                f"{', '.join(self._streams)}"
            )
        for name, rng in self._streams.items():
            if state[name].shape != rng.get_state().shape:
                raise ConfigError(
                    "the run's random numbers are those of another kind of device than "
                    f"{rng.device.type!r}: resume it with the --device that it began on"
                )
            rng.set_state(state[name].cpu())
