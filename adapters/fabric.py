"""Lightning Fabric: ``attach`` gives the guard what ``fabric.setup`` has wrapped.

    model, optimizer = fabric.setup(f, optimizer)
    g = guard(None, sample_q, model=f, sinks=[FabricSink(fabric)])
    loss_fn, sample_q = attach(g, fabric, optimizer=optimizer)

Pass the network itself as ``model=``, not what ``setup`` returns: inside the sampler both then run
tempered. In mixed precision and on several ranks the sampler must call the network itself, because
what ``setup`` returns gives gradients to ``fabric.backward`` alone. With several ranks, pass
``process_group=torch.distributed.group.WORLD``. Checkpoints need no adapter:
``fabric.save(path, {"model": model, "guard": g})``, and ``fabric.load`` restores both.
"""

from __future__ import annotations

from typing import Any

from ebmguard import Guard
from ebmguard.adapters._metrics import MetricsSink

__all__ = ["FabricSink", "attach"]


class FabricSink(MetricsSink):
    """Rows and alerts in the loggers of a Fabric.

    Args:
        fabric: made with ``Fabric(loggers=...)``.
    """

    def __init__(self, fabric: Any) -> None:
        super().__init__(fabric.log_dict)


def attach(g: Guard, fabric: Any, *, optimizer: Any, **rest: Any) -> Guard:
    """Attach the inner optimizer, and Fabric's AMP scaler if any, to the guard.

    Args:
        g: the guard.
        fabric: the Fabric.
        optimizer: as ``fabric.setup`` or ``fabric.setup_optimizers`` returned it.
        rest: further keywords of :meth:`ebmguard.Guard.attach`.

    Returns:
        the guard, which unpacks into the loss and the sampler.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    return g.attach(optimizer=inner, scaler=scaler, **rest)
