"""Who is in an ensemble, and how strong the guard acts on each."""

import pytest
import torch
from torch.nn.functional import softplus

from ebmguard.errors import ConfigError
from ebmguard.reference_training.toy.members import Beta, Members, averaged_loss

CPU = torch.device("cpu")


def test_a_beta_is_a_number_a_schedule_or_an_average():
    assert Beta.parse("-0.5").starts == Beta.parse("-0.5").ends == (-0.5,)
    assert (Beta.parse("0:0.9").starts, Beta.parse("0:0.9").ends) == ((0.0,), (0.9,))
    assert Beta.parse("0.1+0.5:0.9").ends == (0.1, 0.9)


@pytest.mark.parametrize("text", ["", "x", "0.5:", "0:1:2", "1.5", "nan", "inf", "0.5+", "0:2"])
def test_a_beta_that_cannot_be_meant_is_refused(text):
    with pytest.raises(ConfigError, match="expected a number up to 1"):
        Beta.parse(text)


@pytest.mark.parametrize(
    ("betas", "variants", "seeds", "match"),
    [
        ([], ["default"], [0], "betas is"),
        (["0", "0"], ["default"], [0], "different values"),
        (["0"], ["best"], [0], "variant is 'best'"),
        (["0"], ["default"], [], "seeds is"),
        (["0.1+0.2", "0.1+0.2+0.3"], ["default"], [0], "equally many terms"),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(betas, variants, seeds, match):
    with pytest.raises(ConfigError, match=match):
        Members.of(betas, variants, seeds)


def test_seeds_vary_fastest_then_betas_then_variants():
    members = Members.of(["0", "0.5"], ["default", "true"], [3, 4])
    assert len(members) == 8
    assert members.describe()[:3] == [
        {"beta": "0", "variant": "default", "seed": 3},
        {"beta": "0", "variant": "default", "seed": 4},
        {"beta": "0.5", "variant": "default", "seed": 3},
    ]
    assert [one["variant"] for one in members.describe()] == ["default"] * 4 + ["true"] * 4
    seeds = members.spread(torch.tensor(members.seeds))
    assert seeds.tolist() == members.seed_of_each
    stacked = torch.stack([torch.tensor(members.seeds), torch.tensor([0, 1])])
    assert members.spread(stacked, 1).shape == (2, 8)


def test_strength_gives_every_member_its_own_exponent():
    members = Members.of(["0", "0.5"], ["default", "true"], [3, 4])
    strength = members.strength(200.0, 1000, CPU)
    assert strength["output_scale"] == 200.0
    assert strength["beta_star"].tolist() == [0, 0, 100, 100] * 2


def test_a_schedule_moves_its_own_members_alone():
    strength = Members.of(["0.2", "0:0.8"], ["default"], [0]).strength(10.0, 100, CPU)
    assert strength["beta_star"](0).tolist() == [2.0, 0.0]
    assert strength["beta_star"](50).tolist() == pytest.approx([2.0, 4.0])


def test_an_average_samples_at_its_mean_beta():
    members = Members.of(["0.1+0.5", "0.4"], ["default"], [0])
    starts, slopes = members.exponents(10.0, 100, CPU)
    assert (members.terms, starts.tolist()) == (2, [[1.0, 4.0], [5.0, 4.0]])
    assert not slopes.any()
    assert members.strength(10.0, 100, CPU)["beta_star"].tolist() == [3.0, 4.0]
    moving = Members.of(["0:0.2+0.4:0.8"], ["default"], [0])
    starts, slopes = moving.exponents(10.0, 100, CPU)
    torch.testing.assert_close(starts + 50 * slopes, torch.tensor([[1.0], [6.0]]).double())
    assert moving.strength(10.0, 100, CPU)["beta_star"](50).tolist() == pytest.approx([3.5])


def test_an_average_of_losses_is_that_of_every_member_by_itself():
    rng = torch.Generator().manual_seed(0)
    f_pos, f_neg = (torch.randn(4, n, generator=rng, dtype=torch.float64) for n in (5, 7))
    exponents = torch.tensor([[0.5, 1.0, 0.5, 1.0], [2.0, -1.0, 2.0, -1.0]], dtype=torch.float64)
    expected = 0.0
    for own in exponents:
        for g, beta in enumerate(own):
            log_sum = (beta * f_neg[g]).logsumexp(0)
            if g < 2:  # Eq. 8
                expected += softplus(log_sum - beta * f_pos[g]).mean() / beta / 2
            else:  # Eq. 7
                expected += (log_sum / beta - f_pos[g].mean()) / 2
    found = averaged_loss(f_pos, f_neg, exponents, ("default", "no_pos"))
    torch.testing.assert_close(found, expected)
