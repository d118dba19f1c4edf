"""The device `meta` in a GPU's place: what would wait for it, and what it would launch.

Tensors of `meta` have shapes and no values, so that whole trainers run in seconds. Inside
:func:`gpu_on_meta` they count as a GPU's: `is_cuda` is true, and streams, events, pinned memory and
CUDA graphs are stand-ins. What would wait for a GPU, or cannot be captured, is noted with the line
of the project that did it. A number that is read is :data:`READ`, whatever it was.

An operation counts as a launch unless its result shares the memory of an argument (a view) or it
only makes a tensor.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ebmguard.reference_training.engine import graphs

META = torch.device("meta")
READ = 0.0
"""What a number of the device is, once it is on the host; of those that are true or false, true."""
LAG = 2
"""Steps after which an event has happened, and is waited for no more."""

ROOT = Path(__file__).resolve().parents[1]

_NO_LAUNCH = ("empty", "detach", "alias", "new_empty", "_unsafe_view", "set_", "record_stream")
_READS = ("_local_scalar_dense", "equal", "is_nonzero", "allclose")
_SHAPES = ("nonzero", "masked_select", "_unique", "unique_", "bincount", "nonzero_numpy", "histc")
_RANDOM = ("rand", "normal", "bernoulli", "uniform", "multinomial", "dropout", "exponential")
_TO_DEVICE = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


class Generator(torch.Generator):
    """A CPU's generator that says it is of the device that it was asked for."""

    asked: torch.device

    def __new__(cls, device: torch.device | str = "cpu") -> Generator:
        made = super().__new__(cls)
        made.asked = torch.device(device)
        return made

    device = property(lambda self: self.asked)


class MetaGpu(TorchDispatchMode):
    """Takes `meta` for a GPU, and notes what it is asked.

    Attributes:
        step: of the training; advance it.
        launches: how many there were, by the innermost file of the project that asked for them, as
            a path from its root; those of a backward pass belong to who called it.
        waits: what would wait for the device, as "kind (file:line)", and how often.
        wrong: what cannot be meant, at any time: devices that do not mix, and random numbers or
            host tensors in a capture.
        captured: kernels in captured graphs, by operation.
        autocast: to which type convolutions cast at present; None for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.captured: Counter[str] = Counter()
        self.autocast: torch.dtype | None = None
        self.is_capturing = False
        self._pinned = WeakIdKeyDictionary()

    def wait(self, kind: str) -> None:
        """The host waits for the device here."""
        if self.is_capturing:
            self.wrong[f"{kind} in a capture ({own_place()})"] += 1
        else:
            self.waits[f"{kind} ({own_place()})"] += 1

    def launched(self, name: str = "graph") -> None:
        """One launch, or of a capture one kernel."""
        if self.is_capturing:
            self.captured[name] += 1
            return
        self.launches[own_place().partition(":")[0]] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_gpu = [x.device.type == "meta" for x in tensors]
        if kwargs.get("pin_memory"):
            made = func(*args, **{**kwargs, "pin_memory": False})
            self._pinned[made] = True
            return made
        if name in ("copy_", "_to_copy") and tensors:  # `vmap` also casts plain numbers
            return self._copy(func, name, args, kwargs)
        if name.startswith(_READS) and any(on_gpu):
            self.wait(f"read: {name}")
            kind = tensors[0].dtype
            return kind == torch.bool or torch.full((), READ, dtype=kind).item()
        if any(on_gpu) and (name.startswith(_SHAPES) or _has_mask(name, args)):
            self.wait(f"shape that depends on values: {name}")
            return _some(func, args, kwargs)
        if any(on_gpu) and any(x.ndim for x, own in zip(tensors, on_gpu, strict=True) if not own):
            self.wrong[f"devices mixed: {name} ({own_place()})"] += 1
        if self.is_capturing:
            if any(on_gpu) and not all(on_gpu):
                self.wrong[f"host tensor in a capture: {name} ({own_place()})"] += 1
            if name.removeprefix("_").startswith(_RANDOM):
                self.wrong[f"random numbers in a capture: {name} ({own_place()})"] += 1
        return self._run(func, name, args, kwargs)

    def _run(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        # Fused optimizers write into their arguments; on `meta` not all of them can.
        result = None if name.startswith("_fused_") else func(*args, **kwargs)
        aliases = [x.alias_info for x in func._schema.returns]
        is_view = any(x is not None and not x.is_write for x in aliases)
        if not is_view and not name.startswith(_NO_LAUNCH):
            leaves = tree_leaves((result, args, kwargs))
            if any(isinstance(x, Tensor) and x.device.type == "meta" for x in leaves):
                self.launched(name)
        return result

    def _copy(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        to, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
        target = to.device if to is not None else torch.device(kwargs.get("device", source.device))
        if target.type == source.device.type:
            return self._run(func, name, args, kwargs)
        waits_not = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        host = to if target.type == "cpu" else source
        way = "host" if target.type == "cpu" else "device"
        # Pageable memory is copied in the stream's order by the host itself, which waits.
        if not (waits_not and host is not None and host in self._pinned):
            self.wait(f"copy to the {way}: {name}")
        self.launched()
        if target.type != "cpu":
            return func(*args, **kwargs)
        if to is not None:
            return to.fill_(READ)
        return torch.full(source.shape, READ, dtype=kwargs.get("dtype") or source.dtype)

    # -- stand-ins ---------------------------------------------------------------------------

    @contextmanager
    def capture(self, graph: Any, **_: Any) -> Iterator[None]:
        """``torch.cuda.graph``: what runs inside is captured."""
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    @contextmanager
    def autocasting(self, _: str, dtype: torch.dtype, **__: Any) -> Iterator[None]:
        """``torch.autocast``, which PyTorch lacks for this device: of convolutions."""
        before, self.autocast = self.autocast, dtype
        try:
            yield
        finally:
            self.autocast = before

    def make_graphed(
        self, function: Callable[..., tuple[Tensor, ...]], sample: Sequence[Tensor], **_: Any
    ) -> Callable[..., tuple[Tensor, ...]]:
        """``torch.cuda.make_graphed_callables``: forward and backward pass, a launch each."""
        with self.capture(None):
            outputs = function(*sample)
            wanted = [x for x in sample if x.requires_grad]
            torch.autograd.grad([x.sum() for x in outputs], wanted, allow_unused=True)
        gpu = self

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
                ctx.inputs = inputs
                for _ in [x for x in sample if not x.requires_grad]:
                    gpu.launched()
                gpu.launched()
                return tuple(torch.empty_like(x) for x in outputs)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
                for _ in gradients:
                    gpu.launched()
                gpu.launched()
                return tuple(torch.empty_like(x) if x.requires_grad else None for x in ctx.inputs)

        return Graphed.apply


class _Tensors(TorchFunctionMode):
    """Sees the tensors that are made of numbers of the host on the device; and autocasts."""

    def __init__(self, gpu: MetaGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d and self._gpu.autocast is not None:
            args = [x.to(self._gpu.autocast) if isinstance(x, Tensor) else x for x in args]
        made = func(*args, **(kwargs or {}))
        if func in _TO_DEVICE and isinstance(made, Tensor) and made.device.type == "meta":
            self._gpu.wait(f"numbers of the host to the device: {func.__name__}")
        return made


@contextmanager
def gpu_on_meta() -> Iterator[MetaGpu]:
    """Inside the block `meta` is a GPU."""
    gpu = MetaGpu()

    class Event:
        def record(self, stream: object = None) -> None:
            self.step = gpu.step

        def synchronize(self) -> None:
            if gpu.step - self.step < LAG:
                gpu.wait(f"event of {gpu.step - self.step} steps ago")

    fakes: dict[str, Any] = {
        "torch.Generator": Generator,
        "torch.autocast": gpu.autocasting,
        "torch.cuda.is_initialized": lambda: True,
        "torch.cuda.is_current_stream_capturing": lambda: gpu.is_capturing,
        "torch.cuda.Event": Event,
        "torch.cuda.CUDAGraph": lambda: Mock(replay=gpu.launched),
        "torch.cuda.graph": gpu.capture,
        "torch.cuda.make_graphed_callables": gpu.make_graphed,
        "torch.cuda.synchronize": lambda *_: gpu.wait("synchronize"),
        "torch.cuda.get_rng_state_all": list,
    }
    kernels = [
        (module, f"_get_{kind}_kernels_supported_devices")
        for module in map(import_module, ("torch.utils._foreach_utils", "torch.optim.optimizer"))
        for kind in ("foreach", "fused")
    ]
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(patch(name, fake))
        for name in ("device", "stream", "Stream", "current_stream", "graph_pool_handle"):
            stack.enter_context(patch(f"torch.cuda.{name}"))  # of which nothing is asked
        for module, name in kernels:
            devices = [*getattr(module, name)(), "meta"]
            stack.enter_context(patch.object(module, name, lambda devices=devices: [*devices]))
        stack.enter_context(patch.object(graphs, "_is_gpu", lambda device: device.type == "meta"))
        is_cuda = property(lambda x: x.device.type == "meta")
        stack.enter_context(patch.object(Tensor, "is_cuda", is_cuda))
        stack.enter_context(warnings.catch_warnings())
        # A parameter of `meta` keeps nothing of a state that it loads.
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
        stack.enter_context(_Tensors(gpu))
        stack.enter_context(gpu)
        yield gpu


def _has_mask(name: str, args: Sequence[Any]) -> bool:
    """Whether an index is a mask; one that a single number is written to is no wait."""
    if not name.startswith(("index", "_index_put")) or not isinstance(args[1], list | tuple):
        return False
    if len(args) > 2 and args[2].numel() == 1:
        return False
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _some(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A result of the largest size that it may have."""
    x, name = args[0], func._schema.name
    if "index_put" in name:
        return x
    if "nonzero" in name:
        return x.new_empty((x.numel(), x.ndim), dtype=torch.int64)
    if "masked_select" in name:
        return x.new_empty(x.numel())
    if "index" in name and len(args[1]) == 1:
        return x.new_empty((args[1][0].numel(), *x.shape[args[1][0].ndim :]))
    return func(*args, **kwargs)


def own_place() -> str:
    """File and line of the innermost frame of the project's, but for those of this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{ROOT}/") and "/.venv" not in name and name != __file__:
            return f"{Path(name).relative_to(ROOT).as_posix()}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of the project"
