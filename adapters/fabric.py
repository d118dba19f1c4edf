"""Lightning Fabric: the guard gets what ``fabric.setup`` has put around the trainer's parts.

    model, optimizer = fabric.setup(f, optimizer)
    g = guard(None, sample_q, model=f, beta_star=0.5, sinks=[FabricSink(fabric)])
    cd_loss, sample_q = attach(g, fabric, optimizer=optimizer)

Name the network itself as ``model=``, not what ``setup`` returns: both ways of calling it then run
tempered inside of the sampler. In mixed precision, and on several ranks, the sampler has to call
the network itself too: what ``setup`` returns gives gradients to ``fabric.backward`` alone. Several
ranks take ``process_group=torch.distributed.group.WORLD``. A checkpoint needs no adapter:
``fabric.save(path, {"model": model, "guard": g})``, and ``fabric.load`` puts both back.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ebmguard import Guard
from ebmguard.adapters._metrics import MetricsSink
from ebmguard.errors import ConfigError

__all__ = ["FabricSink", "attach"]


class FabricSink(MetricsSink):
    """Rows and alerts in the loggers of a Fabric.

    Args:
        fabric: made with ``Fabric(loggers=...)``.
    """

    def __init__(self, fabric: Any) -> None:
        super().__init__(fabric.log_dict)


def attach(g: Guard, fabric: Any, *, optimizer: Any, **rest: Any) -> Guard:
    """:meth:`ebmguard.Guard.attach` with the optimizer's inside, and Fabric's AMP scaler if any.

    Args:
        g: the guard.
        fabric: the Fabric.
        optimizer: as ``fabric.setup`` or ``fabric.setup_optimizers`` returned it.
        rest: further keywords of :meth:`ebmguard.Guard.attach`.

    Returns:
        the guard, which unpacks into the loss and the sampler.

    Raises:
        ConfigError: an optimizer that Fabric has not set up.
    """
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, Optimizer):
        raise ConfigError(
            f"attach: optimizer= is a {type(optimizer).__name__}; expected the one that "
            "fabric.setup(model, optimizer) returns, whose step() is called."
        )
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    return g.attach(optimizer=inner, scaler=scaler, **rest)
