"""`ebmguard trace` on small trainers in many styles: right, or it says what it cannot tell."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebmguard import cli
from ebmguard.trace import script, tracer
from tests import forks
from tests.trace import structures, trainers

PROVEN = {
    "PLAIN": (
        "loss_fn, sample_q = ebmguard.guard(None, sample_q, model=f, "
        'optimizer=optim, log_dir="runs/1")  # output_scale=100, measured',
        "+    loss = loss_fn(f(x_p), f(x_q))",
    ),
    "JEM": (
        "sampler `sample_q`",
        "called at train.py:59: x_q = sample_q(f, replay_buffer)",
        "loss at train.py:64 (4 times): l_p_x = -(fp - fq)",
        "loss_fn, sample_q = ebmguard.guard(None, sample_q, model=f, optimizer=optim, "
        'log_dir="runs/1")  # output_scale=20_000, measured',
        "l_p_x = loss_fn(fp_all, fq_all)",
    ),
    "INLINE": (
        "its loop stands beside the loss",
        'g = ebmguard.guard(None, None, output_scale=100, convention="energy", log_dir="runs/1")',
        "neg_out = g.temper(model(neg_img))",
        "loss = loss + g.loss(pos_out, neg_out)",
    ),
    "LATENT": (
        "sampler `sample_langevin_prior_z`",
        "samples of `sample_langevin_post_z of netE`",
        'optimizer=optE, convention="energy", log_dir="runs/1")  # output_scale=1, measured',
        "loss_e = loss_fn(pos_all, neg_all)",
    ),
    "COOP": (
        "self.loss_fn, self.langevin_dynamics_descriptor = ebmguard.guard(None, "
        "self.langevin_dynamics_descriptor, model=self.descriptor, optimizer=self.des_optimizer, "
        'log_dir="runs/1")',
        "des_loss = self.loss_fn(obs_feature, revised_feature).sum()",
    ),
    "MALA": (
        "loss_fn, model.sample = ebmguard.guard(None, model.sample, model=model, optimizer=optim, "
        'convention="energy", log_dir="runs/1")  # output_scale=1, measured',
        "loss = loss_fn(pos, neg)",
    ),
    "CLASS": (
        "self.loss_fn, self.negatives = ebmguard.guard(None, self.negatives, model=self.energy, "
        'optimizer=self.optim, convention="energy", log_dir="runs/1")',
        "return self.loss_fn(e_pos, e_neg) + 0.1 *",
    ),
    "CHUNK": ("input (16, 4), output (16, 3)", "loss = loss_fn(pos, neg) / 2"),
    "NEGATED": ("loss_fn(-e_pos, -e_neg)",),
    "METHOD": (
        "g.temper(model.energy(x)).sum(), x)[0]",
        "loss = g.loss(model.energy(data()), model.energy(x.detach()))",
    ),
    "METHODS": (
        "energy: __main__.Net, called model",
        'sample = ebmguard.guard(None, sample, model=model, energy="energy", '
        'optimizer=optim, convention="energy", log_dir="runs/1")',
        "loss = loss_fn(model.energy(data()), model.energy(x))",
    ),
    "FORWARD": (
        "energy: __main__.Net, called model",
        "loss_fn, sample = ebmguard.guard(None, sample, model=model, optimizer=optim, "
        'convention="energy", log_dir="runs/1")',
    ),
    "LOSS_MODULE": (
        "self.loss_fn, self.sample = ebmguard.guard(None, self.sample, model=self.net, "
        'log_dir="runs/1")',  # its optimizer is made elsewhere
        "return self.loss_fn(self.net(x), self.net(x_q))",
    ),
    "TWICE": (
        "l = loss_fn(fp, fq)",
        "l = l + loss_fn(gp, gq)",
    ),
    "NESTED": (
        "self.loss_fn, self.langevin = ebmguard.guard(None, langevin, model=self.model.net, "
        'optimizer=self.optim, log_dir="runs/1")',
        "return self.langevin(lambda x: self.model.score(x), torch.rand(B, D))",
        "return self.loss_fn(-e_pos, -e_neg)",
    ),
    "LOGITS": (
        'g = ebmguard.guard(None, None, output_scale=100, log_dir="runs/1")',
        "grad = torch.autograd.grad(g.temper(f(x).logsumexp(1)).sum(), x)[0]",
        "loss = g.loss(fp, fq)",
    ),
    "PENALTY": ("sampler `sample_q` (train.py:", "loss = loss_fn(fp, fq)"),
    "CONDITIONAL": (
        "return -g.temper(self(x).logsumexp(1)) + 0.5 * x.square().sum(1)",
        "loss = g.loss(model(data()).logsumexp(1), model(x).logsumexp(1))",
    ),
    "MAXIMISED": ("value = -loss_fn(fp, fq)",),
    "AFFINE": ("+    loss = loss_fn(f(x_p), f(x_q))",),
    "ROWS": ('loss = g.loss(f(x, y), f(x, z), groups="rows")',),
    "LONG_STEPS": (
        "data: `fp` (16, 1); the loss lowers the output there (+1)",
        "+    loss = loss_fn(fp, fq)",
    ),
    "RESHAPED": ('loss = g.loss(fy, fz, groups="rows")',),
    "PAIRS": ('loss = g.loss(f(x, y), f(x, z), groups="rows")', "attached: nothing; without"),
}
NOT = {
    "NO_SAMPLER": "no sampler: no module with an output per sample was differentiated by its",
    "ONCE": "a second run without these lines differs as well",
    "SQUARED": "energies of samples and of data were met in no difference of a loss",
}


def written(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    path = Path("train.py")
    path.write_text(
        trainers.HEAD + textwrap.dedent(getattr(trainers, name, "") or getattr(structures, name))
    )
    return path


@pytest.fixture
def _forks(monkeypatch):
    """The second run, forked; `test_a_traced_run_ends_as_a_plain_one` has it as it is."""

    def run(command, **_):
        return forks.run(*command[1:], cwd=Path.cwd())

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=run))


@pytest.mark.usefixtures("_forks")
@pytest.mark.parametrize("name", PROVEN)
def test_lines_that_are_printed_are_right_and_proven(name, tmp_path, monkeypatch, capsys):
    written(tmp_path, name, monkeypatch)
    assert cli.main(["trace", "train.py", "--of-the-script", "3"]) == 0
    out = capsys.readouterr().out
    for words in PROVEN[name]:
        assert words in out
    assert "the same bit for bit" in out


@pytest.mark.usefixtures("_forks")
@pytest.mark.parametrize("name", NOT)
def test_what_it_cannot_tell_it_says(name, tmp_path, monkeypatch, capsys):
    written(tmp_path, name, monkeypatch)
    assert cli.main(["trace", "-n", "2", "train.py"]) == 1
    out = capsys.readouterr().out
    assert NOT[name] in out
    assert "\nproven" not in out


@pytest.mark.usefixtures("_forks")
def test_a_discrete_sampler_gets_no_output_scale(tmp_path, monkeypatch, capsys):
    written(tmp_path, "GIBBS", monkeypatch)
    cli.main(["trace", "-n", "2", "train.py"])
    out = capsys.readouterr().out
    assert "discrete samples" in out
    assert "output_scale=" not in out.partition("to guard it")[2]


@pytest.mark.parametrize("name", ["PLAIN", "LATENT"])
def test_a_traced_run_ends_as_a_plain_one(name, tmp_path, monkeypatch):
    path = written(tmp_path, name, monkeypatch)
    found = tracer.trace_script(path, [], 3)
    plain = script.replay(path, [], found.steps, {})
    assert not found.error
    assert found.state
    assert plain.state == found.state


def test_a_script_that_ends_first_is_no_error_of_its_own(tmp_path, monkeypatch):
    found = tracer.trace_script(written(tmp_path, "ENDS", monkeypatch), [], 9)
    assert (found.steps, found.error, found.state) == (3, "", "")


def test_settings_that_cannot_be_meant(tmp_path, capsys):
    assert cli.main(["trace", str(tmp_path / "none.py")]) == cli.USAGE_ERROR
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "some.py").touch()
    assert cli.main(["trace", "-n", "1", str(tmp_path / "some.py")]) == cli.USAGE_ERROR
    assert "expected 2 or more" in capsys.readouterr().err
