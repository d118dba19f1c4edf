"""How many kernels a training step launches on a GPU, counted without one (:mod:`.gpu_on_meta`).

    python -m benchmarks.launches

First what the guard adds to a JEM step without graphs: a sampler call, loss and backward pass, with
and without it. Bringing the row to the host at the end of the step, one copy, is left out. Compiled
means ``g.compute = compiled``, a ``torch.compile`` of each function, and a compiled network, whose
kernels the factor's products are then a part of; Inductor's kernels are counted on a CPU, whose C++
joins in one function what are up to so many kernels of a GPU as stand in brackets. Then the steps
of the trainers themselves (:mod:`.meta_steps`), whose chains are CUDA graphs.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._inductor.scheduler import NopKernelSchedulerNode, Scheduler
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code
from torch.utils._pytree import tree_leaves, tree_map_only

from ebmguard import guard
from ebmguard.samplers import sgld
from ebmguard.sampling import Measured

from .gpu_on_meta import MetaGpu, gpu_on_meta
from .meta_steps import CASES, of_guard, steps_of

BATCH, STEPS = 8, 5
KERNEL = re.compile(
    r"^ +(?:buf\d+ = )?(?:cpp_fused\w*\(|torch\.ops\.\w+\.|extern_kernels\.|aten\.)", re.M
)
"""A line that calls one, in the code that Inductor writes for a CPU."""
SETTINGS: dict[str, dict[str, Any]] = {
    "loss and sampler": {},
    "steps of the sampler known": {"step_size": 1.0, "noise_std": 0.01},
    "and the clamp": {"step_size": 1.0, "noise_std": 0.01, "clamp": (-1.0, 1.0)},
}


class Energy(nn.Module):
    """As JEM's: the logsumexp of a network's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LeakyReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 6 * 6, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.net(x))
        return logits.logsumexp(1)


class Compiled:
    """A guard's ``compute`` that keeps what is to be compiled, and leaves it out of the launches.

    Args:
        gpu: counts them.
        calls: gets function, arguments and keywords of each call, with tensors of the CPU.
    """

    def __init__(self, gpu: MetaGpu, calls: list[Any]) -> None:
        self._gpu, self._calls = gpu, calls

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        launches = self._gpu.launches
        before = Counter(launches)
        found = function(*args, **kwargs)
        forward = launches.total()
        if outputs := _differentiable(found):
            inputs, ones = _differentiable((args, kwargs)), list(map(torch.empty_like, outputs))
            torch.autograd.grad(outputs, inputs, ones, retain_graph=True)
        # The trainer's backward pass runs through it once more.
        before["compiled"] -= launches.total() - forward
        launches.clear()
        launches.update(before)
        self._calls.append((function, *tree_map_only(Tensor, _on_cpu, (args, kwargs))))
        return found


def _on_cpu(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype).requires_grad_(x.requires_grad)


def _differentiable(tree: object) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.requires_grad]


def kernels(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[int, int]:
    """Kernels of a compiled function, forward and backward: C++ functions, and what they join."""
    joined, codegen = 0, Scheduler.codegen

    def counted(self: Scheduler) -> Any:
        nonlocal joined
        joined += sum(not isinstance(x, NopKernelSchedulerNode) for x in self.nodes)
        return codegen(self)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)

    def call() -> Any:
        found = compiled(*args, **kwargs)
        return sum(x.sum() for x in _differentiable(found))

    run = run_fw_bw_and_get_code if _differentiable((args, kwargs)) else run_and_get_code
    uncached = torch._inductor.config.patch(fx_graph_cache=False)
    with uncached, patch.object(Scheduler, "codegen", counted), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Dynamo looks through
        _, codes = run(call)
    return sum(len(KERNEL.findall(code[code.index("def call(") :])) for code in codes), joined


def launches(
    told: dict[str, Any] | None, *, slow: bool = False, compiled: list[Any] | None = None
) -> int:
    """Launches of one sampler call, loss and backward pass; unguarded where nothing is told.

    What ``compiled`` gets, see :class:`Compiled`, is not among them.
    """
    f = Energy().to("meta")

    def sample_q(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return sgld(f, x, steps=STEPS, step_size=1.0, noise_std=0.01)

    def plain(f_pos: Tensor, f_neg: Tensor) -> Tensor:
        return f_neg.mean() - f_pos.mean()

    loss_fn: Callable[[Tensor, Tensor], Tensor] = plain
    with gpu_on_meta() as gpu:
        if told is not None:
            g = guard(None, sample_q, beta_star=0.5, output_scale=20_000)
            loss_fn, sample_q = g.attach(**told)
            # The first sampler calls are measured, which reads values.
            known = {"measured": {"exact": asdict(Measured("it is not measured here"))}}
            g.load_state_dict(g.state_dict() | known | {"step": 0 if slow else 1})
            if compiled is not None:
                g.compute = Compiled(gpu, compiled)
        x = torch.zeros(BATCH, 3, 8, 8, device="meta")
        before = gpu.launches.total()
        x_neg = sample_q(f, x)
        loss_fn(f(x), f(x_neg)).backward()
        found = gpu.launches.total() - before
        if told is not None:
            g.close()
            if compiled is not None:
                found -= 2 * STEPS  # the factor's products: a part of the network's kernels
    return found


def main() -> None:
    """Print the table."""
    # What is true or false on `meta` is true, a gradient that is negative too.
    logging.getLogger("ebmguard").setLevel(logging.ERROR)
    plain = launches(None)
    print(f"launches of an unguarded step with {STEPS} SGLD steps: {plain}\n")
    print("| told | added in a step | in one of the slow tier, every 50th | in a compiled step |")
    print("|---|---:|---:|---:|")
    for name, told in SETTINGS.items():
        added = (launches(told) - plain, launches(told, slow=True) - plain)
        calls: list[Any] = []
        rest = launches(told, compiled=calls) - plain
        few, many = map(sum, zip(*(kernels(*call) for call in calls), strict=True))
        print(f"| {name} | {added[0]} | {added[1]} | {rest + few} ({rest + many}) |", flush=True)
    print("\n| steps of | waits | launches: usual step | the guard's | slow tier | the guard's |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in CASES:
        steps = steps_of(name)
        counts = [x for own in (steps.usual, steps.slow) for x in (own.total(), of_guard(own))]
        print(f"| {name} | {steps.good_waits.total()} | {' | '.join(map(str, counts))} |")


if __name__ == "__main__":
    main()
