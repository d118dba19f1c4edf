"""Truth against measured, for every loop: ``python -m tests.measurement.table``."""


import torch

from ebmguard.measurement import Recording, measured
from tests.measurement.loops import LOOPS, network


def run(loop):
    torch.manual_seed(0)
    f = network(loop)
    x = (
        loop.start(32, *loop.shape, dtype=loop.dtype)
        if loop.start in (torch.rand, torch.randn)
        else loop.start(32, *loop.shape)
    )
    with Recording(f, is_short=True) as seen:
        loop.sample(f, x)
    return measured(seen.evaluations, seen.draws.log, reduce=loop.reduce)


if __name__ == "__main__":
    for name, loop in LOOPS.items():
        m = run(loop)
        if loop.step is None:
            ok = loop.why in m.verdict
        else:
            ok = (
                m.is_exact
                and abs(m.output_scale / loop.scale - 1) < loop.tolerance
                and loop.clip in m.clip
                and abs(m.step / loop.step - 1) < loop.tolerance
                and abs(m.noise / loop.noise - 1) < loop.tolerance
                and (loop.clamp is None or m.clamp == loop.clamp)
                and abs(m.decay - loop.decay) < 1e-4
            )
        print(
            "ok " if ok else "BAD",
            name,
            "|",
            loop.why or (loop.step, loop.noise, loop.scale),
            "|",
            (m.step, m.noise, m.output_scale, m.output_scale_error, m.share),
            m.verdict,
            m.notes,
        )
