"""Two processes train one network: as one process with the joined batch, and in one folder."""

from __future__ import annotations

import pytest
import torch

from ebmguard.reference_training.shortrun import train as train_module
from ebmguard.reference_training.shortrun.draws import Draws
from tests.ranks import rank_fixtures
from tests.reference_training.jem.parts import in_float64, largest_difference, same, saved
from tests.reference_training.shortrun import ranks_train_process
from tests.reference_training.shortrun.parts import config_for, go
from tests.reference_training.shortrun.ranks_train_process import ALL, CASES, WORLD

started, folder, seen = rank_fixtures(ranks_train_process.__name__, WORLD)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_process_with_their_joined_chains(seen, tmp_path, monkeypatch, case):
    """One process draws the same images and as many steps; its chains are those of both ranks."""
    ranks = [one[case] for one in seen]
    own_images, own_steps = [], []
    joined = [torch.cat(parts) for parts in zip(*(one["samples"] for one in ranks), strict=True)]
    following = iter(joined)
    positives = Draws.positives

    def kept(self):
        own_images.append(positives(self))
        return own_images[-1]

    def sampler(settings, device, refinement):
        def sample_q(network, x0, noise):
            refinement()
            network(x0[:1])  # the guard is right to ask for it
            own_steps.append(len(noise))
            return next(following)

        return sample_q

    monkeypatch.setattr(Draws, "positives", kept)
    monkeypatch.setattr(train_module, "make_sampler", sampler)
    with in_float64():
        results = go(config_for(tmp_path, **ALL, **CASES[case]))
    assert results is not None
    assert [len(x) for x in ranks[0]["images"]] == [4] * 5
    for whole, parts in zip(
        own_images, zip(*(r["images"] for r in ranks), strict=True), strict=True
    ):
        assert torch.equal(torch.cat(parts), whole)
    assert own_steps == ranks[0]["steps"] == ranks[1]["steps"]
    if case == "persistent, finer":
        assert max(own_steps) > 3
    network = saved(tmp_path)["network"]
    for one in ranks:
        assert largest_difference(one["network"], network) < 1e-6
    # Where the bits are equal nothing can drift apart.
    assert same(ranks[0]["network"], ranks[1]["network"])
    # The first rank writes the rows of the joined batch.
    for name in ("energy_gap", "grad_scale", "ess", "f_pos/mean", "f_neg/mean"):
        expected = results["median_last_100"][name]
        assert ranks[0]["results"][name] == pytest.approx(expected, rel=1e-5), name


def test_ranks_draw_chains_of_their_own(seen):
    for case in CASES:
        first, second = (one[case] for one in seen)
        for a, b in zip(first["samples"], second["samples"], strict=True):
            assert len(a) == len(b) == 4
            assert float((a - b).abs().mean()) > 0.3  # start points differ by 2/3
        assert same(first["draws"]["images"], second["draws"]["images"])
        assert same(first["draws"]["counts"], second["draws"]["counts"])
        assert not same(first["draws"]["chains"], second["draws"]["chains"])
