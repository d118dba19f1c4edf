"""Eager code as CUDA graphs on a GPU, and as it is anywhere else.

Small networks leave a GPU idle between kernel launches; a graph launches all of them at once. A
graph works on fixed memory, from which all that is special here follows: inputs are copied in,
outputs are overwritten by the next call, and parameters must be updated in place, as optimizers and
``load_state_dict`` do. After the first call nothing waits for the GPU, where the inputs are on it.
"""

from __future__ import annotations

import operator
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from ebmguard.errors import ConfigError

T = TypeVar("T")

_MOST_GRAPHS = 32
_REPEATS = 3  # of a call before it is captured
_WARM_UP = 3  # steps, of which a guard can tell what a sampler does


def first_steps(x0: Tensor, noise: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Arguments of a chain's first three steps, to warm it up.

    A guard sees no step inside a capture: it measures these, and needs as many.

    Args:
        x0: start points.
        noise: for each step, (steps, *x0.shape).
        others: left as they are.
    """
    return x0, noise[:_WARM_UP], *others


def graphed(
    function: Callable[Concatenate[nn.Module, ...], Tensor],
    device: torch.device,
    warm_up: Callable[..., tuple[Tensor, ...]] | None = None,
) -> Callable[Concatenate[nn.Module, ...], Tensor]:
    """The function ``function(network, *tensors) -> Tensor`` as a CUDA graph.

    On a GPU the first call with tensors of given shapes and dtypes runs the function once and
    captures it; that call and all later ones replay it. The function must be one of its
    tensors and the parameters, with no decision taken on values of the host. Call it first where
    it will be used: in a guarded sampler call that is not paused, so that the guard sees the
    capture.

    Args:
        function: what to capture; its result carries no gradient.
        device: where it runs. On a CPU the function itself is returned.
        warm_up: turns the tensors into those of the run before the capture, which makes what is
            made once (handles, workspaces, kernel choices): :func:`first_steps` of a chain are
            enough. None: all of it.

    Returns:
        a callable of the same arguments. On a GPU its result is overwritten by the next call with
        tensors of the same shapes: use it, or copy it, before.

    Raises:
        ConfigError: (by the callable, on a GPU) another network than in the first call.
    """
    if not _is_gpu(device):
        return function
    networks: list[nn.Module] = []
    captured: dict[object, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}

    def call(network: nn.Module, *tensors: Tensor) -> Tensor:
        if not networks:
            networks.append(network)
        if network is not networks[0]:
            raise ConfigError(
                f"The function was captured as a CUDA graph with one {type(networks[0]).__name__}"
                " and is now called with another network, which the graph would not use. Make one "
                "graphed function for each network."
            )
        signature = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if signature not in captured:
            own = [tensor.detach().to(device, copy=True) for tensor in tensors]
            first = warm_up(*own) if warm_up else own
            graph, output = _captured(
                device,
                lambda: function(network, *own).detach(),
                lambda: function(network, *first),
            )
            captured[signature] = graph, own, output
        graph, inputs, output = captured[signature]
        for x, tensor in zip(inputs, tensors, strict=True):
            x.copy_(tensor.detach())
        graph.replay()
        return output

    return call


def graphed_energies(
    network: nn.Module, x_pos: Tensor, x_neg: Tensor
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Energies of positives and negatives in one forward pass, as CUDA graphs on a GPU.

    The network itself stays as it is; its ``forward`` may be overridden during sampling. Do not
    call this while it is. Of a training loop it asks three things, on any device:

    * ``zero_grad(set_to_none=True)``, the default, before each backward pass: on a GPU the
      gradients are the graph's own memory, to which nothing can be added;
    * to use gradients and energies before the next call, which overwrites them on a GPU;
    * only first derivatives.

    Args:
        network: f, (..., n, dim) -> (..., n). Its hooks, and its mode (train or eval), are those
            of now; values of its parameters are those of each call.
        x_pos: an example of the positives, (..., N, dim); only shape, dtype and device matter.
        x_neg: an example of the negatives, (..., M, dim).

    Returns:
        a callable (x_pos, x_neg) -> (f_pos, f_neg) of shapes (..., N) and (..., M), with gradients
        for the parameters.

    Raises:
        ConfigError: the network does not give one energy for each sample (on a CPU, at the first
            call). By the callable: samples of another shape, dtype or device, or that require a
            gradient. In the backward pass: there are gradients of an earlier one.
    """
    expected = [(x.shape, x.dtype, x.device) for x in (x_pos, x_neg)]
    count = x_pos.shape[-2]
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}

    def energies(x_pos: Tensor, x_neg: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat((x_pos, x_neg), -2)
        if values:
            f = functional_call(network, dict(zip(trained, values, strict=True)), (x,))
        else:
            f = network(x)
        if f.shape != x.shape[:-1]:
            raise ConfigError(
                f"The network returned {tuple(f.shape)} for samples of {tuple(x.shape)}; expected "
                f"one energy for each sample, {tuple(x.shape[:-1])}."
            )
        return f[..., :count], f[..., count:]

    parameters = tuple(trained.values())
    run, passed = energies, parameters[:0]  # eager code needs none passed
    if _is_gpu(x_pos.device):
        passed = parameters
        # Gradients flow to whatever parameters a call names; those of the capture are leaves of
        # their own on the same memory, so that no autograd state of the capture stays on the
        # network's. The examples become the graph's memory and are overwritten: copies.
        own = [p.detach().requires_grad_() for p in parameters]
        examples = [x.detach().clone() for x in (x_pos, x_neg)]
        with torch.cuda.device(x_pos.device), warnings.catch_warnings():
            # Of the leaves above, whose nodes are of the warm-up's stream; harmless here.
            warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
            run = torch.cuda.make_graphed_callables(  # type: ignore[assignment]
                energies, (*examples, *own), num_warmup_iters=1, allow_unused_input=True
            )

    def refuse_to_add(_: Tensor) -> None:
        if any(p.grad is not None for p in parameters):
            raise ConfigError(
                "A backward pass of graphed_energies found gradients of an earlier one. On a GPU "
                "they lie in the memory that it writes to, and cannot be added up: call "
                "optimizer.zero_grad(set_to_none=True) before each backward pass."
            )

    def checked(x_pos: Tensor, x_neg: Tensor) -> tuple[Tensor, Tensor]:
        for x, (shape, dtype, device) in zip((x_pos, x_neg), expected, strict=True):
            if (x.shape, x.dtype, x.device) != (shape, dtype, device) or x.requires_grad:
                raise ConfigError(
                    f"Samples of shape {tuple(x.shape)}, {x.dtype}, on {x.device}, "
                    f"requires_grad={x.requires_grad}; the energies were prepared for "
                    f"{tuple(shape)}, {dtype}, on {device}, requires_grad=False. Detach the "
                    "samples, or prepare others with graphed_energies."
                )
        f_pos, f_neg = run(x_pos, x_neg, *passed)
        if f_pos.requires_grad:
            f_pos.register_hook(refuse_to_add)  # type: ignore[no-untyped-call]
        return f_pos, f_neg

    return checked


def replayed(device: torch.device) -> Callable[..., Any]:
    """What a guard calls its functions with (``Guard.compute``): as CUDA graphs on a GPU.

    Pure functions of tensors and constants, which may be nested in lists, tuples and dicts. A call
    whose shapes and constants keep coming is captured, and replayed from then on; others, such as
    those of a schedule of numbers, run as they are. What is returned is the caller's own. Of the
    results one may have a gradient, as a loss has: a first derivative. Of an ensemble's losses each
    is a member's own, whose energies have its index.

    Args:
        device: of the tensors. On a CPU functions run as they are.
    """
    return _Replayed(device) if _is_gpu(device) else operator.call


class _Replayed:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[object, _Replay] = {}
        self._eager = deque[object](maxlen=4 * _MOST_GRAPHS)  # the latest calls of no graph

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, layout = tree_flatten((args, kwargs))
        constants = [_constant(x) for x in leaves]
        key = function.__qualname__, str(layout), *constants, torch.is_grad_enabled()
        if key not in self._graphs:
            self._eager.append(key)
            is_new = self._eager.count(key) < _REPEATS
            if is_new or len(self._graphs) == _MOST_GRAPHS:
                return function(*args, **kwargs)
            self._graphs[key] = _Replay(function, leaves, layout, self._device)
        return self._graphs[key]([x for x in leaves if isinstance(x, Tensor)])


def _constant(x: object) -> object:
    return (x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else repr(x)


class _Replay:
    """One captured call. All results leave the graph by one copy for each dtype."""

    def __init__(
        self, function: Callable[..., Any], leaves: list[Any], layout: Any, device: torch.device
    ) -> None:
        # The graph's own memory, written before each replay.
        self._inputs = [
            x.detach().to(device, copy=True).requires_grad_(x.requires_grad)
            for x in leaves
            if isinstance(x, Tensor)
        ]
        self._wanted = [i for i, x in enumerate(self._inputs) if x.requires_grad]
        own = iter(self._inputs)
        args, kwargs = tree_unflatten(
            [next(own) if isinstance(x, Tensor) else x for x in leaves], layout
        )

        def run() -> dict[torch.dtype, Tensor]:
            self._results, self._layout = tree_flatten(function(*args, **kwargs))
            found = [x for x in self._results if isinstance(x, Tensor)]
            losses = [x for x in found if x.requires_grad]
            if losses:
                wanted = [self._inputs[i] for i in self._wanted]
                found += torch.autograd.grad([x.sum() for x in losses], wanted)
            self._shapes = [(x.dtype, x.shape) for x in found]
            dtypes = dict.fromkeys(x.dtype for x in found)
            flat = {d: [x.detach().flatten() for x in found if x.dtype == d] for d in dtypes}
            return {dtype: torch.cat(parts) for dtype, parts in flat.items()}

        self._graph, self._outputs = _captured(device, run, run)
        # What is left of the results is constant, or stands for one that is copied out.
        self._results = [
            _Result(x.requires_grad) if isinstance(x, Tensor) else x for x in self._results
        ]

    def __call__(self, tensors: list[Tensor]) -> Any:
        with torch.no_grad():
            torch._foreach_copy_(self._inputs, tensors)
            self._graph.replay()
            copies = {dtype: iter(self._split(dtype)) for dtype in self._outputs}
        found = [next(copies[dtype]) for dtype, _ in self._shapes]
        count = len(found) - len(self._wanted)
        found, gradients = found[:count], found[count:]
        results = list(self._results)
        places = [i for i, x in enumerate(results) if isinstance(x, _Result)]
        for i, x in zip(places, found, strict=True):
            results[i] = x
            if self._results[i].is_loss:
                inputs = [tensors[i] for i in self._wanted]
                results[i] = _Known.apply(x, gradients, *inputs)  # type: ignore[no-untyped-call]
        return tree_unflatten(results, self._layout)

    def _split(self, dtype: torch.dtype) -> list[Tensor]:
        shapes = [shape for own, shape in self._shapes if own == dtype]
        sizes = [shape.numel() for shape in shapes]
        parts = self._outputs[dtype].clone().split(sizes)  # type: ignore[no-untyped-call]
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class _Result(NamedTuple):
    is_loss: bool


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
        return (
            None,
            None,
            *(by.view(*by.shape, *[1] * (x.ndim - by.ndim)) * x for x in ctx.gradients),
        )


def _captured(
    device: torch.device, run: Callable[[], T], warm_up: Callable[[], object]
) -> tuple[torch.cuda.CUDAGraph, T]:
    """A call as a graph, and the memory that its replays write to."""
    with torch.cuda.device(device):
        # Lazily made handles, workspaces and kernel choices must not fall into the capture.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            warm_up()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Of other threads, NCCL's watchdog asks for its events while this one captures.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            return graph, run()


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
