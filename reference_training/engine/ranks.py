"""Several processes that train one network, as `torchrun` starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ebmguard.errors import ConfigError

if TYPE_CHECKING:  # the help of a command needs no torch
    import torch.distributed as dist
    from torch import Tensor, nn

RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""How often torchrun has started its processes again (environment)."""


RANK_STRIDE = 0x9E3779B9
"""Between the seeds of the ranks, of which PyTorch's CPU generator keeps the lower 32 bits."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; a single one has no process group.

    Attributes:
        rank: number of this process; the first one, 0, writes what is common to all.
        world: how many there are.
        group: the process group, None where there is one process.
    """

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process writes what is common to all."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """This rank's part of `count` things: as equal as can be, in the order of the ranks."""
        return slice(self.rank * count // self.world, (self.rank + 1) * count // self.world)

    def share(self, count: int) -> int:
        """How many of `count` things are this rank's."""
        return len(range(*self.part(count).indices(count)))

    def undivided(self, **counts: int) -> list[str]:
        """What is wrong with counts, by name, of which every rank needs an equal part."""
        return [
            f"{name} is {count}, expected a multiple of the {self.world} processes"
            for name, count in counts.items()
            if count % self.world
        ]

    def own_seed(self, seed: int) -> int:
        """The seed of a stream that each rank has for itself; the first one's is `seed`."""
        return seed + self.rank * RANK_STRIDE

    def weight(self, count: int) -> float:
        """What turns the mean over this rank's part of `count` into its part of all ranks' mean,
        where an average over ranks follows: 1 where the parts are equal."""
        return self.share(count) * self.world / count

    def means(self, numbers: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Means over the ranks of tensors by name, in one message; without gradients."""
        if self.group is None or not numbers:
            return numbers
        means = self.averages([x.detach() for x in numbers.values()])
        return dict(zip(numbers, means, strict=True))

    def averages(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Means over the ranks in one message, through which gradients go."""
        if self.group is None:
            return tensors
        import torch
        from torch.distributed.nn.functional import all_reduce

        flat = torch.cat([x.flatten() for x in tensors])
        # Every rank has the sum; so what each one's loss asks of it is summed for each part.
        mean = all_reduce(flat, group=self.group) / self.world  # type: ignore[no-untyped-call]
        parts = mean.split([x.numel() for x in tensors])
        return [part.view_as(x) for part, x in zip(parts, tensors, strict=True)]

    def joined(self, x: Tensor) -> Tensor:
        """The rows of all ranks, first rank first, by way of the hosts; parts may differ by their
        number of rows."""
        if self.group is None:
            return x
        import torch

        return torch.cat([part.to(x.device) for part in self.from_all(x.cpu())])

    def parallel(self, network: nn.Module) -> nn.Module:
        """The module as it is, or one whose gradients are averaged over the ranks."""
        if self.group is None:
            return network
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(network, process_group=self.group)

    def wait(self) -> None:
        """Until every rank has come here."""
        self.from_all(None)

    def from_all(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        values = [value] * self.world
        if self.group is not None:
            import torch.distributed as dist

            dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: Any) -> Any:
        """The first rank's value, on every rank; exceptions pass as values."""
        return self.from_all(value)[0]


ONE_RANK = Ranks()


@contextmanager
def joined_ranks(device: str) -> Iterator[Ranks]:
    """Join the processes that `torchrun` has started; alone where it has not.

    Each takes the GPU of its local rank. Without GPUs, or with device "cpu", they talk by gloo.

    Args:
        device: as in the settings: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: torchrun's variables are there in part only, or the device is one GPU.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield ONE_RANK
        return
    needed = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {world} but {', '.join(missing)} is not set; start several processes "
            "with torchrun, or unset WORLD_SIZE for a single one"
        )
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"device is {device!r} in one of {world} processes, each of which takes the GPU of its "
            "local rank; expected auto, cuda or cpu"
        )
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, world = next(rendezvous("env://"))
    # torchrun may keep one store over its restarts, with the addresses of ranks that are dead.
    store = PrefixStore(f"restart {os.environ.get(RESTART_COUNT, '0')}", store)
    if device != "cpu" and torch.cuda.is_available():
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)
        # What is no tensor of a GPU goes from host to host, so that nothing waits for the GPU.
        both = "cpu:gloo,cuda:nccl"
        dist.init_process_group(both, device_id=gpu, store=store, rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    finally:
        dist.destroy_process_group()
