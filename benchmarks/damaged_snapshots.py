"""Thousands of damaged snapshots: a run goes on whole from what is whole, or stays as it is.

    python -m benchmarks.damaged_snapshots

A run writes two snapshots. Then the newer one, or every fourth time both, are damaged, and a new
run is to go on from the folder: with all bits of the newer one, or of the older one, or else with a
ConfigError and all bits as they were. Anything else is wrong.
"""

from __future__ import annotations

import argparse
import io
import logging
import random
import tempfile
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ebmguard import Guard, Recovery, guard
from ebmguard.errors import ConfigError
from ebmguard.samplers import ReplayBuffer, sgld


def begun(folder: Path) -> Guard:
    """The guard of a new run with Adam, batch norm, a schedule and a replay buffer."""
    torch.manual_seed(0)
    f = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 1))
    told: dict[str, Any] = {"model": f, "optimizer": torch.optim.Adam(f.parameters())}
    told["scheduler"] = torch.optim.lr_scheduler.StepLR(told["optimizer"], 7)
    told["buffer"] = ReplayBuffer(32, (2,), reinit_rate=0.1, generator=torch.Generator())
    recovery = Recovery(every=2, certify_after=2, folder=folder, folder_every=4)
    sampler = partial(sgld, steps=2, step_size=0.1, noise_std=0.03)
    return guard(None, sampler, beta_star=0.5, action="rollback", recovery=recovery, **told)


def train(g: Guard, steps: int) -> None:
    """So many steps of it."""
    told: Any = g.trainer
    f, buffer, optimizer = told.model, told.buffer, told.optimizer
    for _ in range(steps):
        x, rows = buffer.sample(8)
        buffer.write(rows, q := g.sampler(f, x))
        optimizer.zero_grad()
        g.loss(f(torch.randn(8, 2)), f(q)).backward()
        optimizer.step()
        told.scheduler.step()


def leaves_of(tree: Any) -> list[Any]:
    """The bits of all values and tensors in nested containers."""
    leaves, way = tree_flatten(tree)
    return [way, *(x.numpy().tobytes() if isinstance(x, Tensor) else repr(x) for x in leaves)]


def bits(g: Guard) -> list[Any]:
    """Of all that a resume may change."""
    told: Any = g.trainer
    parts = (told.model, told.optimizer, told.scheduler, told.buffer, g)
    return leaves_of([[x.state_dict() for x in parts], torch.get_rng_state()])


KINDS = [*("bits", "end", "zeros", "bomb", "swap", "shape", "dtype", "numbers", "plain", "version")]


def damaged(kind: str, data: bytes, rng: random.Random) -> bytes:
    """The bytes of a snapshot after an accident, or of one that holds something else."""
    at, stream = rng.randrange(len(data)), io.BytesIO()
    if kind == "bits":
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 8, 64))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind in ("end", "zeros"):
        zeros = bytes(min(rng.choice((16, 512, 4096)), len(data) - at)) if kind == "zeros" else b""
        return data[:at] + zeros + (data[at + len(zeros) :] if zeros else b"")
    if kind == "bomb":
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", 8) as bomb:
            for name in (names := old.namelist()):
                bomb.writestr(name, bytes(64 << 20) if name == names[-4] else old.read(name))
        return stream.getvalue()
    leaves, way = tree_flatten(torch.load(io.BytesIO(data), weights_only=True))
    i, j = rng.sample([i for i, x in enumerate(leaves) if isinstance(x, Tensor)], 2)
    if kind == "swap":
        leaves[i], leaves[j] = leaves[j], leaves[i]
    elif kind == "plain":
        plain = [i for i, x in enumerate(leaves) if not isinstance(x, Tensor)]
        leaves[rng.choice(plain)] = rng.choice((-7, 1e30, float("nan"), "x", None, 10**30))
    elif kind != "version":
        x = leaves[i]
        new = {"shape": torch.stack([x, x]), "dtype": x + 0j, "numbers": torch.full_like(x, 3)}
        leaves[i] = new[kind]
    snapshot = tree_unflatten(leaves, way)
    torch.save(snapshot | ({"version": rng.randrange(3)} if kind == "version" else {}), stream)
    return stream.getvalue()


def outcome(folder: Path, whole: dict[int | None, list[Any]]) -> str:
    """What becomes of a run that is to go on."""
    g = begun(folder)
    try:
        step = g.resume()
    except ConfigError:
        return "refused" if bits(g) == whole[None] else "wrong: half loaded"
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
    ) as error:
        return f"wrong: {type(error).__name__}"
    if step is None or bits(g) != whole[step]:
        return "wrong: other bits"
    return "whole" if step == max(x or 0 for x in whole) else "the older one"


def main() -> None:
    """Damage, count, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.damaged_snapshots")
    parser.add_argument("--count", type=int, default=2000)
    count, rng = parser.parse_args().count, random.Random(0)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    found = {kind: Counter[str]() for kind in KINDS}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "snapshots")
        train(begun(folder), 20)
        data = {file: file.read_bytes() for file in sorted(folder.iterdir())}
        whole: dict[int | None, list[Any]] = {None: bits(begun(folder))}
        for left in data:  # the older one, then the newer one
            for file in data:
                file.write_bytes(data[file] if file <= left else b"")
            g = begun(folder)
            step = g.resume()
            whole[step] = bits(g)
        for i in range(count):
            kind, both = KINDS[i % len(KINDS)], i // len(KINDS) % 4 == 0
            for file in [*data][not both :]:
                file.write_bytes(damaged(kind, data[file], rng))
            found[kind][outcome(folder, whole)] += 1
            for file in data:
                file.write_bytes(data[file])
    for kind, counts in found.items():
        print(f"| {kind} |", ", ".join(f"{what} {n}" for what, n in sorted(counts.items())), "|")
    wrong = sum(n for counts in found.values() for what, n in counts.items() if "wrong" in what)
    print(f"{count} damaged snapshots; wrong: {wrong}")


if __name__ == "__main__":
    main()
