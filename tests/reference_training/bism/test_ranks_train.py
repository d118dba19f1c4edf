"""Two processes train one model: as one process does, and in one folder."""

from __future__ import annotations

import pytest

from ebmguard.reference_training.engine.ranks import ONE_RANK
from tests.ranks import rank_fixtures
from tests.reference_training.bism import ranks_train_process
from tests.reference_training.bism.ranks_train_process import CASES, WORLD, trained
from tests.reference_training.jem.parts import largest_difference, same

started, folder, seen = rank_fixtures(ranks_train_process.__name__, WORLD)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process(seen, tmp_path, name):
    alone = trained(name, tmp_path / "alone", ONE_RANK)
    for rank in seen:
        assert largest_difference(rank[name]["network"], alone["network"]) < 1e-6
        assert rank[name]["results"] == pytest.approx(alone["results"], rel=1e-6)
    # Where the bits are equal nothing can drift apart.
    assert same(seen[0][name]["network"], seen[1][name]["network"])
