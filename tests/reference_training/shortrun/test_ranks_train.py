"""Two processes train one network: as one process with the joined batch, and in one folder."""

from __future__ import annotations

import pytest

from ebmguard.reference_training.engine.ranks import ONE_RANK
from tests.ranks import rank_fixtures
from tests.reference_training.jem.parts import largest_difference, same
from tests.reference_training.shortrun import ranks_train_process
from tests.reference_training.shortrun.ranks_train_process import CASES, WORLD, trained

started, folder, seen = rank_fixtures(ranks_train_process.__name__, WORLD)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process(seen, tmp_path, name):
    alone, (first, second) = trained(name, tmp_path, ONE_RANK), (rank[name] for rank in seen)
    assert largest_difference(first["network"], alone["network"]) < 1e-6
    # Where the bits are equal nothing can drift apart.
    assert same(first["network"], second["network"])
    # The first rank writes the rows of the joined batch.
    assert len(first["rows"]) == 5
    for one, other in zip(first["rows"], alone["rows"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
