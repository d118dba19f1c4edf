"""What snapshots hold, and where they are taken: one case a line."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ebmguard.errors import ConfigError
from ebmguard.recovery import archive
from tests.recovery.parts import Loop, go_on, kept
from tests.runs import frozen


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int = 1


class Named(dict[str, int]):
    pass


class Holder:
    """A part of a trainer whose state is one value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"plain": 1, "value": [self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.value,) = state["value"]


# -- what a snapshot may hold ----------------------------------------------------------------------

PARTS = ("buffer", "scheduler", "ema")
GENERATOR = torch.Generator().manual_seed(1)
READ: list[Any] = [
    *(np.float64(1e-3), np.float32(0.1), np.longdouble(1.5), np.complex128(1j)),
    *(np.int64(3), np.uint8(3), np.bool_(True), np.str_("a")),
    *(np.zeros((2, 3)), np.arange(4)[::2], np.asfortranarray(np.ones((2, 3))), np.array(2.0)),
    *(
        np.array(["a", "b"]),
        np.arange(3, dtype=">f8"),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.array([1, "a"], object),
    ),
    np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
    *(collections.OrderedDict(a=1), collections.Counter("aab"), {1, 2}, {(1, "a")}, (1, [2, {}])),
    *(1 + 2j, b"abc", bytearray(b"a"), 10**400, float("nan"), None, {None: 1, (1, 2): 3}),
    *(torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.eye(2), torch.ones(2).half()),
    *(torch.eye(3).to_sparse(), random.Random(1).getstate(), Path("/a/b"), GENERATOR.get_state()),
    *(datetime.datetime.now(), datetime.datetime.now(datetime.UTC), datetime.timedelta(3)),
    datetime.date.today(),
]
REFUSED: list[Any] = [
    *(collections.deque([1], maxlen=4), collections.defaultdict(list), Named(a=1)),
    *(Colour.RED, {Colour.RED: 1}, Point(), GENERATOR, random.Random(1)),
    *(np.random.default_rng(0), np.random.RandomState(0), decimal.Decimal("1.5"), slice(1, 2)),
    *(range(4), frozenset([1]), len, lambda: 0, nn.Linear(1, 1), int, memoryview(b"a")),
]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype.newbyteorder("=") and np.array_equal(a, b)
    if isinstance(b, torch.Size):
        return bool(a == b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a.to_dense(), b.to_dense())
    return repr(a) == repr(b)


@pytest.mark.parametrize("part", PARTS)
def test_what_is_read_back_as_it_was(part: str, tmp_path: Path) -> None:
    first = kept(tmp_path, **{part: Holder(READ)})
    first.steps(10)
    first.g.close()
    holder = Holder()
    assert kept(tmp_path, **{part: holder}).g.resume() == 4
    for found, value in zip(holder.value, READ, strict=True):
        assert isinstance(value, type(found))
        assert same(found, value), value


@pytest.mark.parametrize("value", REFUSED, ids=type)
def test_what_cannot_be_read_back_is_refused_before_the_first_step(
    value: Any, tmp_path: Path
) -> None:
    part = PARTS[REFUSED.index(value) % 3]
    loop = kept(tmp_path, **{part: Holder(value)})
    before = frozen(loop.f)
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"{part}\['value'\]|cannot hold .*memory"):
            loop.step()
    assert frozen(loop.f) == before
    assert loop.g.step == 0
    assert not [*tmp_path.glob("snapshot*")]


@pytest.mark.parametrize("lr", [np.float32(1e-2), torch.tensor(1e-2)], ids=type)
def test_the_rate_of_a_sweep_is_the_same_in_the_next_process(
    lr: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = kept(tmp_path, lr=lr)
    first.steps(12)
    first.g.close()
    then, now = frozen([first.f, first.optimizer]), kept(tmp_path, lr=lr)
    assert now.g.resume() == 8
    now.steps(4)
    assert type(now.optimizer.param_groups[0]["lr"]) is type(lr)
    assert frozen([now.f, now.optimizer]) == then
    assert "other random numbers" not in caplog.text


def test_what_comes_later_is_not_written_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    holder = Holder()
    loop = kept(tmp_path, buffer=holder)
    for step in range(24):
        holder.value = [{"a": collections.deque()}] if 8 <= step < 16 else None
        loop.step()
    said = [x.getMessage() for x in caplog.records if "napshot" in x.getMessage()]
    assert len(said) == 2
    assert "['buffer']['value'][0][0]['a'] is a collections.deque" in said[0]
    assert said[1].startswith("Snapshots are written again")
    loop.g.close()
    assert kept(tmp_path, buffer=Holder()).g.resume() == 20


def test_the_first_file_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save = archive.save_durably
    monkeypatch.setattr(
        archive, "save_durably", lambda file, state: save(file, state | {"state": {}})
    )
    loop = kept(tmp_path)
    loop.steps(10)
    assert "is not what was written. Training goes on" in caplog.text
    assert not [*tmp_path.glob("snapshot*")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"more": Colour.RED}, r"it is whole, but holds .*Colour.*earlier versions"),
        (
            {"version": 3},
            r"no snapshot can be read[^;]*its format is 3, that of this ebmguard 4. Go on with",
        ),
        ({"more": 1}, "not a snapshot of this version"),
    ],
)
def test_a_whole_file_of_another_version_is_no_damaged_one(
    change: Any, said: str, tmp_path: Path
) -> None:
    first = kept(tmp_path)
    first.steps(10)
    first.g.close()
    for file in tmp_path.glob("snapshot-*.pt"):
        torch.save(torch.load(file, weights_only=True) | change, file)
    with pytest.raises(ConfigError, match=said):
        kept(tmp_path).g.resume()


# -- a resumed run is the run ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "average", "push", "more"),
    [
        ("top", "top", "in place", "draws"),
        ("data", "middle", "middle", "batch norm"),
        ("end", "end", "end", ""),
    ],
)
def test_a_loop_that_was_stopped_is_the_loop(
    schedule: str, average: str, push: str, more: str, tmp_path: Path
) -> None:
    told = {"schedule": schedule, "average": average, "push": push, "more": more}
    for stop in (2, 7, 13, 17):
        state, _ = go_on(tmp_path / "stopped", stop, **told)
    assert state == go_on(tmp_path / "whole", 17, **told)[0]


# -- structure that changes ------------------------------------------------------------------------


def unfrozen(loop: Loop) -> None:
    more = nn.Linear(1, 1)
    loop.optimizer.add_param_group({"params": [*more.parameters()], "lr": 0.0})


def another_schedule(loop: Loop) -> None:
    loop.g.attach(scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 100))


CHANGES: list[tuple[str, Callable[[Loop], object]]] = [
    ("optimizer", unfrozen),
    ("model", lambda loop: parametrizations.weight_norm(loop.f[0]).requires_grad_(False)),
    ("model", lambda loop: parametrizations.spectral_norm(loop.f[2])),
    ("model", lambda loop: loop.f.add_module("more", nn.Linear(1, 1).requires_grad_(False))),
    ("model", lambda loop: loop.f[0].register_buffer("mask", torch.ones(2))),
    ("model", lambda loop: loop.f[1].register_buffer("mask", None)),
    ("scheduler", another_schedule),
    ("buffer", lambda loop: loop.g.attach(buffer=torch.zeros(3, 2))),
    ("ema", lambda loop: loop.g.attach(ema=torch.optim.swa_utils.AveragedModel(nn.Linear(2, 1)))),
    ("generators", lambda loop: loop.g.attach(generators=[loop.rng, torch.Generator()])),
]


def test_a_structure_that_changes_is_seen_and_can_be_taken_back_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop, wanted = kept(tmp_path, scheduler=Holder()), []
    for name, change in CHANGES:
        loop.steps(6)
        change(loop)
        wanted.append(f"Step {loop.g.step + 1}: the {name}")
    loop.steps(30)
    said = [x.getMessage() for x in caplog.records if "changed" in x.getMessage()]
    assert [x.split(" changed")[0] for x in said] == wanted
    while not loop.g.rollbacks and loop.g.step < 140:
        loop.step(1e4)
    assert loop.g.rollbacks[0].restored_step > 6 * len(CHANGES)
    loop.g.close()
    then = kept(tmp_path, scheduler=Holder())
    for _, change in CHANGES:
        change(then)
    assert then.g.resume() == loop.g.rollbacks[-1].restored_step


class Refuses(Holder):
    """Takes no state, once its own has been taken."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["value"] != [self.value]:
            raise KeyError("another value")


def test_what_cannot_be_put_back_whole_is_not_put_back_in_part(tmp_path: Path) -> None:
    holder = Refuses(1)
    loop = kept(None, buffer=holder)
    loop.steps(30)
    holder.value = 2

    def blow_up() -> None:
        for _ in range(50):
            loop.step(1e4)

    with pytest.raises(ConfigError, match=r"could not be taken back to step \d+ .*another value"):
        blow_up()
    assert loop.g.attempt == 0
    steps = {int(x["step"]) for x in loop.optimizer.state.values()}
    assert steps == {loop.g.step}  # and not those of the snapshot
