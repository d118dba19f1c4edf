"""Several processes: after averaging, the gradient is that of one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ebmguard.objective import coefficients, contrastive_loss
from tests.objective.oracles import OF_CLASSES, VARIANTS, energies, slopes
from tests.objective.ranks_process import CASES, DISAGREEING, WORLD
from tests.ranks import ranks_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank saw, from one start of all processes."""
    return ranks_of("tests.objective.ranks_process", WORLD, tmp_path_factory)[1]


def _pairs(parts):
    """Each tensor of all ranks, in their order."""
    return tuple(torch.cat(same) for same in zip(*parts, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_mean_of_the_ranks_gradients_is_the_whole_batch(ranks, name):
    case = CASES[name]
    each = [case.rank(rank) for rank in range(len(case.sizes))]
    pos, neg = (f.requires_grad_() for f in _pairs([f for f, _ in each]))
    given = {
        key: value if key == "variant" else _pairs([given[key] for _, given in each])
        for key, value in each[0][1].items()
    }
    loss = contrastive_loss(pos, neg, case.beta, **given)
    expected = slopes(loss, pos, neg)
    closed = coefficients(pos, neg, case.beta, **given)
    tolerance: dict[str, Any] = {"rtol": 1e-12, "atol": 0.0}
    if case.dtype == torch.float32:
        tolerance["rtol"] = 1e-6
    seen = [rank[name] for rank in ranks[: len(each)]]
    # A sample's slope reaches the averaged gradient divided by the number of ranks.
    found = _pairs([[side / len(seen) for side in one["sides"]] for one in seen])
    torch.testing.assert_close(found, expected, **tolerance)
    torch.testing.assert_close(_pairs([one["closed"] for one in seen]), closed, **tolerance)
    for one in seen:
        assert torch.equal(one["loss"], seen[0]["loss"])
        torch.testing.assert_close(one["loss"], loss.detach(), **tolerance)
    assert all(side.any() for side in expected) != ("anywhere" in name)


@pytest.fixture
def world_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


LABELS = torch.tensor([0, 1, 1, 2, 0, 3]), torch.tensor([1, 0, 0, 2])
OPTIONS: dict[str, Any] = {
    "plain": {},
    "heads": {},
    "rows": {"groups": "rows"},
    "log q": {"log_q": (torch.linspace(-1, 1, 6).double(), torch.linspace(0, 2, 4).double())},
    **{
        f"{kind} of classes": {"groups": tuple(y.to(kind) for y in LABELS)}
        for kind in (torch.int64, torch.int16, torch.uint8, torch.float64)
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_world_of_one_is_no_world(world_of_one, name):
    pos, neg = energies(6, 4, heads=(2,) if name == "heads" else ())
    if name == "rows":
        neg = neg.detach().expand(6, 4).clone().requires_grad_()
    for variant in OF_CLASSES if "groups" in OPTIONS[name] else VARIANTS:
        for beta in (0.7, 0.0, torch.tensor(0.7), torch.tensor(0.0)):
            if name == "log q" and beta == 0 and not isinstance(beta, torch.Tensor):
                continue  # refused
            given: dict[str, Any] = {"variant": variant, **OPTIONS[name]}
            alone = contrastive_loss(pos, neg, beta, **given)
            found = contrastive_loss(pos, neg, beta, process_group=world_of_one, **given)
            ours, theirs = ((x, *slopes(x, pos, neg)) for x in (found, alone))
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


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


@pytest.mark.parametrize("words", DISAGREEING)
def test_ranks_that_disagree_all_get_an_error_that_names_them(ranks, words):
    said = [rank["refused"][words] for rank in ranks]
    assert len(set(said)) == 1
    of_rank = said[0].partition(": ")[2].split("; ")
    assert [words in each for each in of_rank] == [False] * (WORLD - 1) + [True]
