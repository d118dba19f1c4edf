"""Problems of a trainer's source, and the lines that guard it: applied, and run."""

from __future__ import annotations

import gc
import math
import re
from pathlib import Path
from typing import Any

import pytest

from ebmguard import Level
from ebmguard.check import Problem
from ebmguard.doctor import Diagnosis, diagnose
from ebmguard.errors import ConfigError
from ebmguard.sinks import read_jsonl
from tests.doctor.trainers import HEAD, JEM, SHORT_RUN, TRAINERS

NUMBERED = r"(?P<file>[\w.]+\.py):(?P<line>\d+)"


def look(tmp_path: Path, text: str, **beside: str) -> Diagnosis:
    for name, content in beside.items():
        (tmp_path / f"{name}.py").write_text(content)
    path = tmp_path / "train.py"
    path.write_text(text)
    return diagnose(path)


def found(diagnosis: Diagnosis, name: str) -> Problem:
    (problem,) = [each for each in diagnosis.problems if each.name == name]
    return problem


def names(diagnosis: Diagnosis) -> set[str]:
    return {problem.name for problem in diagnosis.problems}


def line_of(problem: Problem, text: str) -> str:
    match = re.fullmatch(NUMBERED, problem.where)
    assert match
    return text.splitlines()[int(match["line"]) - 1].strip()


def apply(text: str, diagnosis: Diagnosis) -> str:
    """The file with the suggested lines, each at the indentation of its place."""
    lines = text.splitlines()
    for line, old, new in sorted(diagnosis.changes, key=lambda change: -change[0]):
        near = lines[line] if not old and line < len(lines) else lines[line - 1]
        if not old and not near.strip():
            near = ""
        indent = near[: len(near) - len(near.lstrip())]
        if old:
            assert [lines[line - 1].strip()] == list(old)
        lines[line - bool(old) : line] = [indent + each for each in new]
    return "\n".join(lines)


def execute(text: str, folder: Path) -> dict[str, Any]:
    world: dict[str, Any] = {"__name__": "trainer"}
    text = text.replace('"runs/1"', repr(str(folder)))
    text = text.replace("step_size=..., noise_std=...", "output_scale=2e4")
    exec(compile(text, "train.py", "exec"), world)
    return world


# -- the retrofit -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINERS)
def test_the_suggested_lines_guard_the_trainer(name, tmp_path):
    pytest.importorskip("tensorboard")
    text = TRAINERS[name]
    diagnosis = look(tmp_path, text)
    assert len(diagnosis.changes) == (4 if name == "inline" else 3)
    guarded = apply(text, diagnosis)
    assert "not_guarded" not in names(look(tmp_path, guarded))
    world = execute(guarded, tmp_path / "run")
    assert len(world["losses"]) == 5
    assert all(math.isfinite(loss) for loss in world["losses"])
    world.clear()
    gc.collect()  # a guard that is gone has written its rows
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["beta_star"] == 0.5 for row in rows)


@pytest.mark.parametrize("name", TRAINERS)
def test_the_signs_are_right(name, tmp_path, monkeypatch):
    """At β* = 0 the guarded trainer's losses are those of the plain one, to the last bit."""
    pytest.importorskip("tensorboard")
    text = TRAINERS[name]
    guarded = apply(text, look(tmp_path, text))
    guarded = guarded.replace("beta_star=0.5", "beta_star=0")
    plain = execute(text, tmp_path / "plain")["losses"]
    assert execute(guarded, tmp_path / "guarded")["losses"] == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "jem",
            "cd_loss, sample_q = ebmguard.guard(None, get_sample_q(args), beta_star=0.5, "
            'output_scale=20_000, log_dir="runs/1")',
        ),
        ("jem", "l_p_x = cd_loss(fp_all, fq_all)"),
        (
            "short_run",
            "cd_loss, sample_q = ebmguard.guard(None, sample_q, model=f, beta_star=0.5, "
            'output_scale=20_000, log_dir="runs/1")     # after `def sample_q`',
        ),
        ("short_run", "L = -cd_loss(f(x_p_d), f(x_q))"),
        (
            "anatomy",
            "cd_loss, sample_s_t = ebmguard.guard(None, sample_s_t, model=f, "
            'convention="energy", beta_star=0.5, step_size=..., noise_std=..., '
            'log_dir="runs/1")     # after `def sample_s_t`',
        ),
        ("anatomy", "d_s_t = cd_loss(f(x_q), f(x_s_t))"),
        ("inline", "neg_out = g.temper(model(neg_img))"),
        ("inline", "loss = loss + g.loss(pos_out, neg_out)"),
        ("object", "cdiv_loss = self.cd_loss(real_out, fake_out)"),
    ],
)
def test_lines_in_the_names_of_the_file(name, line, tmp_path):
    new = [each for change in look(tmp_path, TRAINERS[name]).changes for each in change[2]]
    assert line in new


def test_a_file_without_a_training_loop_says_what_is_missing(tmp_path):
    diagnosis = look(tmp_path, HEAD)
    problem = found(diagnosis, "not_guarded")
    assert "a sampling loop and a difference of energies was not found" in problem.what
    assert diagnosis.changes == []


def test_a_sampler_from_a_file_beside(tmp_path):
    sampler, _, training = SHORT_RUN.partition("optim = ")
    sampler = sampler.replace("f = Net()\n", "").replace("sample_q(K=3)", "sample_q(f, K=3)")
    text = HEAD + "from chains import sample_q\nf = Net()\noptim = " + training
    text = text.replace("sample_q()", "sample_q(f)")
    diagnosis = look(tmp_path, text, chains=sampler)
    new = [each for change in diagnosis.changes for each in change[2]]
    assert any("guard(None, sample_q, beta_star=0.5, output_scale=20_000" in each for each in new)
    assert "L = -cd_loss(f(x_p_d), f(x_q))" in new


# -- problems -----------------------------------------------------------------------------------


def test_a_check_that_nan_passes(tmp_path):
    problem = found(look(tmp_path, JEM), "nan_passes")
    assert problem.severity is Level.ERROR
    assert line_of(problem, JEM) == "if L.abs().item() > 1e8:"
    assert "`L.abs().item() > 1e8` is False for NaN" in problem.what
    assert "1/0" in problem.what


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if L.abs().item() > 1e8:", "if L.isnan() or L.abs().item() > 1e8:"),
        (
            "if L.abs().item() > 1e8:",
            "if not torch.isfinite(L):\n            raise ValueError\n        if L.abs() > 1e8:",
        ),
    ],
)
def test_a_check_that_sees_nan(old, new, tmp_path):
    assert not {"nan_passes", "no_divergence_check"} & names(look(tmp_path, JEM.replace(old, new)))


@pytest.mark.parametrize("end", ["return", "raise RuntimeError", "assert False", "exit()", "break"])
def test_ends_of_a_run(end, tmp_path):
    assert "nan_passes" in names(look(tmp_path, JEM.replace("1 / 0", end)))


def test_a_trainer_that_notices_nothing(tmp_path):
    problem = found(look(tmp_path, SHORT_RUN), "no_divergence_check")
    assert problem.severity is Level.WARN


def test_means_that_are_taken_too_early(tmp_path):
    problem = found(look(tmp_path, SHORT_RUN), "means_too_early")
    assert line_of(problem, SHORT_RUN) == "L = f(x_p_d).mean() - f(x_q).mean()"
    assert "cd_loss(f(x_p_d), f(x_q))" in problem.fix
    assert "means_too_early" not in names(look(tmp_path, JEM))


def test_clipping_and_clamping(tmp_path):
    text = TRAINERS["inline"]
    diagnosis = look(tmp_path, text)
    assert line_of(found(diagnosis, "clipped_gradient"), text).startswith(
        "neg_img.grad.data.clamp_"
    )
    assert "g.attach(clamp=(0, 1))" in found(diagnosis, "clamped_samples").fix


def test_a_clamp_that_misses_the_data(tmp_path):
    text = TRAINERS["inline"] + "\ntr.Normalize((.5, .5, .5), (.5, .5, .5))\n"
    assert found(look(tmp_path, text), "clamp").severity is Level.ERROR
    assert "clamp" not in names(
        look(tmp_path, TRAINERS["object"] + "\ntr.Normalize((.5,), (.5,))\n")
    )


def test_the_output_scale_is_told_or_it_is_said_that_it_cannot_be(tmp_path):
    assert "= 20000" in found(look(tmp_path, JEM), "output_scale").what
    unknown = found(look(tmp_path, TRAINERS["anatomy"]), "output_scale")
    assert "Could not tell the sampler's noise" in unknown.what
    silent = JEM.replace("+ args.sgld_std * torch.randn_like(x_k)", "")
    assert "beta_star alone" in found(look(tmp_path, silent), "no_noise").fix


def test_a_generator_that_is_spent(tmp_path):
    text = TRAINERS["inline"]
    problem = found(look(tmp_path, text), "spent_generator")
    assert line_of(problem, text) == "parameters = model.parameters()"
    listed = text.replace("= model.parameters()", "= list(model.parameters())")
    assert "spent_generator" not in names(look(tmp_path, listed))


def test_checkpoints_without_the_optimizer(tmp_path):
    assert found(look(tmp_path, JEM), "checkpoint").severity is Level.WARN
    text = JEM.replace('"replay_buffer": buffer', '"optim": optim.state_dict()')
    assert "checkpoint" not in names(look(tmp_path, text))


def test_batch_norm_here_and_beside(tmp_path):
    text = JEM.replace("nn.Tanh()", "nn.BatchNorm1d(8)")
    assert found(look(tmp_path, text), "batch_norm").severity is Level.WARN
    option = "def norm(kind, n):\n\n    if kind == 'batch':\n        return nn.BatchNorm2d(n)\n"
    problem = found(look(tmp_path, "import nets\n" + JEM, nets=option), "batch_norm")
    assert problem.severity is Level.INFO
    assert problem.where == "nets.py:4"


@pytest.mark.parametrize(
    ("old", "new", "name", "level"),
    [
        ("f(x_k, y=y).sum()", "f.classify(x_k).sum()", "other_method", Level.WARN),
        (
            "    def sample_q(f,",
            "    @torch.no_grad()\n    def sample_q(f,",
            "no_grad",
            Level.ERROR,
        ),
        ("self.net(x).squeeze(-1)", "self.net(x).squeeze()", "squeeze", Level.INFO),
        ("lr=1e-3)", "lr=1e-3, weight_decay=4e-4)", "weight_decay", Level.INFO),
        ("        return x_k.detach()", "        return x_k", "not_detached", None),
    ],
)
def test_traps(old, new, name, level, tmp_path):
    text = JEM.replace(
        "    def forward", "    def classify(self, x):\n        return x\n\n    def forward"
    )
    assert old in text
    diagnosis = look(tmp_path, text.replace(old, new))
    if level is None:  # the buffer's detach shows that it is known
        assert name not in names(diagnosis)
    else:
        assert found(diagnosis, name).severity is level
    assert name not in names(look(tmp_path, text))


def test_samples_that_keep_their_graph(tmp_path):
    text = SHORT_RUN.replace("return x_k.detach()", "return x_k").replace(
        "x_k.data += f_prime", "x_k = x_k + f_prime"
    )
    assert found(look(tmp_path, text), "not_detached").severity is Level.WARN


# -- a guard that is half in place --------------------------------------------------------------


def guarded(tmp_path: Path) -> str:
    return apply(JEM, look(tmp_path, JEM))


def test_a_guard_in_place_has_no_errors_of_its_own(tmp_path):
    text = guarded(tmp_path)
    assert names(look(tmp_path, text)) == {"nan_passes", "checkpoint", "retain_graph", "check"}


def test_a_guard_with_an_adapters_settings_is_in_place_too(tmp_path):
    """As docs/retrofit.md has it: one import, which names the adapter, and no number."""
    text = guarded(tmp_path).replace("import ebmguard", "import ebmguard.adapters.jem")
    text = text.replace(
        'output_scale=20_000, log_dir="runs/1"', "**ebmguard.adapters.jem.settings(args)"
    )
    assert names(look(tmp_path, text)) == {"nan_passes", "checkpoint", "retain_graph", "check"}
    other = text.replace("import ebmguard.adapters.jem", "import ebmguard.adapters.jem as jem")
    assert "not_guarded" in names(look(tmp_path, other))  # binds no `ebmguard`


@pytest.mark.parametrize(
    ("old", "new", "name", "level"),
    [
        ("l_p_x = cd_loss(fp_all, fq_all)", "l_p_x = -(fp - fq)", "loss_unused", Level.ERROR),
        ("cd_loss, sample_q =", "cd_loss, guarded_q =", "sampler_unused", Level.ERROR),
        ("output_scale=20_000", "output_scale=2_000", "output_scale", Level.ERROR),
        (
            "        fp = fp_all.mean()",
            "        other = f(x_q).mean() - f(x_p_d).mean()\n        fp = fp_all.mean()",
            "unguarded_difference",
            Level.WARN,
        ),
        (
            '            print("P(x)"',
            '            plot(sample_q(f, buffer))\n            print("P(x)"',
            "plot",
            Level.INFO,
        ),
    ],
)
def test_what_is_missing_of_a_guard(old, new, name, level, tmp_path):
    text = guarded(tmp_path)
    assert old in text
    assert found(look(tmp_path, text.replace(old, new)), name).severity is level
    assert name not in names(look(tmp_path, text))


def test_the_untempered_sampler(tmp_path):
    text = apply(SHORT_RUN, look(tmp_path, SHORT_RUN)).replace(
        "cd_loss, sample_q =", "cd_loss, tempered ="
    )
    problem = found(look(tmp_path, text), "untempered_sampler")
    assert problem.severity is Level.ERROR
    assert "sample_q()" in line_of(problem, text)
    paused = text.replace(
        "    x_p_d, x_q = torch.randn(8, 2), sample_q()",
        "    x_p_d, x_q = torch.randn(8, 2), tempered()\n    with g.paused():\n        sample_q()",
    )
    assert "untempered_sampler" not in names(look(tmp_path, paused))


def test_a_name_that_becomes_local(tmp_path):
    text = SHORT_RUN.replace("f = Net()\n", "f = Net()\nimport ebmguard\n")
    text = text.replace(
        "optim =",
        "def main():\n    cd_loss, sample_q = ebmguard.guard(None, sample_q, beta_star=1)\n"
        "    cd_loss\n\n\noptim =",
    )
    problem = found(look(tmp_path, text), "local_name")
    assert problem.severity is Level.ERROR
    with pytest.raises(UnboundLocalError):
        execute(text + "\nmain()\n", tmp_path)
    fixed = text.replace("def main():\n", "def main():\n    global sample_q\n")
    assert "local_name" not in names(look(tmp_path, fixed))


# -- what cannot be read ------------------------------------------------------------------------


def test_python_2_is_said_to_be_no_python_3(tmp_path):
    with pytest.raises(ConfigError, match="not Python 3"):
        look(tmp_path, "print 'hello'\n")


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "train.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        diagnose(tmp_path / "train.py")


def test_a_neighbour_that_cannot_be_read_is_passed_over(tmp_path):
    assert "not_guarded" in names(look(tmp_path, "import old\n" + JEM, old="print 'hello'\n"))


@pytest.mark.parametrize(
    "path",
    sorted(Path(__file__).parents[2].glob("reference_training/jem/*.py")),
    ids=lambda p: p.name,
)
def test_reads_our_own_trainer_without_an_error(path):
    assert not [each for each in diagnose(path).problems if each.severity is Level.ERROR]
