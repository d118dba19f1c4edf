"""accelerate: ``attach`` gives the guard what ``accelerator.prepare`` has wrapped.

    model, optimizer = accelerator.prepare(f, optimizer)
    g = guard(None, sample_q, model=f, sinks=[AcceleratorSink(accelerator)])
    loss_fn, sample_q = attach(g, accelerator, optimizer=optimizer)

Pass the network itself as ``model=``, not what ``prepare`` returns. With several processes, pass
``process_group=torch.distributed.group.WORLD``, and let the sampler call the network itself:
DistributedDataParallel is not made for gradients of samples.
"""

from __future__ import annotations

from typing import Any

from ebmguard import Guard
from ebmguard.adapters._metrics import MetricsSink

__all__ = ["AcceleratorSink", "attach"]


class AcceleratorSink(MetricsSink):
    """Rows and alerts in the trackers of an Accelerator.

    Args:
        accelerator: made with ``Accelerator(log_with=...)``; its ``init_trackers`` may come later.
    """

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator.log)


def attach(g: Guard, accelerator: Any, *, optimizer: Any, **rest: Any) -> Guard:
    """Attach the inner optimizer, and accelerate's AMP scaler if any, to the guard.

    The guard is registered for checkpoints, so that ``save_state`` and ``load_state`` include it. A
    row is one step of the optimizer, however many batches are accumulated.

    Args:
        g: the guard.
        accelerator: the Accelerator.
        optimizer: as ``accelerator.prepare`` returned it.
        rest: further keywords of :meth:`ebmguard.Guard.attach`.

    Returns:
        the guard, which unpacks into the loss and the sampler.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    g.attach(optimizer=inner, scaler=accelerator.scaler, **rest)
    accelerator.register_for_checkpointing(g)
    return g
