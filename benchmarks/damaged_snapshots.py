"""Thousands of damaged snapshots: a run goes on whole from what is whole, or stays as it is.

    python -m benchmarks.damaged_snapshots

A run writes two snapshots. Then the newer one, or every fourth time both, are damaged, and a new
run is to go on from the folder: with all bits of the newer one, or of the older one, or else with a
ConfigError and all bits as they were. Other bits are wrong; another error ends this.
"""

from __future__ import annotations

import argparse
import io
import logging
import random
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from benchmarks.small_run import begun, bits, train
from ebmguard.errors import ConfigError

KINDS = ["bits", "end", "zeros", "bomb", "swap", "shape", "dtype", "numbers", "plain", "version"]


def damaged(kind: str, data: bytes, rng: random.Random) -> bytes:
    """The bytes of a snapshot after an accident, or of one that holds something else."""
    at, stream = rng.randrange(len(data)), io.BytesIO()
    if kind == "bits":
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 8, 64))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind in ("end", "zeros"):
        lost = min(rng.choice((16, 512, 4096)), len(data) - at)
        return data[:at] + (bytes(lost) + data[at + lost :] if kind == "zeros" else b"")
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
            kind = KINDS[i % len(KINDS)]
            for file in [*data][i // len(KINDS) % 4 > 0 :]:
                file.write_bytes(damaged(kind, data[file], rng))
            found[kind][outcome(folder, whole)] += 1
            for file in data:
                file.write_bytes(data[file])
    for kind, counts in found.items():
        print(f"{kind}:", ", ".join(f"{what} {n}" for what, n in sorted(counts.items())))


if __name__ == "__main__":
    main()
