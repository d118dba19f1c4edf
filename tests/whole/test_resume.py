"""A run that goes on from its folder does so whole, or not at all: one case a line."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import Recovery
from ebmguard.alerts import DEFAULT_RULES
from ebmguard.errors import ConfigError
from ebmguard.recovery.archive import digest_of
from ebmguard.samplers import ReplayBuffer
from tests.parts import Energy
from tests.recovery.parts import Run
from tests.runs import frozen, randomness

Edit = Callable[[dict[str, Any]], object]
STEPS = 20
MADE: list[Run] = []


def make(folder: Path, **options: Any) -> Run:
    """As another process would, once the one before is over."""
    while MADE:
        MADE.pop().guard.close()
    recovery = Recovery(every=2, certify_after=2, folder=folder, folder_every=4)
    MADE.append(Run(recovery, **options))
    return MADE[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "snapshots"
    run = make(folder)
    for _ in range(STEPS):
        run.step()
    run.guard.close()
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "snapshots"))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("snapshot-*.pt"))


def step_of(file: Path) -> int:
    return int(file.stem.removeprefix("snapshot-"))


def everything(run: Run) -> Any:
    """All bits that a resume may change."""
    told = run.guard.trainer
    parts = [told.model, told.optimizer, told.scheduler, told.ema, told.buffer, *told.generators]
    return frozen(parts), randomness(), frozen(run.guard.state_dict()), run.guard.step


def refused(run: Run, words: str) -> None:
    """It is refused with these words, and nothing has changed."""
    before = everything(run)
    with pytest.raises(ConfigError, match=f"(?s)no snapshot can be read.*{words}"):
        run.guard.resume()
    assert everything(run) == before


# -- what is in a snapshot ------------------------------------------------------------------------


def swapped(tree: dict[Any, Any], a: Any, b: Any) -> None:
    tree[a], tree[b] = tree[b], tree[a]


def state(edit: Edit) -> Edit:
    return lambda snapshot: edit(snapshot["state"])


def own(edit: Edit) -> Edit:
    return lambda snapshot: edit(snapshot["state"]["guard"])


def set_to(name: str, value: Any) -> Edit:
    return lambda tree: tree.__setitem__(name, value)


def weight(edit: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return state(lambda x: x["model"].update({W: edit(x["model"][W])}))


def both_steps(value: Any) -> Edit:
    def edit(snapshot: dict[str, Any]) -> None:
        snapshot["step"] = snapshot["state"]["guard"]["step"] = value

    return edit


W, B = "net.0.weight", "net.0.bias"
AVERAGE, MOMENTS = "module.net.0.weight", ("exp_avg", "exp_avg_sq")
NAN = float("nan")
INSIDE: list[tuple[str, Edit, str]] = [
    ("no guard", state(lambda x: x.pop("guard")), "guard"),
    ("no buffer", state(lambda x: x.pop("buffer")), "other parts for buffer"),
    ("no random numbers", state(lambda x: x.pop("random")), "random"),
    ("a scaler more", state(set_to("scaler", {})), "other parts for scaler"),
    (
        "version",
        set_to("version", 2),
        "not a snapshot of this version: its format is 2, that of this ebmguard 4. Go on with",
    ),
    ("a key more", set_to("extra", 1), "not a snapshot of this version"),
    ("ranks", set_to("ranks", 2), "a run on 2 ranks, but this one is on 1"),
    ("step NaN", both_steps(NAN), "of step nan"),
    ("step of 30 digits", both_steps(10**30), "of step 10{30}"),
    ("step True", both_steps(True), "of step True"),
    ("step of another file", both_steps(3), "of step 3"),
    ("the guard's step", own(set_to("step", 3)), "its guard 3"),
    ("the guard's losses", own(set_to("losses", -1)), "losses=-1"),
    ("the guard's lag", own(set_to("lag", 0.5)), "lag=0.5"),
    ("the guard's rows", own(set_to("rows", [[1, {"x": "y"}, {}, [], True, {}]])), "x='y'"),
    ("the guard's members", own(set_to("rows", [[1, {}, {}, [{"x": None}], True, {}]])), "x=None"),
    ("the judge", own(lambda x: x["judge"].pop("rules")), "judge"),
    ("a rule less", own(lambda x: x["judge"]["rules"].pop("nonfinite")), "with the rules"),
    ("members", own(lambda x: x["judge"]["members"].append({})), "1 ensemble members"),
    ("the course", own(set_to("course", {})), "VerdictTracker"),
    ("the measure", own(set_to("measure", None)), "measure|NoneType"),
    ("the first calls", own(set_to("measured", {})), "Not a state"),
    ("the advice", own(set_to("advised", {"lr": []})), "unpack"),
    ("the recovery", set_to("recovery", {}), "Not a state of a recovery"),
    ("the attempt", lambda x: x["recovery"].__setitem__("attempt", "1"), "'1' is not"),
    ("weights of another shape", state(lambda x: swapped(x["model"], W, B)), W),
    ("weights of another dtype", weight(torch.Tensor.double), W),
    ("a weight that is NaN", state(lambda x: x["model"][W].fill_(NAN)), f"{W} that is not finite"),
    ("an infinite average", state(lambda x: x["ema"][AVERAGE].fill_(float("inf"))), "finite"),
    ("moments", state(lambda x: swapped(x["optimizer"]["state"], 0, 1)), ""),
    ("half of the moments", state(lambda x: swapped(x["optimizer"]["state"][0], *MOMENTS)), ""),
    ("groups", state(lambda x: x["optimizer"]["param_groups"].clear()), "group"),
    ("the buffer", state(lambda x: x["buffer"].update(samples=torch.ones(3, 2))), "samples"),
    ("the ages", state(lambda x: x["buffer"].pop("ages")), "ages"),
    ("PyTorch's numbers", state(lambda x: x["random"].update(cpu=torch.ones(3).byte())), "cpu|RNG"),
    ("Python's numbers", state(lambda x: x["random"].update(python=(3, (1,), None))), "vector"),
    ("NumPy's numbers", state(lambda x: x["random"]["numpy"].pop(1)), "index|state"),
    ("the trainer's own numbers", state(lambda x: x["random"]["own"].pop()), "for generators"),
    ("no places", state(lambda x: x.pop("places")), "places"),
    ("a place that is none", state(lambda x: x["places"].update(optimizer=["?"])), "device|places"),
]
# Whose digest is not made again; of an optimizer's own matter nothing else tells.
BY_DIGEST = ("no guard", "moments", "half of the moments")


@pytest.mark.parametrize(("name", "edit", "words"), INSIDE)
def test_what_a_snapshot_lacks(
    name: str, edit: Edit, words: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the newest one does, the older one is taken; where both do, nothing changes."""
    older, newest = files(folder)
    for file, expected in ((newest, step_of(older)), (older, None)):
        snapshot = torch.load(file, weights_only=True)
        edit(snapshot)
        if name not in BY_DIGEST:
            snapshot["digest"] = digest_of([snapshot["state"], snapshot["recovery"]])
        torch.save(snapshot, file)
        run = make(folder)
        if expected is None:
            refused(run, words)
        else:
            assert run.guard.resume() == expected
            assert newest.name in caplog.text
            assert run.guard.step == expected


# -- files ----------------------------------------------------------------------------------------


def deflated(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


def twice(file: Path) -> None:
    """Two entries that are one: what it unpacks to is more than it is."""
    with zipfile.ZipFile(file, "a") as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        archive.filelist += [largest] * 100
        archive._didModify = True  # type: ignore[attr-defined]


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        if file.is_file():
            file.unlink()
            make(file)

    return damage


def cut(share: float) -> Callable[[Path], None]:
    return lambda file: os.truncate(file, int(file.stat().st_size * share))


def flipped(share: float) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[int(len(data) * share)] ^= 1
        file.write_bytes(data)

    return damage


def out_of_it(file: Path) -> None:
    other = file.parent.parent / "other"
    file.rename(other)
    file.symlink_to(other)


def doubled(file: Path) -> None:
    """2**60 values in sixty lists."""
    tree: list[Any] = []
    for _ in range(60):
        tree = [tree, tree]
    torch.save(torch.load(file, weights_only=True) | {"digest": tree}, file)


OUTSIDE: list[tuple[str, Callable[[Path], object], str]] = [
    ("empty", lambda file: file.write_bytes(b""), "not a zip"),
    ("a text", lambda file: file.write_text("nothing"), "not a zip"),
    ("a list", lambda file: torch.save([1], file), "sequence element|not iterable"),
    ("half", cut(0.5), "not a zip"),
    ("a bit of its weights", flipped(0.5), "is not what was written"),
    ("compressed", deflated, "it unpacks to more"),
    ("more than it is", twice, "it unpacks to more"),
    ("lists in lists", doubled, "what it holds is more"),
    ("a pipe", replaced(os.mkfifo), "it is not a file"),
    ("a link out of the folder", out_of_it, "it leads out of"),
    ("a link to a device", replaced(lambda file: file.symlink_to("/dev/zero")), "it leads out of"),
    ("a link to itself", replaced(lambda file: file.symlink_to(file.name)), "symbolic links"),
]


@pytest.mark.parametrize(("name", "damage", "words"), OUTSIDE)
def test_what_is_no_snapshot(
    name: str, damage: Callable[[Path], object], words: str, folder: Path
) -> None:
    older, newest = files(folder)
    damage(newest)
    run = make(folder)
    assert run.guard.resume() == step_of(older)
    for _ in range(8):
        run.step()  # and writes the next ones
    assert step_of(files(folder)[-1]) > step_of(older)
    for file in files(folder):
        damage(file)
    refused(make(folder), words)


def test_a_link_inside_the_folder_is_followed(folder: Path) -> None:
    newest = files(folder)[-1]
    (folder / "kept").mkdir()
    newest.rename(folder / "kept" / "one")
    newest.symlink_to("kept/one")
    assert make(folder).guard.resume() == step_of(newest)


# -- what goes on is another ----------------------------------------------------------------------


def model(*middle: nn.Module, **options: Any) -> Callable[[Run], object]:
    def attach(run: Run) -> None:
        run.model = Energy(*middle, **options)
        average = torch.optim.swa_utils.AveragedModel(run.model)
        adam = torch.optim.Adam(run.model.parameters())
        run.guard.attach(model=run.model, optimizer=adam, ema=average)

    return attach


def optimizer(kind: Any, **options: Any) -> Callable[[Run], object]:
    return lambda run: run.guard.attach(optimizer=kind(run.model.parameters(), **options))


def in_turn(run: Run) -> None:
    parameters = [*run.model.parameters()]
    run.guard.attach(optimizer=torch.optim.Adam(parameters[::-1]))


def in_groups(run: Run) -> None:
    groups = [{"params": [p]} for p in run.model.parameters()]
    run.optimizer = torch.optim.Adam(groups)
    run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 7, 0.9)
    run.guard.attach(optimizer=run.optimizer, scheduler=run.scheduler)


def with_a_mask(run: Run) -> None:
    for module in (run.model, run.ema.module):
        module.register_buffer("mask", torch.ones(2, dtype=torch.bool))


def attached(**parts: Any) -> Callable[[Run], object]:
    return lambda run: run.guard.attach(**{name: make() for name, make in parts.items()})


def scheduled(run: Run) -> None:
    run.guard.attach(scheduler=torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda _: 1.0))


ROWS = attached(buffer=lambda: torch.zeros(4, 2))
RATE: dict[str, Any] = {"reinit_rate": 0.1, "generator": torch.Generator()}
DOUBLES = attached(buffer=lambda: ReplayBuffer(32, (2,), dtype=torch.float64, **RATE))
GENERATORS = attached(generators=lambda: [torch.Generator(), torch.Generator()])
OTHERS: list[tuple[str, Callable[[Run], object] | None, Any, str]] = [
    ("another depth", None, model(nn.Linear(8, 8)), "net.1.weight|net.2"),
    ("another dtype", None, model(dtype=torch.float64), W),
    ("a buffer of the model more", None, with_a_mask, "mask.* is missing there"),
    ("a buffer of the model less", with_a_mask, lambda run: None, "mask.* missing here"),
    ("SGD", None, optimizer(torch.optim.SGD, lr=0.1), "is Adam there, but SGD here"),
    ("parameters in turn", None, in_turn, "0..0. is"),
    ("parameter groups", None, in_groups, "0..1. is"),
    ("another schedule", None, scheduled, "is StepLR there, but LambdaLR here"),
    ("a scaler", None, attached(scaler=lambda: torch.amp.GradScaler("cpu")), "for scaler"),
    ("generators", None, GENERATORS, "for generators"),
    ("rows", ROWS, attached(buffer=lambda: torch.zeros(1, 2)), r"\(4, 2\) .* \(1, 2\)"),
    ("bits", ROWS, attached(buffer=lambda: torch.zeros(4, 2).bool()), "float32 .* torch.bool"),
    ("a buffer of doubles", None, DOUBLES, "float32, .* torch.float64"),
    ("a list of rows", ROWS, attached(buffer=lambda: [torch.zeros(4, 2)]), "Tensor .* list"),
    ("rules", None, {"rules": DEFAULT_RULES[1:]}, "with the rules"),
]


@pytest.mark.parametrize(("name", "before", "now", "words"), OTHERS)
def test_a_run_that_is_another(
    name: str, before: Callable[[Run], object] | None, now: Any, words: str, folder: Path
) -> None:
    if before is not None:
        shutil.rmtree(folder)
        first = make(folder)
        before(first)
        for _ in range(STEPS):
            first.step()
    options = now if isinstance(now, dict) else {}
    run = make(folder, **options)
    if not options:
        now(run)
    refused(run, words)


def test_options_are_the_constructors(folder: Path) -> None:
    run = make(folder, beta_star=lambda step: 0.1 * step)
    assert run.guard.resume() == step_of(files(folder)[-1])


def test_a_mask_that_is_infinite_from_the_start_goes_on(tmp_path: Path) -> None:
    def masked() -> Run:
        run = make(tmp_path)
        for module in (run.model, run.ema.module):
            module.register_buffer("mask", torch.full((2,), -torch.inf))
        return run

    run = masked()
    for _ in range(STEPS):
        run.step()
    assert masked().guard.resume()


@pytest.mark.parametrize("folder_name", ["", "a\0b"])
def test_a_folder_that_has_no_name(folder_name: str) -> None:
    with pytest.raises(ConfigError, match=r"folder=.* names no folder"):
        Recovery(folder=folder_name)


def test_the_folder_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name in ("snapshots", "~/snapshots"):
        monkeypatch.chdir(tmp_path)
        run = make(Path(name))
        monkeypatch.chdir(tmp_path / "outputs")
        for _ in range(STEPS):
            run.step()
    assert files(tmp_path / "snapshots")
    assert files(tmp_path / "home/snapshots")
    assert not [*(tmp_path / "outputs").iterdir()]
