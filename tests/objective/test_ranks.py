"""Several processes: after averaging, the gradient is that of one process with the joined batch."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ebmguard.errors import ConfigError
from ebmguard.objective import coefficients, contrastive_loss
from tests.objective import oracles
from tests.objective.oracles import VARIANTS, decimals, energies, relative_error, slopes
from tests.objective.ranks_cases import CASES, WORLD
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank saw, from one start of all processes."""
    return run_ranks("tests.objective.ranks_process", WORLD, tmp_path_factory.mktemp("ranks"))


def _joined(parts, variant):
    """A0 A1 .. B0 B1 ..: each rank halves its own positives."""
    if variant != "true":
        return torch.cat(parts, -1)
    halves = [(f[..., : f.shape[-1] // 2], f[..., f.shape[-1] // 2 :]) for f in parts]
    return torch.cat([a for a, _ in halves] + [b for _, b in halves], -1)


@pytest.mark.parametrize("name", CASES)
def test_mean_of_the_ranks_gradients_is_the_joined_batch(ranks, name):
    case = CASES[name]
    seen = [rank[name] for rank in ranks[: len(case.sizes)]]
    given = case.energies()
    pos = _joined([f for f, _ in given], case.variant).requires_grad_()
    neg = torch.cat([f for _, f in given], -1).requires_grad_()
    reference = contrastive_loss(pos, neg, case.beta_star, variant=case.variant)
    expected = slopes(reference, pos, neg)
    tolerance: dict[str, Any] = {"rtol": 1e-10, "atol": 0.0}
    if case.dtype == torch.float32:
        tolerance["rtol"] = 2e-5
    for key, share in (("sides", 1 / len(seen)), ("closed", 1.0)):
        # A sample's slope reaches the averaged gradient divided by the number of ranks.
        found_pos = _joined([one[key][0] * share for one in seen], case.variant)
        found_neg = torch.cat([one[key][1] * share for one in seen], -1)
        torch.testing.assert_close(found_pos, expected[0], **tolerance)
        torch.testing.assert_close(found_neg, expected[1], **tolerance)
    for one in seen:
        assert torch.equal(one["loss"], seen[0]["loss"])
        torch.testing.assert_close(one["loss"], reference.detach(), **tolerance)
    if "anywhere" in name:
        assert reference == 0
        assert not any(side.any() for side in expected)
    else:
        assert all(side.any() for side in expected)


@pytest.mark.parametrize("name", [name for name in CASES if "three" in name])
def test_joined_batch_is_the_textbook_form(ranks, name):
    case = CASES[name]
    given = case.energies()
    pos = _joined([f for f, _ in given], case.variant)
    neg = torch.cat([f for _, f in given])
    expected = oracles.gradient(decimals(pos), decimals(neg), Decimal(0.7), case.variant)  # noqa: RUF032
    found = [rank[name]["closed"] for rank in ranks]
    found_pos = _joined([one[0] for one in found], case.variant)
    assert relative_error(found_pos, expected[0]) < 1e-12
    assert relative_error(torch.cat([one[1] for one in found]), expected[1]) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_two_short_messages_cross_the_network(ranks, name):
    case = CASES[name]
    models = len(case.betas) if case.ensemble else 1
    sums = 9 if case.variant == "true" else 6
    sent = ranks[0][name]["messages"]
    assert sent == [("all_gather", 2 * models), ("all_reduce", sums * models)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_distributed_data_parallel_trains_as_one_process(ranks, variant):
    seen = [rank["ddp"][variant] for rank in ranks[:2]]
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1).double()
    x_pos = _joined([one["x_pos"].T for one in seen], variant).T
    x_neg = torch.cat([one["x_neg"] for one in seen])
    loss = contrastive_loss(net(x_pos).squeeze(1), net(x_neg).squeeze(1), 0.7, variant=variant)
    loss.backward()
    for one in seen:
        for found, parameter in zip(one["gradient"], net.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(found, parameter.grad, rtol=1e-10, atol=1e-14)


@pytest.fixture
def world_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_world_of_one_is_no_world(world_of_one):
    pos, neg = energies(6, 4)
    for variant in VARIANTS:
        for beta in (0.7, -0.7, 0.0, torch.tensor(0.7), torch.tensor(0.0), [0.5, 0.0, 1.0]):
            alone = contrastive_loss(pos, neg, beta, variant=variant)
            found = contrastive_loss(pos, neg, beta, variant=variant, process_group=world_of_one)
            torch.testing.assert_close(found, alone, rtol=1e-12, atol=0)
            for a, b in zip(slopes(found, pos, neg), slopes(alone, pos, neg), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_first_order_only_across_ranks(world_of_one):
    pos, neg = energies(6, 4)
    loss = contrastive_loss(pos, neg, 0.7, process_group=world_of_one)
    first = torch.autograd.grad(loss, (pos, neg), create_graph=True)
    assert not any(side.requires_grad for side in first)


def test_groups_across_ranks_are_refused_before_anything_is_sent(world_of_one, monkeypatch):
    def unexpected(*args, **kwargs):
        raise AssertionError("a message was sent")

    monkeypatch.setattr(dist, "all_gather", unexpected)
    monkeypatch.setattr(dist, "all_reduce", unexpected)
    pos, neg = energies(2, 2)
    groups = (torch.tensor([0, 1]), torch.tensor([1, 0]))
    for function in (contrastive_loss, coefficients):
        with pytest.raises(ConfigError, match="groups across ranks are not defined"):
            function(pos, neg, 0.7, groups=groups, process_group=world_of_one)
