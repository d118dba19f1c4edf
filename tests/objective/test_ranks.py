"""Several processes: after averaging, the gradient is that of one process with the joined batch."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ebmguard.objective import contrastive_loss
from tests.objective import oracles
from tests.objective.oracles import VARIANTS, decimals, energies, relative_error, slopes
from tests.objective.ranks_cases import CASES, WORLD
from tests.ranks import ranks_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank saw, from one start of all processes."""
    return ranks_of("tests.objective.ranks_process", WORLD, tmp_path_factory)[1]


def _joined(parts, variant):
    """A0 A1 .. B0 B1 ..: each rank halves its own positives."""
    if variant != "true":
        return torch.cat(parts, -1)
    halves = [(f[..., : f.shape[-1] // 2], f[..., f.shape[-1] // 2 :]) for f in parts]
    return torch.cat([a for a, _ in halves] + [b for _, b in halves], -1)


def _pair(parts, variant):
    """Positives and negatives of all ranks, and output scales; None where there are none."""
    if parts[0] is None:
        return None
    pos, neg, *scale = zip(*parts, strict=True)
    return _joined(pos, variant), torch.cat(neg, -1), *map(torch.cat, scale)


@pytest.mark.parametrize("name", CASES)
def test_mean_of_the_ranks_gradients_is_the_joined_batch(ranks, name):
    case = CASES[name]
    seen = [rank[name] for rank in ranks[: len(case.sizes)]]
    pos, neg = (f.requires_grad_() for f in _pair(case.energies(), case.variant))
    reference = contrastive_loss(
        pos,
        neg,
        case.beta_star,
        variant=case.variant,
        groups=_pair(case.groups(), case.variant),
        log_q=_pair(case.log_q(), case.variant),
    )
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
    found = [rank[name]["closed"] for rank in ranks[: len(case.sizes)]]
    found_pos = _joined([one[0] for one in found], case.variant)
    assert relative_error(found_pos, expected[0]) < 1e-12
    assert relative_error(torch.cat([one[1] for one in found]), expected[1]) < 1e-12


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.labels])
def test_two_short_messages_cross_the_network(ranks, name):
    case = CASES[name]
    models = len(case.betas) if case.ensemble else 1
    of_negatives = 2 if case.proposal is None else 3
    sums = 9 if case.variant == "true" else 6
    sent = ranks[0][name]["messages"]
    assert sent == [("all_gather", of_negatives * models), ("all_reduce", sums * models)]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.labels])
def test_with_classes_sizes_energies_and_labels_do(ranks, name):
    case = CASES[name]
    models = len(case.betas) if case.ensemble else 1
    most = sum(max(sizes) for sizes in zip(*case.sizes, strict=True))
    numbers = models * most * (1 if case.proposal is None else 2)
    if case.scales:
        numbers += max(n for n, _ in case.sizes)
    sent = ranks[0][name]["messages"]
    assert sent == [("all_gather", 2), ("all_gather", numbers), ("all_gather", most)]


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


LABELS = torch.tensor([0, 1, 1, 2, 0, 3]), torch.tensor([1, 0, 0, 2])
PROPOSAL = torch.linspace(-1, 1, 6).double(), torch.linspace(0, 2, 4).double()


@pytest.mark.parametrize("options", [{}, {"groups": LABELS}, {"log_q": PROPOSAL}], ids=str)
def test_a_world_of_one_is_no_world(world_of_one, options):
    pos, neg = energies(6, 4)
    for variant in VARIANTS[:2] if "groups" in options else VARIANTS:
        for beta in (0.7, -0.7, 0.0, torch.tensor(0.7), torch.tensor(0.0), [0.5, 0.0, 1.0]):
            if options.get("log_q") and beta in (0.0, [0.5, 0.0, 1.0]):
                continue  # refused
            given: dict[str, Any] = {"variant": variant, **options}
            alone = contrastive_loss(pos, neg, beta, **given)
            found = contrastive_loss(pos, neg, beta, process_group=world_of_one, **given)
            torch.testing.assert_close(found, alone, rtol=1e-12, atol=0)
            for a, b in zip(slopes(found, pos, neg), slopes(alone, pos, neg), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("groups", [None, LABELS], ids=["", "classes"])
def test_first_order_only_across_ranks(world_of_one, groups):
    pos, neg = energies(6, 4)
    loss = contrastive_loss(pos, neg, 0.7, groups=groups, process_group=world_of_one)
    first = torch.autograd.grad(loss, (pos, neg), create_graph=True)
    assert not any(side.requires_grad for side in first)


def test_heads_and_labels_of_any_kind_across_ranks(world_of_one):
    pos, neg = (f.detach().reshape(-1, 2).requires_grad_() for f in energies(12, 8))
    for kind in (torch.int16, torch.uint8, torch.float64):
        groups = LABELS[0].to(kind), LABELS[1].to(kind)
        alone = contrastive_loss(pos, neg, 0.7, groups=groups)
        found = contrastive_loss(pos, neg, 0.7, groups=groups, process_group=world_of_one)
        for a, b in zip(slopes(found, pos, neg), slopes(alone, pos, neg), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_gradients_of_classes_across_ranks_are_finite_beside_nan(world_of_one):
    pos, neg = energies(6, 4)
    broken = neg.detach().clone()
    broken[3] = torch.nan  # the only negative of class 2
    broken.requires_grad_()
    loss = contrastive_loss(pos, broken, 0.7, groups=LABELS, process_group=world_of_one)
    found = slopes(loss, pos, broken)
    assert loss.isfinite()
    assert all(side.isfinite().all() for side in found)
    assert found[0][3] == 0
