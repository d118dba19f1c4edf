"""What cannot be meant, or written, is refused before anything is there."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebmguard import Recovery, guard
from ebmguard.errors import ConfigError
from ebmguard.sinks import JsonlSink, TensorBoardSink, jsonl
from tests.whole.parts import Trainer, X

HUGE = 10**400

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beta_star": ({"beta_star": HUGE}, "beta_star= is beyond any float"),
    "beta_star of a schedule": ({"beta_star": lambda _: HUGE}, r"beta_star\(step=0\)= is beyond"),
    "beta": ({"beta_star": None, "beta": -HUGE}, "beta= is beyond any float"),
    "more digits than are shown": ({"beta_star": 10**9000}, "beta_star= is beyond any float"),
    "output_scale": ({"output_scale": HUGE}, "output_scale= is beyond any float"),
    "sampler_scale": ({"sampler_scale": HUGE}, "sampler_scale= is beyond any float"),
    "reference_beta_star": ({"reference_beta_star": HUGE}, "reference_beta_star= is beyond"),
    "step_size": ({"step_size": HUGE, "noise_std": 0.1}, "step_size= is beyond any float"),
    "noise_std": ({"step_size": 0.1, "noise_std": HUGE}, "noise_std= is beyond any float"),
    "clamp": ({"clamp": (-HUGE, HUGE)}, "clamp=.* expected the lowest and the highest value"),
    "sgld_steps": ({"sgld_steps": HUGE}, "sgld_steps=.* expected the number of SGLD steps"),
    "a NUL in log_dir": ({"log_dir": "a\0b"}, "log_dir=.* names no folder .*NUL"),
    "a NUL alone": ({"log_dir": "\0"}, "log_dir=.* names no folder .*NUL"),
    "half of a surrogate": ({"log_dir": "a\ud800"}, "log_dir=.* names no folder"),
    "no log_dir": ({"log_dir": ""}, "log_dir='' names no folder .*empty"),
    "nobody's home": ({"log_dir": "~nobody-has-this-name/x"}, "log_dir=.* names no folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_argument_has_changed_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told, words = REFUSED[case]
    trainer = Trainer()
    before = trainer.traces()
    with pytest.raises(ConfigError, match=words):
        trainer.guard(**{"log_dir": "run"} | told)
    assert trainer.traces() == before
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def no_room() -> Iterator[Callable[[bool], None]]:
    """Files may have no byte more, which raises an OSError as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def switch(on: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if on else soft, hard))

    yield switch
    switch(False)


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("nth", range(6))
def test_a_disk_that_is_full_at_the_start_leaves_no_file(
    nth: int,
    there: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_room: Callable[[bool], None],
) -> None:
    """The n-th file cannot be made; or all can, and the event file, or none, can be written to."""
    pytest.importorskip("tensorboard")
    folder, made, own = tmp_path / "a" / "run", list[Any](), os.open
    if there:
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    before = {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")}

    def opened(path: Any, flags: int, *mode: Any, **more: Any) -> int:
        if str(path).startswith(str(tmp_path)):
            made.append(path)
            if len(made) == nth + 1:
                full()
        return own(path, flags, *mode, **more)

    trainer = Trainer()
    hung = trainer.traces()
    if nth < 4:
        monkeypatch.setattr(os, "open", opened)
    elif nth == 4:
        monkeypatch.setattr(jsonl.AppendFile, "flush", full)
    else:
        no_room(True)
    with pytest.raises(ConfigError, match=r"cannot be written.*Pass another log_dir.*make room"):
        trainer.guard(log_dir=folder)
    monkeypatch.undo()
    no_room(False)
    assert {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")} == before
    assert trainer.traces() == hung
    trainer.guard(log_dir=folder).close()  # it is free


@pytest.mark.parametrize("name", ["log_dir", "recovery", JsonlSink, TensorBoardSink])
def test_a_tilde_is_the_users_home(
    name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    if name == "log_dir":
        guard(None, None, beta_star=0.5, log_dir="~/run").close()
    elif name == "recovery":
        trainer = Trainer()
        recovery = Recovery(folder="~/run", folder_every=1, certify_after=1, every=1)
        trainer.steps(trainer.guard(action="rollback", recovery=recovery, buffer=[X]), 30)
    else:
        name("~/run").flush()
    assert [*(tmp_path / "home" / "run").iterdir()]
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
