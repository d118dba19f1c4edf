"""Steps that do not end are said, losses that cannot train leave no trace, nothing breaks."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ebmguard import errors, guard
from tests.parts import Energy, Memory, difference, unit_langevin

# -- a trainer -----------------------------------------------------------------------------------


class Run:
    """A network, and a guard that was told ``optimizer``."""

    def __init__(self, optimizer: Optimizer | None = None, f: nn.Module | None = None, **told: Any):
        self.f = f or Energy()
        self.told: Any = Adam(self.f.parameters(), lr=1e-2) if optimizer is None else optimizer
        self.other: Any = None  # which steps instead, from some step on
        self.memory = Memory()
        options = {"beta_star": 0.5, "output_scale": 1.0, "sinks": [self.memory], "flush_every": 1}
        options |= {"model": self.f, "optimizer": self.told}
        self.g = guard(None, unit_langevin, **{**options, **told})

    def loss(self, scale: float = 1.0) -> Tensor:
        x = torch.randn(8, 2) * scale
        value: Tensor = self.g.loss_fn(self.f(x), self.f(self.g.sampler(self.f, torch.randn(8, 2))))
        return value

    def backward(self, scale: float = 1.0) -> None:
        self.f.zero_grad()
        self.loss(scale).backward()

    def each(self) -> list[tuple[Tensor, Tensor]]:
        """Every parameter, and its gradient."""
        return [(p, p.grad) for p in self.f.parameters() if p.grad is not None]

    @property
    def is_finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.f.parameters())


@pytest.fixture
def said(caplog) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "ebmguard"):
        yield lambda: [text for x in caplog.records if "without a step" in (text := x.getMessage())]


# -- steps that do not end -----------------------------------------------------------------------


class Wrapper(SGD):
    """Of an inner optimizer; nobody calls its own step."""

    def __init__(self, f: nn.Module) -> None:
        super().__init__(f.parameters(), lr=0.1)
        self.base_optimizer = SGD(f.parameters(), lr=0.01)


def two_step_sam(run: Run) -> None:
    run.backward()
    before = [p.detach().clone() for p in run.f.parameters()]
    with torch.no_grad():
        for p, gradient in run.each():
            p.add_(gradient, alpha=0.05)
    run.backward()
    with torch.no_grad():
        for p, old in zip(run.f.parameters(), before, strict=True):
            p.copy_(old)
    run.told.base_optimizer.step()


def optimizer_made_anew(run: Run) -> None:
    run.backward()
    if run.g.step == 3 and run.other is None:
        run.other = SGD(run.f.parameters(), lr=0.01)
    (run.other or run.told).step()


def updates_by_itself(run: Run) -> None:
    run.backward()
    for p, gradient in run.each():
        p.data.sub_(0.01 * gradient)  # which no version of p tells


def accumulates(run: Run) -> None:
    run.f.zero_grad()
    for _ in range(2):
        run.loss().backward()
    with torch.no_grad():
        for p, gradient in run.each():
            p.sub_(0.01 * gradient)


def optimizer_of_every_step(run: Run) -> None:
    run.backward()
    SGD(run.f.parameters(), lr=0.01).step()


def model_made_anew(run: Run) -> None:
    if run.g.step == 3 and run.other is None:
        run.f = copy.deepcopy(run.f)
        run.other = SGD(run.f.parameters(), lr=0.01)
    run.backward()
    (run.other or run.told).step()


UNENDED: dict[str, tuple[Callable[[Run], None], str]] = {
    "two-step SAM": (two_step_sam, "optimizer=optimizer.base_optimizer"),
    "an optimizer made anew": (optimizer_made_anew, "SGD(lr=0.01), has stepped"),
    "a wrapper that updates by itself": (updates_by_itself, "leave it out"),
    "by itself, two losses a step": (accumulates, "leave it out"),
    "an optimizer of every step": (optimizer_of_every_step, "leave it out"),
    "a model made anew": (model_made_anew, "leave it out"),
}


def told_for(name: str, **told: Any) -> Run:
    f = Energy()
    if name == "a model made anew":
        told |= {"model": None}
    return Run(Wrapper(f) if "SAM" in name else None, f, **told)


@pytest.mark.parametrize("name", UNENDED)
def test_steps_that_do_not_end_are_said_and_rows_go_on(name, said):
    each, fix = UNENDED[name]
    run = told_for(name)
    for _ in range(40):
        each(run)
    run.g.close()
    (message,) = said()
    assert type(run.told).__name__ in message
    assert fix in message
    assert run.g.step >= 24
    assert len(run.memory.rows) >= 24
    assert max(len(run.g._loop.rows._open.numbers), 1) < 8  # nothing piles up


@pytest.mark.parametrize("name", ["two-step SAM", "an optimizer made anew"])
def test_an_optimizer_that_steps_instead_is_followed(name, said):
    run = told_for(name)
    for _ in range(20):
        UNENDED[name][0](run)
    step = run.g.step
    assert run.g.trainer.optimizer is (run.other or run.told.base_optimizer)
    run.backward(math.nan)
    run.g.trainer.optimizer.step()
    assert run.is_finite
    assert run.g.step == step + 1


REFUSED = [(name, action) for name in UNENDED for action in ("raise", "rollback")]
REFUSED.remove(("a model made anew", "rollback"))  # which needs the model, told by name


@pytest.mark.parametrize(("name", "action"), REFUSED)
def test_an_action_that_waits_for_such_a_step_is_refused(name, action, said):
    run = told_for(name, action=action)
    each = UNENDED[name][0]

    def train() -> None:
        for _ in range(20):
            each(run)

    with pytest.raises(errors.ConfigError, match="losses without a step of the attached") as error:
        train()
    assert f"action={action!r}" in str(error.value)
    assert run.is_finite
    assert not said()


@pytest.mark.parametrize("action", ["warn", "raise", "rollback"])
@pytest.mark.parametrize("name", ["two-step SAM", "a wrapper that updates by itself"])
def test_at_beta_star_zero_it_is_only_said_and_nothing_changes(name, action, said):
    found = []
    for is_guarded in (True, False):
        torch.manual_seed(1)
        run = told_for(name, action=action, beta_star=0.0)
        if not is_guarded:
            plain: Any = difference
            run.g.loss_fn, run.g.sampler = plain, unit_langevin
        for _ in range(30):
            UNENDED[name][0](run)
        found.append([p.detach().clone() for p in run.f.parameters()])
    assert len(said()) == 1
    assert all(map(torch.equal, *found))


# Trainers whose steps end, whatever they do to the parameters in between.


class Sharp(SGD):
    """SAM whose step() is called."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Normed(nn.Linear):
    """Weights made to length 1 in every forward pass, as in EDM2."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(self.weight / (1e-4 + self.weight.norm(dim=1, keepdim=True)))
        return super().forward(x)


def sam_with_a_step(run: Run) -> None:
    for _ in range(5):
        run.backward()
        with torch.no_grad():
            for p, gradient in run.each():
                p.add_(gradient, alpha=0.05)
    run.told.step()


def sam_of_micro_batches(run: Run) -> None:
    total = [torch.zeros_like(p) for p in run.f.parameters()]
    for _ in range(16):
        run.backward()
        moves = [0.05 * gradient for _, gradient in run.each()]
        for sign in (1, -1):
            with torch.no_grad():
                for p, move in zip(run.f.parameters(), moves, strict=True):
                    p.add_(move, alpha=sign)
            if sign > 0:
                run.backward()
        total = [x + gradient for x, (_, gradient) in zip(total, run.each(), strict=True)]
    for p, x in zip(run.f.parameters(), total, strict=True):
        p.grad = x
    run.told.step()


def accumulation(run: Run) -> None:
    for _ in range(32):
        run.loss().backward()
    run.told.step()
    run.told.zero_grad()


def closures(run: Run) -> None:
    def closure() -> float:
        run.backward()
        return 1.0

    run.told.step(closure)


def evaluation_with_gradients(run: Run) -> None:
    for _ in range(50):
        run.loss()
    run.backward()
    run.told.step()


ENDED: dict[str, tuple[Callable[[Run], None], Any]] = {
    "SAM with a step": (sam_with_a_step, lambda f: Sharp(f.parameters(), lr=0.01)),
    "SAM of micro-batches": (sam_of_micro_batches, None),
    "accumulation": (accumulation, None),
    "weights normalised in the forward pass": (accumulation, None),
    "L-BFGS": (closures, lambda f: torch.optim.LBFGS(f.parameters(), max_iter=30, lr=1e-3)),
    "an evaluation with gradients": (evaluation_with_gradients, None),
}


@pytest.mark.parametrize("action", ["warn", "raise"])
@pytest.mark.parametrize("name", ENDED)
def test_right_trainers_are_left_in_peace(name, action, said):
    each, optimizer = ENDED[name]
    f = Energy()
    if "norm" in name:
        f.net[0] = Normed(2, 8)
    run = Run(optimizer(f) if optimizer else SGD(f.parameters(), lr=1e-3), f, action=action)
    for _ in range(3):
        each(run)
    assert run.g.step == 3
    assert not said()


# -- losses that are none ------------------------------------------------------------------------


def far(run: Run, grad: Any) -> None:
    with grad():
        run.g.loss_fn(run.f(torch.randn(8, 2) * 1e4), run.f(torch.randn(8, 2)))


def detached(run: Run) -> None:
    run.g.loss_fn(run.f(torch.randn(8, 2) * 1e4).detach(), run.f(torch.randn(8, 2)).detach())


def not_finite(run: Run) -> None:
    x = torch.full((4,), torch.nan)
    run.g.loss_fn(x, x)


def reweighted(run: Run) -> None:
    with torch.no_grad():
        pos, neg = run.f(torch.randn(8, 2) * 1e4), run.f(torch.randn(8, 2))
        assert all(x is y for x, y in zip(run.g.reweight(pos, neg), (pos, neg), strict=True))


VALIDATIONS: dict[str, tuple[Callable[[Run], None], dict[str, Any]]] = {
    "no_grad": (lambda run: far(run, torch.no_grad), {}),
    "inference_mode": (lambda run: far(run, torch.inference_mode), {}),
    "no_grad, beta* = 0": (lambda run: far(run, torch.no_grad), {"beta_star": 0.0}),
    "energies that are detached": (detached, {}),
    "reweighted": (reweighted, {}),
    "not finite": (not_finite, {}),
}


@pytest.mark.parametrize("action", ["warn", "raise", "rollback"])
@pytest.mark.parametrize("name", VALIDATIONS)
def test_a_validation_leaves_no_trace(name, action):
    each, options = VALIDATIONS[name]
    runs = []
    for has_validation in (True, False):
        torch.manual_seed(0)
        run = Run(action=action, **options)
        for step in range(30):
            run.backward()
            run.told.step()
            if has_validation and step % 3 == 0:
                state = torch.get_rng_state()
                each(run)
                torch.set_rng_state(state)
        run.g.close()
        runs.append(run)
    assert not runs[0].g.alerts
    assert not runs[0].g.rollbacks
    ours, theirs = ([repr(row) for row in run.memory.rows] for run in runs)
    assert ours == theirs
    assert len(ours) == 30


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("loss_fn", [None, lambda pos, neg: 2 * (neg.mean() - pos.mean())])
def test_a_validation_comes_first_and_has_the_loss_of_a_training_step(grad, loss_fn):
    f = Energy()
    g = guard(
        loss_fn, unit_langevin, optimizer=SGD(f.parameters(), lr=0.1), beta_star=0.5, output_scale=1
    )
    x, y = torch.randn(8, 2), torch.randn(8, 2)
    with grad():
        value = g.loss_fn(f(x), f(y))  # before any sampler call
    assert g.last == {}
    g.sampler(f, y)
    torch.testing.assert_close(value, g.loss_fn(f(x), f(y)).detach())


def test_a_waiting_error_does_not_withhold_a_validations_loss():
    run = Run(action="raise")
    run.g.sampler(run.f, torch.randn(8, 2))
    pos = run.f(torch.randn(8, 2))
    assert run.g.loss_fn(pos * math.nan, pos).isnan()
    with torch.no_grad():
        assert run.g.loss_fn(torch.ones(4), torch.zeros(4)) != 0


def test_energies_that_never_have_a_gradient_are_recorded():
    run = Run()
    run.g.sampler(run.f, torch.randn(8, 2))
    detached(run)
    assert "energy_gap" in run.g.last


def test_a_training_without_gradients_is_told_how_to_be_recorded(caplog):
    run = Run()
    for step in range(30):
        for p in run.f.parameters():
            p.data.mul_(0.99)
        far(run, torch.no_grad)
        assert len(caplog.records) == (step >= 10), step
    assert "torch.enable_grad()" in caplog.text
    assert not run.memory.rows


def test_validations_before_training_are_not_mistaken_for_it(caplog):
    run = Run()
    for epoch in range(5):  # of another loss
        for _ in range(30):
            far(run, torch.no_grad)
        next(run.f.parameters()).data.add_(epoch)
    assert not caplog.records


# -- what belongs to others ----------------------------------------------------------------------

FUSED: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda ps: Adam(ps, lr=0.01, fused=True),
    "AdamW": lambda ps: AdamW(ps, lr=0.01, fused=True),
    "SGD": lambda ps: SGD(ps, lr=0.01, momentum=0.9, fused=True),
    "Adagrad": lambda ps: Adagrad(ps, lr=0.01, fused=True),
    "not fused": lambda ps: Adam(ps, lr=0.01),
}


@pytest.mark.parametrize("beta_star", [0.0, 0.5])
@pytest.mark.parametrize("name", FUSED)
def test_a_scaler_that_was_not_told_works_as_without_a_guard(name, beta_star):
    f, twin = Energy(), None
    twin = copy.deepcopy(f)
    g = None
    for net, is_guarded in ((f, True), (twin, False)):
        torch.manual_seed(0)
        opt, scaler = FUSED[name](net.parameters()), torch.amp.GradScaler("cpu")
        if is_guarded:
            g = guard(None, None, optimizer=opt, beta_star=beta_star)
        for step in range(4):
            opt.zero_grad()
            x = torch.randn(8, 2) * (math.inf if step == 1 else 1)
            assert g is not None
            loss = (
                g.loss_fn(net(x), net(x + 1)) if is_guarded else net(x).mean() - net(x + 1).mean()
            )
            # The same gradients for both, since at beta* > 0 the losses differ.
            scaler.scale(loss * 0 + net(x).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            assert not {"found_inf", "grad_scale"} & vars(opt).keys()
    assert all(map(torch.equal, f.parameters(), twin.parameters()))
    assert all(bool(p.isfinite().all()) for p in f.parameters())


def scaled() -> tuple[Any, Any, Any]:
    f, scaler = Energy(), torch.amp.GradScaler("cpu")
    opt = SGD(f.parameters(), lr=0.1)
    return scaler, opt, f


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_scaler_is_its_own(copied):
    scaler, opt, _ = scaled()
    guard(None, None, optimizer=opt, scaler=scaler, beta_star=0.5)
    twin = copied(scaler)
    assert twin.step.__self__ is twin


def test_another_librarys_step_of_a_scaler_is_put_back():
    scaler, opt, _ = scaled()
    steps: list[Optimizer] = []
    scaler.step = own = lambda optimizer: steps.append(optimizer)
    g = guard(None, None, optimizer=opt, scaler=scaler, beta_star=0.5)
    scaler.step(opt)
    assert steps == [opt]
    hooks: Any = g._loop.hooks
    hooks.remove()
    assert scaler.step is own


def test_a_step_of_a_removed_hook_that_others_kept_tells_nothing():
    scaler, opt, f = scaled()
    g = guard(None, None, optimizer=opt, scaler=scaler, beta_star=0.5)
    kept = scaler.step
    scaler.step = lambda optimizer: kept(optimizer)  # another library's, around it
    g.attach(step_size=1.0)  # hooks are made anew
    scaler.scale(f(torch.full((1, 2), math.inf)).sum()).backward()
    scaler.step(opt)  # left out
    assert g.step == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_raised_leaves_nothing_behind(fused):
    p = nn.Parameter(torch.ones(2))
    opt = Adam([p], lr=0.1, fused=fused)
    guard(None, None, optimizer=opt, beta_star=0.5)

    def fail(*_: Any) -> None:
        raise OSError("no device")

    handle = opt.register_step_pre_hook(fail)
    p.grad = torch.full((2,), math.nan)
    with pytest.raises(OSError, match="no device"):
        opt.step()
    handle.remove()
    p.grad = good = torch.ones(2)
    opt.step()
    assert p.grad is good
    assert bool(p.isfinite().all())
    assert bool((p != 1).all())
    assert "found_inf" not in vars(opt)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_calls_its_parents_is_one_step(fused):
    p = nn.Parameter(torch.ones(2))
    SGD([p], lr=0.1)  # whose class has hooks from now on
    opt, memory = Sharp([p], lr=0.1, fused=fused), Memory()
    g = guard(None, None, optimizer=opt, beta_star=0.5, sinks=[memory], flush_every=1)
    for value in (1.0, math.nan, 1.0):
        p.grad = given = torch.full((2,), value)
        opt.step()
        assert p.grad is given
    assert g.step == 3
    assert memory.column("nonfinite/gradients") == [0.0, 1.0, 0.0]
    torch.testing.assert_close(p.detach(), torch.full((2,), 0.8))


# -- optimizers without hooks --------------------------------------------------------------------


class Lookahead(Optimizer):
    """Without ``super().__init__()``, as in the wild; accelerate's prepared ones are so, too."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.defaults = optimizer.defaults


class Prepared:
    """No Optimizer at all, as apex's and DeepSpeed's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer


class Alone(Optimizer):
    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups = optimizer.param_groups


@pytest.mark.parametrize("action", ["warn", "rollback"])
@pytest.mark.parametrize(
    ("wrapper", "fix"),
    [
        (Lookahead, "optimizer=wrapper.optimizer"),
        (Prepared, "optimizer=wrapper.inner"),
        (Alone, "Optimizer.__init__"),
    ],
)
def test_an_optimizer_without_hooks_is_refused_with_the_inner_one(wrapper, fix, action):
    inner = SGD(Energy().parameters(), lr=0.1)
    with pytest.raises(errors.ConfigError, match=wrapper.__name__) as error:
        guard(None, unit_langevin, optimizer=wrapper(inner), beta_star=0.5, action=action)
    assert fix in str(error.value)
    assert not inner._optimizer_step_pre_hooks
