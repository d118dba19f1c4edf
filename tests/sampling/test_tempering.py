"""The override of one module's forward: exact while it lasts, and gone without a trace."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

from ebmguard.errors import SamplerError
from ebmguard.sampling import SamplerUpdate, Substeps, Tempering, find_module, other_networks, scale
from tests.parts import Bowl, Energy, climb, gradient_at, langevin

X = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=torch.float64)


def test_another_method_than_forward():
    f, x = Energy(), X.float()
    plain, column = f(x), f.classify(x)
    bound, tempering = f.classify, Tempering(f, energy="classify")
    with tempering.active(0.25):
        assert torch.equal(f.classify(x), 0.25 * column)
        assert torch.equal(f(x), 0.25 * plain)  # which calls it
        assert "forward" not in vars(f)
    assert tempering.reached
    assert torch.equal(f(x), plain)
    assert not vars(f).keys() & {"classify", "forward"}
    with tempering.active(0.25):
        kept = f.classify
    assert torch.equal(kept(x), column)  # by a sampler that goes on with it after its call
    # What was bound before is bound anew.
    assert torch.equal(tempering.run(lambda method: method(x), [bound], {}, 0.25), 0.25 * column)


# -- the factor ------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1e-10, 0.3])
def test_factor_is_exact_in_float64(beta):
    f = Energy(dtype=torch.float64)
    with Tempering(f).active(1 - beta):
        tempered = f(X)
    # What counts is the small difference, of which float32 would have no digit at 1e-10.
    taken = (f(X) - tempered) / f(X)
    torch.testing.assert_close(taken, torch.full_like(taken, beta), rtol=0, atol=4e-16)
    torch.testing.assert_close(tempered, (1 - beta) * f(X), rtol=1e-15, atol=0)


def test_factors_of_members_and_of_one():
    factor = torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64)
    y = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(3, 2)
    expected = [[0.5, 1.0], [3.0, 4.0], [10.0, 12.0]]
    assert scale(y, factor).tolist() == expected
    assert scale(y, 1.0) is y
    f = Bowl()
    f.forward = lambda x: y  # type: ignore[method-assign]
    with Tempering(f).active(1.0):
        assert f(X) is y
    with Tempering(f).active(factor):
        assert f(X).tolist() == expected
    with pytest.raises(RuntimeError, match="must match"), Tempering(f).active(factor[:2]):
        f(X)


def test_later_changes_of_a_given_tensor_do_not_reach_the_graph():
    f, factor = Bowl(), torch.tensor(0.5)
    x = X.clone().requires_grad_()
    tempering = Tempering(f)
    with tempering.active(factor):
        first = f(x)
    factor.fill_(7.0)
    with tempering.active(0.25):
        second = f(x)
    (first.sum() + second.sum()).backward()
    torch.testing.assert_close(x.grad, -0.75 * X, rtol=1e-12, atol=0)


@pytest.mark.parametrize("output", [(1, 2), None])
def test_only_tensors_are_tempered(output):
    with pytest.raises(SamplerError, match=rf"returned a {type(output).__name__}.*g\.temper"):
        scale(output, 0.5)
    with pytest.raises(SamplerError):
        scale(output, 1.0)  # the same at every beta


# -- coming and going ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "own"),
    [(ValueError, None), (KeyboardInterrupt, lambda x: -x.square().sum(1))],  # twice as steep
)
def test_restored_after_an_exception(error, own):
    f, plain = Bowl(), -X if own is None else -2 * X
    if own is not None:
        f.forward = own  # type: ignore[method-assign]
    before = dict(vars(f))

    def inside():
        assert torch.equal(gradient_at(f, X), 0.5 * plain)
        raise error

    with pytest.raises(error):
        Tempering(f).run(inside, (), {}, 0.5)
    assert vars(f) == before
    assert list(vars(f)) == list(before)
    assert torch.equal(gradient_at(f, X), plain)


def test_module_is_as_before_inside_and_after():
    f = Energy(nn.BatchNorm1d(8))
    seen = list[torch.Tensor]()
    f.register_forward_hook(lambda module, args, output: seen.append(output))
    keys, parameters, x = list(f.state_dict()), list(f.parameters()), X.float()
    with Tempering(f).active(0.5):
        f.eval()
        assert list(f.state_dict()) == keys
        assert all(a is b for a, b in zip(f.parameters(), parameters, strict=True))
        assert next(iter(f.modules())) is f
        tempered = f(x)
        modes = {module.training for module in f.modules()}
        f.train()
    assert modes == {False}
    assert all(module.training for module in f.modules())
    torch.testing.assert_close(tempered, 0.5 * seen[0])  # tempered behind its hooks
    f.eval()
    torch.testing.assert_close(tempered, 0.5 * f(x))


def test_other_guard_is_refused_and_the_first_one_goes_on():
    f = Bowl()
    with Tempering(f).active(0.5):
        with pytest.raises(SamplerError, match="Two guards"), Tempering(f).active(0.5):
            pass
        assert torch.allclose(gradient_at(f, X), -0.5 * X)
    assert "forward" not in vars(f)


def test_reached_and_norm_of_the_drift_to_twelve_digits():
    f, other = Bowl(), Bowl()
    tempering = Tempering(f)
    reached = []
    for call in (other, lambda x: f.forward(x), lambda x: x, f, other.forward):
        with tempering.active(1 - 2.5e-5):
            gradient_at(call, X)
        reached.append(tempering.reached)
        expected = (1 - 2.5e-5) * X.norm(dim=1) if reached[-1] else None
        torch.testing.assert_close(tempering.gradients.norm, expected, rtol=1e-12, atol=0)
    assert reached == [False, True, False, True, False]


def test_run_binds_forward_anew_wherever_it_is_given():
    f, other = Bowl(), Bowl()
    run = Tempering(f).run

    def call(a, b, *, c, d):
        return [gradient_at(each, X)[0, 0].item() for each in (a, b, c, d)]

    plain, half = -3.0, -1.5
    arguments = {"c": f.forward, "d": other}
    assert run(call, (f.forward, other.forward), arguments, 0.5) == [half, plain, half, plain]
    assert run(lambda x: x, (X,), {}, 0.5) is X


# -- finding it ------------------------------------------------------------------------------


def sampler(*args, **kwargs):
    raise AssertionError("only looked at")


class Owner(Bowl):
    def draw(self):
        raise AssertionError("only looked at")


F, OTHER, OWNER = Bowl(), Bowl(), Owner()


@pytest.mark.parametrize(
    ("call", "args", "kwargs", "found"),
    [
        (sampler, (F,), {}, F),
        (sampler, (F, F), {"again": F}, F),
        (sampler, (), {"f": F}, F),
        (sampler, (F.forward,), {}, F),
        (sampler, (F.forward, F), {}, F),
        (OWNER.draw, (), {}, OWNER),
        (functools.partial(sampler, f=F), (), {"f": OTHER}, OTHER),  # replaces what was bound
    ],
)
def test_found(call, args, kwargs, found):
    assert find_module(call, args, kwargs) is found
    assert find_module(functools.partial(call, *args, **kwargs), (), {}) is found


@pytest.mark.parametrize(
    ("call", "args", "words"),
    [
        (OWNER.draw, (F,), r"2 modules .*\(Bowl, Owner\)"),
        *(
            (sampler, args, r"No energy module.*guard\(\.\.\., model=f\)")
            for args in [(), (1, "x", len, X), ([F],)]
        ),
    ],
)
def test_not_found(call, args, words):
    with pytest.raises(SamplerError, match=words):
        find_module(call, args, {})


def test_networks_beside_the_energy_are_named():
    f, other = Energy(), Bowl()

    def bound(*args, **kwargs):
        return other

    for call, args, names in (
        (sampler, (f, other), ["an argument"]),
        (bound, (f,), ["`other`"]),
        (sampler, (f, f.net, nn.Sequential(f)), []),  # its parts, and what it is a part of
    ):
        assert other_networks(f, call, args, {}) == names


# -- the gradients that pass by ---------------------------------------------------------------


def _through_numpy(g):
    g.numpy()[:] = 7.0


OVERWRITES = {
    "nothing": lambda g: None,
    "zero_": lambda g: g.zero_(),
    "mul_ of detach()": lambda g: g.detach().mul_(3.0),
    "numpy": _through_numpy,
    "set_ of another": lambda g: g.set_(torch.full_like(g, 7.0)),
}


@pytest.mark.parametrize("overwrite", OVERWRITES.values(), ids=OVERWRITES)
@pytest.mark.parametrize(
    ("way", "steps", "shape"),
    [("grad", 1, (2,)), ("backward", 3, (2, 2)), ("create_graph", 1, (2, 1, 2, 1))],
)
def test_norms_are_those_of_the_gradient_before_samplers_overwrite_it(overwrite, way, steps, shape):
    f, x = Bowl(), torch.linspace(-3, 4, math.prod(shape), dtype=torch.float64).reshape(shape)
    f.forward = lambda x: -0.5 * x.square().reshape(len(x), -1).sum(1)  # type: ignore[method-assign]

    def sample(f):
        for k in range(1, steps + 1):
            point = (k * x).requires_grad_()
            if way == "backward":
                f(point).sum().backward()
                gradient = point.grad
            else:
                create_graph = way == "create_graph"
                (gradient,) = torch.autograd.grad(f(point).sum(), point, create_graph=create_graph)
            assert gradient is not None
            with torch.no_grad():
                overwrite(gradient.detach() if way == "create_graph" else gradient)

    tempering = Tempering(f)
    tempering.run(sample, (f,), {}, 0.25)
    expected = 0.25 * steps * x.reshape(len(x), -1).norm(dim=1)
    torch.testing.assert_close(tempering.gradients.norm, expected, rtol=1e-12, atol=0)
    assert tempering.gradients.norm is not None
    assert not tempering.gradients.norm.requires_grad
    assert tempering.evaluations == steps
    assert tempering.gradients.entries == math.prod(shape[1:])


def test_members_have_norms_of_their_own_or_none():
    f, factor = Bowl(), torch.tensor([[0.5], [2.0], [1.0]], dtype=torch.float64)
    f.forward = lambda x: -0.5 * x.square().sum(-1).expand(3, -1)  # type: ignore[method-assign]
    x = torch.randn(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tempering = Tempering(f, batch_dim=1)
    with tempering.active(factor):
        gradient_at(f, x)
        torch.testing.assert_close(
            tempering.gradients.norm, factor * x.norm(dim=-1), rtol=1e-12, atol=0
        )
        gradient_at(f, x[0])
        assert tempering.gradients.norm is None


@pytest.mark.parametrize("times", [1, 4])
def test_sharpness_is_step_times_curvature_on_a_quadratic(times: int) -> None:
    f, x = Bowl(), torch.randn(64, 3, dtype=torch.float64)
    torch.nn.init.constant_(f.height, 1.7)
    substeps = Substeps(SamplerUpdate([[0.1, 0.0]], []), times) if times > 1 else None
    tempering = Tempering(f)
    tempering.run(climb, (f, x), {}, 1.0, None, substeps)
    assert tempering.gradients.products is not None
    same, whole = tempering.gradients.products.tolist()
    assert 1 - same / whole == pytest.approx(0.1 * 1.7 / times, abs=1e-12)


def test_sharpness_follows_the_exact_hessian_along_the_drift() -> None:
    """Of a smooth network: -a g'Hg / g'g, to the step's own change of H."""
    torch.manual_seed(0)
    f, x, size = Energy(shape=(3,)).double(), torch.randn(64, 3, dtype=torch.float64), 1e-3
    for p in f.parameters():
        p.data *= 2
    tempering = Tempering(f)
    tempering.run(lambda f, x: langevin(f, x, 2, size, 0.0), (f, x), {}, 1.0)
    assert tempering.gradients.products is not None
    same, whole = tempering.gradients.products.tolist()
    g = gradient_at(f, x)
    h = torch.stack([torch.autograd.functional.hessian(lambda z: f(z[None])[0], z) for z in x])
    right = -size * torch.einsum("bi,bij,bj->", g, h, g) / g.square().sum()
    assert 1 - same / whole == pytest.approx(float(right), rel=0.02)
