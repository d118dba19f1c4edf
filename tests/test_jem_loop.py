"""The retrofit of a JEM script, as a whole: a loop with the structure of the published one.

Closure as a sampler, replay buffer on the CPU written in place, an energy of shape (B,) or, with
labels, (B, 1), start points moved through ``.data``, losses written inline, two data streams, plots
drawn with the training sampler now and then. ``docs/retrofit.md`` has the script itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebmguard import guard
from ebmguard.sinks import read_jsonl

CLASSES, BATCH, CHAINS, SHAPE = 4, 8, 40, (3, 8, 8)
STEP_SIZE, NOISE = 1.0, 0.01
OUTPUT_SCALE = 20_000


class Block(nn.Module):
    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(narrow, wide, 3, padding=1)
        self.second = nn.Conv2d(wide, wide, 3, stride=2, padding=1)
        self.around = nn.Conv2d(narrow, wide, 1, stride=2)

    def forward(self, x):
        return self.second(F.leaky_relu(self.first(F.leaky_relu(x, 0.2)), 0.2)) + self.around(x)


class Net(nn.Module):
    """Class logits and, from the same logits, log p(x) and log p(x, y) up to a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Block(4, 8), Block(8, 8))
        self.head = nn.Linear(8, CLASSES)

    def classify(self, x):
        return self.head(F.leaky_relu(self.body(x), 0.2).mean((2, 3)))

    def forward(self, x, y=None):
        logits = self.classify(x)
        return logits.logsumexp(1) if y is None else logits.gather(1, y[:, None])


def uniform(n: int) -> Tensor:
    return torch.rand(n, *SHAPE) * 2 - 1


def make_sampler(steps: int = 3) -> Callable[..., Tensor]:
    def draw_start(chains: Tensor | list[Tensor], n: int, y: Tensor | None):
        if len(chains) == 0:  # from scratch
            return uniform(n), None
        rows = torch.randint(len(chains) // (1 if y is None else CLASSES), (n,))
        if y is not None:  # every class owns a block of rows
            rows = rows + y * (len(chains) // CLASSES)
        fresh = (torch.rand(n) < 0.05).float()[:, None, None, None]
        return fresh * uniform(n) + (1 - fresh) * chains[rows], rows

    def sample(f, chains, y=None):
        f.eval()
        start, rows = draw_start(chains, BATCH if y is None else len(y), y)
        x = start.requires_grad_()
        for _ in range(steps):
            (slope,) = torch.autograd.grad(f(x, y=y).sum(), [x], retain_graph=True)
            x.data += STEP_SIZE * slope + NOISE * torch.randn_like(x)
        f.train()
        drawn = x.detach()
        if rows is not None:
            chains[rows] = drawn.cpu()
        return drawn

    return sample


def plain(fp, fq):
    return -(fp.mean() - fq.mean())


@dataclass
class Run:
    """What a run leaves behind."""

    net: Net
    optimizer: torch.optim.Adam
    chains: Tensor
    rng: Tensor = field(default_factory=lambda: torch.empty(0))
    printed: list[str] = field(default_factory=list)
    plots: list[Tensor] = field(default_factory=list)
    energies: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def state(self) -> list[Tensor]:
        moments = [
            value
            for entry in self.optimizer.state.values()
            for value in entry.values()
            if isinstance(value, Tensor)
        ]
        return [*self.net.state_dict().values(), *moments, self.chains, self.rng, *self.plots]

    def equals(self, other: Run) -> bool:
        pairs = zip(self.state(), other.state(), strict=True)
        return self.printed == other.printed and all(torch.equal(a, b) for a, b in pairs)


def begin() -> Run:
    torch.manual_seed(1)
    net = Net()
    return Run(net, torch.optim.Adam(net.parameters(), lr=1e-3), uniform(CHAINS))


def train(
    run: Run,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    sample: Callable[..., Tensor],
    *,
    steps: int = 20,
    by_class: bool = False,
    joint_weight: float = 0.0,
    joint: tuple[Callable[..., Tensor], Callable[..., Tensor]] | None = None,
    plot_every: int = 7,
    plot: Callable[..., Tensor] | None = None,
) -> Run:
    joint_loss, joint_sample = joint or (loss_fn, sample)
    images, labels = uniform(64), torch.arange(64) % CLASSES
    for step in range(steps):
        x = images[torch.randint(64, (BATCH,))]
        rows = torch.randint(64, (BATCH,))
        x_lab, y_lab = images[rows], labels[rows]
        y_drawn = torch.randint(CLASSES, (BATCH,)) if by_class else None
        x_drawn = sample(run.net, run.chains, y=y_drawn)
        fp_all, fq_all = run.net(x), run.net(x_drawn)
        fp, fq = fp_all.mean(), fq_all.mean()
        total = loss_fn(fp_all, fq_all)
        logits = run.net.classify(x_lab)
        total = total + nn.CrossEntropyLoss()(logits, y_lab)
        if joint_weight:
            drawn = joint_sample(run.net, run.chains, y=y_lab)
            l_p_x_y = joint_loss(run.net(x_lab, y_lab), run.net(drawn, y_lab))
            total = total + joint_weight * l_p_x_y
        run.printed.append(f"{step} {fp:>14.9f} {fq:>14.9f} {fp - fq:>14.9f}")
        run.energies.append((fp_all.detach(), fq_all.detach()))
        assert math.isfinite(total.item())
        assert total.abs().item() < 1e8
        run.optimizer.zero_grad()
        total.backward()
        run.optimizer.step()
        if (step + 1) % plot_every == 0:
            run.plots.append((plot or sample)(run.net, run.chains))
    run.rng = torch.get_rng_state()
    return run


@pytest.mark.parametrize("options", [{}, {"by_class": True}, {"joint_weight": 0.5}], ids=str)
def test_off_it_is_the_same_run(options, tmp_path):
    unguarded = train(begin(), plain, make_sampler(), **options)
    loss_fn, sample = guard(
        None, make_sampler(), beta_star=0, output_scale=OUTPUT_SCALE, log_dir=tmp_path
    )
    assert train(begin(), loss_fn, sample, **options).equals(unguarded)


def test_on_it_is_another_run_and_all_of_it_is_written(tmp_path):
    unguarded = train(begin(), plain, make_sampler())
    g = guard(None, make_sampler(), beta_star=0.5, output_scale=OUTPUT_SCALE, log_dir=tmp_path)
    guarded = train(begin(), *g)
    g.close()
    assert not guarded.equals(unguarded)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(20))
    for row, (fp, fq) in zip(rows, guarded.energies, strict=True):
        assert row["energy_gap"] == pytest.approx(fp.mean().item() - fq.mean().item(), abs=1e-6)
        assert row["sampler/grad_norm"] > 0
    assert list(tmp_path.glob("events.out.tfevents.*"))


@pytest.mark.parametrize("with_labels", [False, True], ids=["f(x)", "f(x, y)"])
def test_gradient_of_every_parameter_is_the_closed_form(with_labels):
    beta_star = 0.5
    run = begin()
    loss_fn, sample = guard(None, make_sampler(), beta_star=beta_star, output_scale=OUTPUT_SCALE)
    x, x_drawn = uniform(BATCH).double(), sample(run.net, []).double()
    run.net.double()
    y = torch.arange(BATCH) % CLASSES if with_labels else None
    f_pos, f_neg = run.net(x, y), run.net(x_drawn, y)
    assert f_pos.shape == ((BATCH, 1) if with_labels else (BATCH,))
    found = torch.autograd.grad(loss_fn(f_pos, f_neg), list(run.net.parameters()))

    # Eq. 8 in plain numbers: every positive competes with all negatives.
    pos, neg = run.net(x, y).flatten(), run.net(x_drawn, y).flatten()
    exponents = [math.exp(beta_star * value) for value in neg.tolist()]
    pulls = [
        sum(exponents) / (sum(exponents) + math.exp(beta_star * value)) for value in pos.tolist()
    ]
    pushes = [sum(pulls) / BATCH * e / sum(exponents) for e in exponents]
    by_hand = -(pos.new_tensor(pulls) / BATCH * pos).sum()
    by_hand = by_hand + (neg.new_tensor(pushes) * neg).sum()
    expected = torch.autograd.grad(by_hand, list(run.net.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_chain_climbs_the_tempered_energy():
    net = begin().net
    _, sample = guard(None, make_sampler(), beta_star=0.5, output_scale=2)
    torch.manual_seed(3)
    drawn = sample(net, [])

    torch.manual_seed(3)
    x = uniform(BATCH)
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(leaf).sum(), leaf)
        x = x + 0.75 * STEP_SIZE * slope + NOISE * torch.randn_like(x)
    torch.testing.assert_close(drawn, x)
    assert net.training
    assert "forward" not in vars(net)


def test_plots_do_not_disturb_the_steps(tmp_path):
    untouched, plotted, paused = tmp_path / "0", tmp_path / "1", tmp_path / "2"

    def rows_of(folder, plot_every, pause):
        g = guard(None, make_sampler(), beta_star=0.5, output_scale=OUTPUT_SCALE, log_dir=folder)
        loss_fn, sample = g

        def plot(*args):
            state = torch.get_rng_state()  # so that the plots leave the same run behind
            if pause:
                with g.paused():
                    drawn = sample(args[0], [])
            else:
                drawn = sample(args[0], [])
            torch.set_rng_state(state)
            return drawn

        run = train(begin(), loss_fn, sample, plot_every=plot_every, plot=plot)
        g.close()
        return run, read_jsonl(folder / "metrics.jsonl")

    without, rows = rows_of(untouched, 100, pause=False)
    for folder, pause in ((plotted, False), (paused, True)):
        run, found = rows_of(folder, 5, pause)
        assert run.printed == without.printed
        assert [row["step"] for row in found] == list(range(20))
        assert [row["loss"] for row in found] == [row["loss"] for row in rows]
    # Paused plots leave no trace at all; the others are pooled with the next step's samples.
    assert found == rows


def test_two_losses_of_one_iteration_are_one_step_once_the_optimizer_is_attached(tmp_path):
    for attach, steps in ((False, 40), (True, 20)):
        folder = tmp_path / str(attach)
        g = guard(None, make_sampler(), beta_star=0.5, output_scale=OUTPUT_SCALE, log_dir=folder)
        run = begin()
        if attach:
            g.attach(optimizer=run.optimizer)
        train(run, *g, joint_weight=0.5)
        g.close()
        rows = read_jsonl(folder / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(steps))


def test_two_terms_with_a_guard_each_train_as_with_one_and_are_watched_apart(tmp_path):
    def guarded(name):
        return guard(
            None,
            make_sampler(),
            beta_star=0.5,
            output_scale=OUTPUT_SCALE,
            log_dir=tmp_path / name,
        )

    one, first, second = guarded("one"), guarded("p_x"), guarded("p_x_y")
    together = train(begin(), *one, joint_weight=0.5)
    loss_fn, sample = first
    apart = train(begin(), loss_fn, sample, joint_weight=0.5, joint=tuple(second))
    assert apart.equals(together)
    for g in (one, first, second):
        g.close()
    rows = {name: read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("p_x", "p_x_y")}
    assert [len(of_term) for of_term in rows.values()] == [20, 20]
    gaps = [fp.mean().item() - fq.mean().item() for fp, fq in apart.energies]
    assert [row["energy_gap"] for row in rows["p_x"]] == pytest.approx(gaps, abs=1e-6)
