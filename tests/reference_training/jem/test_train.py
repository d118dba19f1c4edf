"""The trainer: exact resume, determinism, and that the loop is JEM's."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import load_digits
from ebmguard.reference_training.jem import train as jem_train
from ebmguard.reference_training.jem.command import run
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.train import train
from ebmguard.reference_training.networks import WideResNet
from ebmguard.sinks import read_jsonl

SMALL = {
    "iterations": 8,
    "n_pos": 8,
    "n_neg": 6,
    "sgld_steps": 2,
    "buffer_size": 30,
    "eval_every": 3,
    "checkpoint_every": 4,
}


class Silent:
    """A reporter that counts steps, and presses Ctrl-C after one of them."""

    def __init__(self, interrupt_after=None):
        self.interrupt_after = interrupt_after
        self.notes = []
        self.states = []

    def start(self, name, done, total):
        self.started = (name, done, total)

    def step(self, done, state):
        self.states.append((done, dict(state)))
        if done == self.interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)

    def note(self, text):
        self.notes.append(text)

    def stop(self):
        pass


def config_for(out, **settings):
    return JemConfig(**{"out": out, "device": "cpu", **SMALL, **settings})


def go(config, reporter=None):
    return train(*config.open(), reporter or Silent())


def saved(out):
    return torch.load(out / "checkpoints" / "last.pt", weights_only=True)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def rows_of(out, name):
    return [json.dumps(row, sort_keys=True) for row in read_jsonl(out / name)]


@pytest.mark.parametrize("beta_star", [0.0, 2.0])
def test_same_seed_same_bits_and_another_seed_other_bits(tmp_path, beta_star):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        go(config_for(tmp_path / name, seed=seed, beta_star=beta_star))
    a, b, c = (saved(tmp_path / name) for name in "abc")
    for part in ("network", "optimizer", "buffer", "data_rng"):
        assert same(a[part], b[part])
        assert not same(a[part], c[part])
    assert rows_of(tmp_path / "a", "metrics.jsonl") == rows_of(tmp_path / "b", "metrics.jsonl")


def test_unguarded_loop_written_by_hand_gives_the_same_bits(tmp_path):
    """At beta* = 0 the run is JEM's: the same steps, written out without anything of ours."""
    config = config_for(tmp_path / "run", beta_star=0.0, seed=1)
    go(config)
    data = load_digits()
    torch.manual_seed(1)
    net = WideResNet(width=1).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(net.parameters(), lr=config.lr, fused=True)
    data_rng = torch.Generator().manual_seed(2)
    rng = torch.Generator().manual_seed(3)
    buffer = torch.rand(30, 1, 8, 8, generator=rng) * 2 - 1
    for _ in range(config.iterations):
        index = torch.randint(1437, (8,), generator=data_rng)
        noise = torch.randn(8, 1, 8, 8, generator=data_rng)
        x_pos, y = data.train_x[index] + 0.03 * noise, data.train_y[index]
        rows = torch.randint(30, (6,), generator=rng)
        fresh = torch.rand(6, generator=rng) < 0.05
        uniform = torch.rand(6, 1, 8, 8, generator=rng) * 2 - 1
        x = torch.where(fresh[:, None, None, None], uniform, buffer[rows])
        for _ in range(2):
            x.requires_grad_()
            (grad,) = torch.autograd.grad(net(x).sum(), x)
            # alpha=, not 0.01 * noise: a fused multiply-add rounds once, a product and a sum twice.
            moved = x.detach() + grad
            x = torch.add(moved, torch.randn(6, 1, 8, 8, generator=rng), alpha=0.01)
        for row, value in zip(rows.tolist(), x, strict=True):
            buffer[row] = value
        logits = net.classify(torch.cat([x_pos, x]))
        f = logits.logsumexp(1)
        loss = F.cross_entropy(logits[:8], y) + f[8:].mean() - f[:8].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = saved(tmp_path / "run")
    assert same(state["network"], dict(net.state_dict()))
    assert same(state["buffer"]["samples"], buffer)


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_interrupted_and_resumed_run_ends_with_the_same_bits(tmp_path, stop):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    go(config_for(whole))
    assert go(config_for(cut), Silent(interrupt_after=stop)) is None
    assert len(read_jsonl(cut / "metrics.jsonl")) == stop
    assert not (cut / "results.json").exists()
    resumed = Silent()
    go(JemConfig(out=cut, resume=True), resumed)
    assert resumed.started[1:] == (stop, SMALL["iterations"])
    one, two = saved(whole), saved(cut)
    for state in (one, two):
        del state["logbook"]["record"]["elapsed"]
    assert one.keys() == two.keys()
    for part in one:
        assert same(one[part], two[part]), part
    for name in ("metrics.jsonl", "training.jsonl", "accuracy.jsonl", "alerts.jsonl"):
        assert rows_of(whole, name) == rows_of(cut, name)
    results = [json.loads((out / "results.json").read_text()) for out in (whole, cut)]
    for result in results:
        del result["wall_seconds"], result["command"]
    assert results[0] == results[1]


def test_ctrl_c_says_how_to_go_on_and_has_the_shells_status(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    monkeypatch.setattr(jem_train, "default_reporter", lambda: Silent(interrupt_after=2))
    assert run(config_for(out)) == 130
    text = capsys.readouterr().out
    assert f"ebmguard train jem --out {out} " in text
    assert "--data digits --beta-star 2.0" in text
    assert text.endswith("--resume\n")
    monkeypatch.setattr(jem_train, "default_reporter", Silent)
    assert run(config_for(out, resume=True)) == 0
    assert "finished 8 steps without divergence" in capsys.readouterr().out


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path):
    class Killed(Exception):
        pass

    class Killing(Silent):
        def step(self, done, state):
            if done == 6:
                raise Killed

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    go(config_for(whole))
    with pytest.raises(Killed):
        go(config_for(cut), Killing())
    assert saved(cut)["logbook"]["record"]["next_step"] == 4
    go(config_for(cut, resume=True))
    assert same(saved(whole)["network"], saved(cut)["network"])
    for name in ("metrics.jsonl", "training.jsonl", "accuracy.jsonl"):
        assert rows_of(whole, name) == rows_of(cut, name)


def test_killed_before_the_first_checkpoint_starts_again(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    go(config_for(whole))
    _, folder = config_for(cut).open()
    folder.append_rows("metrics.jsonl", [{"step": 0}])
    go(config_for(cut, resume=True))
    assert same(saved(whole)["network"], saved(cut)["network"])
    assert rows_of(whole, "metrics.jsonl") == rows_of(cut, "metrics.jsonl")


def test_resume_with_more_iterations_goes_further(tmp_path):
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    go(config_for(whole))
    go(config_for(longer, iterations=5))
    go(JemConfig(out=longer, resume=True, iterations=8))
    assert same(saved(whole)["network"], saved(longer)["network"])
    assert rows_of(whole, "accuracy.jsonl") == rows_of(longer, "accuracy.jsonl")
    assert json.loads((longer / "config.json").read_text())["iterations"] == 8


def test_run_folder_holds_the_run(tmp_path):
    out = tmp_path / "run"
    results = go(config_for(out))
    assert {row["step"] for row in read_jsonl(out / "metrics.jsonl")} == set(range(8))
    assert {row["step"] for row in read_jsonl(out / "training.jsonl")} == set(range(8))
    assert [row["step"] for row in read_jsonl(out / "accuracy.jsonl")] == [0, 3, 6, 8]
    assert list(out.glob("events.out.tfevents.*"))
    assert list((out / "trainer").glob("events.out.tfevents.*"))
    assert json.loads((out / "config.json").read_text())["n_neg"] == 6
    written = json.loads((out / "results.json").read_text())
    assert written.keys() == results.keys()
    assert written["steps"] == 8
    assert written["diverged_at"] is None
    assert written["device"] == "cpu"
    with np.load(out / "figures" / "samples.npz") as samples:
        assert set(samples.files) == {"data", "start", "healthy", "end"}
        assert samples["end"].shape == (6, 1, 8, 8)
    # What the trainer and the guard measured of the same step agrees.
    pairs = zip(read_jsonl(out / "training.jsonl"), read_jsonl(out / "metrics.jsonl"), strict=True)
    for ours, guards in pairs:
        assert ours["energy_gap"] == pytest.approx(guards["energy_gap"], abs=1e-5)


def test_a_diverging_run_is_recorded_watched_and_stopped(tmp_path):
    out = tmp_path / "run"
    config = config_for(
        out, beta_star=0.0, lr=0.5, iterations=60, stop_after=4, alert_window=3, alert_context=2
    )
    reporter = Silent()
    results = go(config, reporter)
    lost = results["diverged_at"]
    assert lost is not None
    assert results["steps"] == lost + 4 + 1
    gaps = [row["energy_gap"] for row in read_jsonl(out / "training.jsonl")]
    assert not abs(gaps[lost]) <= 1e4
    assert all(abs(gap) <= 1e4 for gap in gaps[:lost])
    steps = [step for step, _ in results["accuracy_around_divergence"]]
    assert steps == list(range(max(lost - 2, 0), lost + 4))[: len(steps)]
    assert len(steps) >= 5
    assert any("diverged at step" in note for note in reporter.notes)
    # Its alerts are those that the guard wrote.
    first_error = next(a for a in read_jsonl(out / "alerts.jsonl") if a["level"] == "ERROR")
    assert results["first_error"]["step"] == first_error["step"]
    go(config_for(out, resume=True))  # there is nothing left to do, and that is no error
    assert json.loads((out / "results.json").read_text())["steps"] == results["steps"]


def test_refuses_folders_devices_and_settings_before_anything_is_written(tmp_path):
    out = tmp_path / "run"
    go(config_for(out))
    with pytest.raises(ConfigError, match="already holds a run"):
        run(config_for(out))
    with pytest.raises(ConfigError, match="device is 'quantum'"):
        run(config_for(tmp_path / "other", device="quantum"))
    with pytest.raises(ConfigError, match="lr is -1"):
        run(config_for(tmp_path / "other", lr=-1.0))
    with pytest.raises(ConfigError, match="cannot be resumed with other settings"):
        run(config_for(out, resume=True, lr=0.1))
    assert not (tmp_path / "other").exists()
