"""Faults on purpose, to see that a guard notices them and that a run survives them.

    faults = FaultInjector()
    cd_loss, sample_q = guard(None, faults.sampler(sample_q), beta_star=0.5, ...)
    faults.nan_sample(at=200)
    faults.exploding_lr(at=500, optimizer=optim)
    with faults:
        train()
    print(faults.records)

The faults are those that take energy-based runs down: a NaN among the samples, an energy spike, a
sampler that hangs, a bad row in the replay buffer, a learning rate that explodes. Each happens
once, also where a rollback repeats its step. Nothing here draws a random number.
"""

from ._injector import FaultInjector, Injected

__all__ = ["FaultInjector", "Injected"]
