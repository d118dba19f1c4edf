"""Eager code as CUDA graphs on a GPU, and as it is anywhere else.

Small networks leave a GPU idle between kernel launches; a graph launches all of them at once. A
graph works on fixed memory, from which all that is special here follows: inputs are copied in,
outputs are overwritten by the next call, and parameters must be updated in place, as optimizers and
``load_state_dict`` do. After the first call nothing waits for the GPU, where the inputs are on it.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Concatenate

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

Chain = Callable[Concatenate[nn.Module, Tensor, Tensor, ...], Tensor]
"""``chain(network, x0, noise, *tensors)``: samples from start points, with a step for each entry of
the noise, (steps, *x0.shape)."""

_MOST_GRAPHS = 32
_REPEATS = 3  # of a call before it is captured
_WARM_UP = 3  # steps, of which a guard can tell what a sampler does


class _Graph:
    """A function of tensors, captured; its results are memory that each call writes anew.

    Args:
        function: what to capture.
        tensors: of the first call.
        device: where it runs.
        warm_up: what runs before the capture: what is made once (handles, workspaces, kernel
            choices) must not fall into it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        tensors: Sequence[Tensor],
        device: torch.device,
        warm_up: Callable[..., object],
    ) -> None:
        self._inputs = [
            x.detach().to(device, copy=True).requires_grad_(x.requires_grad) for x in tensors
        ]
        with torch.cuda.device(device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                warm_up(*self._inputs)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            # Of other threads, NCCL's watchdog asks for its events while this one captures.
            with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
                self._results = function(*self._inputs)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        with torch.no_grad():
            torch._foreach_copy_(self._inputs, [*tensors])
            self._graph.replay()
        return self._results


def graphed(chain: Chain, device: torch.device) -> Chain:
    """A chain as a CUDA graph for each network, shape and dtype.

    On a GPU the first call of a kind is captured; that call and all later ones replay it. The chain
    must be one of its tensors and the parameters, with no decision taken on values of the host.
    Call it first where it will be used: in a guarded sampler call that is not paused. A guard sees
    no step inside a capture: it measures the chain's first three, which run before.

    Args:
        chain: what to capture; its result carries no gradient.
        device: where it runs. On a CPU the chain itself is returned.

    Returns:
        a callable of the same arguments. On a GPU its result is overwritten by the next call of the
        same kind: use it, or copy it, before.
    """
    if not _is_gpu(device):
        return chain
    graphs: dict[object, _Graph] = {}

    def call(network: nn.Module, *given: Tensor) -> Tensor:
        tensors = [x.detach() for x in given]
        key = network, *[(x.shape, x.dtype) for x in tensors]
        if key not in graphs:
            graphs[key] = _Graph(
                lambda *own: chain(network, *own).detach(),
                tensors,
                device,
                lambda x0, noise, *others: chain(network, x0, noise[:_WARM_UP], *others),
            )
        result: Tensor = graphs[key](tensors)
        return result

    return call


def graphed_energies(
    network: nn.Module, x_pos: Tensor, x_neg: Tensor
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Energies of positives and negatives in one forward pass, as CUDA graphs on a GPU.

    The network itself stays as it is; its ``forward`` may be overridden during sampling. Do not
    call this while it is. On a GPU energies and gradients are the graph's own memory, which the
    next call overwrites: use them before, and call ``zero_grad(set_to_none=True)``, the default,
    before each backward pass. There are only first derivatives.

    Args:
        network: f, (..., n, dim) -> (..., n). Its hooks, and its mode (train or eval), are those
            of now; values of its parameters are those of each call.
        x_pos: an example of the positives, (..., N, dim); only shape, dtype and device matter.
        x_neg: an example of the negatives, (..., M, dim).

    Returns:
        a callable (x_pos, x_neg) -> (f_pos, f_neg) of shapes (..., N) and (..., M), with gradients
        for the parameters.
    """
    count = x_pos.shape[-2]
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}

    def energies(x_pos: Tensor, x_neg: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat((x_pos, x_neg), -2)
        f = functional_call(network, dict(zip(trained, values, strict=True)), (x,))
        return f[..., :count], f[..., count:]

    run = energies
    if _is_gpu(x_pos.device):
        # Gradients flow to whatever parameters a call names; those of the capture are leaves of
        # their own on the same memory, so that no autograd state of the capture stays on the
        # network's. The examples become the graph's memory and are overwritten: copies.
        own = [p.detach().requires_grad_() for p in trained.values()]
        examples = [x.detach().clone() for x in (x_pos, x_neg)]
        with torch.cuda.device(x_pos.device), warnings.catch_warnings():
            # Of the leaves above, whose nodes are of the warm-up's stream; harmless here.
            warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
            run = torch.cuda.make_graphed_callables(  # type: ignore[assignment]
                energies, (*examples, *own), num_warmup_iters=1, allow_unused_input=True
            )
    return lambda x_pos, x_neg: run(x_pos, x_neg, *trained.values())


class Replayed:
    """What a guard calls its functions with (``Guard.compute``): as CUDA graphs on a GPU.

    Pure functions of tensors and constants, which may be nested in lists, tuples and dicts. A call
    whose shapes and constants keep coming is captured, and replayed from then on; others, such as
    those of a schedule of numbers, run as they are. What is returned is the caller's own. Of the
    results one may have a gradient, as a loss has: a first derivative. Of an ensemble's losses each
    is a member's own, whose energies have its index.

    Args:
        device: of the tensors. On a CPU functions run as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[object, _Replay] = {}
        self._eager = deque[object](maxlen=4 * _MOST_GRAPHS)  # the latest calls of no graph

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The function's results."""
        if not _is_gpu(self._device):
            return function(*args, **kwargs)
        leaves, layout = tree_flatten((args, kwargs))
        constants = [
            (x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else repr(x)
            for x in leaves
        ]
        key = function.__qualname__, str(layout), *constants, torch.is_grad_enabled()
        if key not in self._graphs:
            self._eager.append(key)
            is_new = self._eager.count(key) < _REPEATS
            if is_new or len(self._graphs) == _MOST_GRAPHS:
                return function(*args, **kwargs)
            self._graphs[key] = _Replay(function, leaves, layout, self._device)
        return self._graphs[key]([x for x in leaves if isinstance(x, Tensor)])


class _Replay:
    """One captured call."""

    def __init__(
        self, function: Callable[..., Any], leaves: list[Any], layout: Any, device: torch.device
    ) -> None:
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        self._wanted = [i for i, x in enumerate(tensors) if x.requires_grad]

        def run(*given: Tensor) -> list[Tensor]:
            """The tensors of the results, then the loss's gradients."""
            own = iter(given)
            args, kwargs = tree_unflatten(
                [next(own) if isinstance(x, Tensor) else x for x in leaves], layout
            )
            self._results, self._layout = tree_flatten(function(*args, **kwargs))
            found = [x for x in self._results if isinstance(x, Tensor)]
            losses = [x.sum() for x in found if x.requires_grad]
            if losses:
                found += torch.autograd.grad(losses, [given[i] for i in self._wanted])
            # Where tensors are to go, and which of them is a loss; not how they came about.
            self._results = [
                x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
                for x in self._results
            ]
            return [x.detach() for x in found]

        self._graph = _Graph(run, tensors, device, run)

    def __call__(self, tensors: list[Tensor]) -> Any:
        written: list[Tensor] = self._graph(tensors)
        copies = [torch.empty_like(x) for x in written]
        for dtype in {x.dtype for x in written}:  # one launch each
            own = [i for i, x in enumerate(written) if x.dtype == dtype]
            torch._foreach_copy_([copies[i] for i in own], [written[i] for i in own])
        found = iter(copies)
        results = [next(found) if isinstance(x, Tensor) else x for x in self._results]
        gradients = [*found]
        inputs = [tensors[i] for i in self._wanted]
        return tree_unflatten(
            [
                _Known.apply(x, gradients, *inputs)  # type: ignore[no-untyped-call]
                if isinstance(x, Tensor) and of.requires_grad
                else x
                for x, of in zip(results, self._results, strict=True)
            ],
            self._layout,
        )


class _Known(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by: Tensor) -> Any:
        if not by.ndim:
            return None, None, *torch._foreach_mul(ctx.gradients, by)
        members = (by.view(*by.shape, *[1] * (x.ndim - by.ndim)) for x in ctx.gradients)
        return None, None, *map(torch.mul, ctx.gradients, members)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
