"""One rank's NaN stops all ranks, or takes all back; and they go on from the disk together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.ranks import Ranks
from ebmguard.recovery.archive import Archive
from ebmguard.sinks import read_jsonl
from tests.ranks import ranks_of
from tests.retrofit.ranks_actions import FAULTY_STEP, RESTORED

TOLD = ("alerts", "rollbacks", "attempt", "step", "rules", "parameters")


@pytest.fixture
def started(tmp_path_factory):
    """The folder, and what each rank found, from one start of all cases."""
    return ranks_of("tests.retrofit.ranks_actions", 2, tmp_path_factory)


@pytest.fixture
def ranks(started):
    return started[1]


def of_kind(ranks: list[Any], kind: str) -> Iterator[tuple[str, list[Any]]]:
    """The rest of the name of each case of a kind, and what each rank found."""
    names = [name for name in ranks[0] if name.partition(", ")[0] == kind]
    assert names
    for name in names:
        yield name.removeprefix(f"{kind}, "), [rank[name] for rank in ranks]


def same(found: Any, other: Any) -> bool:
    """Whether two lists of tensors are the same to the bit."""
    return all(x.equal(y) for x, y in zip(found, other, strict=True))


def check_all_were_told_the_same(found: list[dict[str, Any]]) -> None:
    for name in TOLD:
        assert len({repr(rank[name]) for rank in found}) == 1, name
    assert all(same(rank["parameters"], found[0]["parameters"]) for rank in found)


def test_one_ranks_nan_stops_all_with_the_same_error(ranks):
    for name, found in of_kind(ranks, "stops"):
        check_all_were_told_the_same(found)
        ((kind, words),) = {rank["error"] for rank in found}
        assert kind == "NonFiniteError"
        assert f"at step {FAULTY_STEP}" in words
        tag = "nonfinite/gradients" if "gradient" in name else "nonfinite/energies"
        assert tag in words
        assert found[0]["step"] == FAULTY_STEP + 1
        assert all(torch.isfinite(p).all() for p in found[0]["parameters"])


def test_one_ranks_nan_takes_all_back_to_the_bit(ranks):
    for _, found in of_kind(ranks, "rolls back"):
        check_all_were_told_the_same(found)
        (rollback,) = found[0]["rollbacks"]
        assert (rollback["step"], rollback["restored_step"]) == (FAULTY_STEP, RESTORED)
        for rank in found:
            before = rank["before"]
            assert not same(before[RESTORED], before[FAULTY_STEP])
            assert same(rank["restored"], before[RESTORED])
            # With the same random numbers too.
            assert len(rank["again"]) == FAULTY_STEP - RESTORED + 1
            assert all(same(state, before[step]) for step, state in rank["again"].items())


def test_all_change_the_same_and_draw_numbers_of_their_own(ranks):
    for _, found in of_kind(ranks, "climbs"):
        check_all_were_told_the_same(found)
        first, second = found[0]["rollbacks"]
        assert first["changes"] == {"lr": [0.01, pytest.approx(0.01 / 10)]}
        assert second["changes"] == {"beta_star": [0.7, 2.0]}
        assert (first["relapse"], second["relapse"]) == (False, True)
        assert [rank["beta_star"] for rank in found] == [2.0] * len(found)
        drawn = [tuple(draws["own"]) for rank in found for draws in rank["draws"]]
        assert len(set(drawn)) == 3 * len(found)
        common = {tuple(tuple(draws["common"]) for draws in rank["draws"]) for rank in found}
        assert len(common) == 1
        assert len(set(*common)) == 3
        # With the budget spent it goes on.
        assert [x["step"] for x in found[0]["alerts"] if x["level"] == "ERROR"][-1] == FAULTY_STEP
        assert found[0]["step"] == FAULTY_STEP + 3


def test_the_first_rank_alone_writes(started):
    folder, ranks = started
    for _, found in of_kind(ranks, "climbs"):
        log = folder / "log"
        assert len(list(log.glob("events.out.*"))) == 1
        steps = [row["step"] for row in read_jsonl(log / "metrics.jsonl")]
        backward = [now for before, now in pairwise(steps) if now != before + 1]
        # Of the rows that were under way in the snapshot, too.
        assert backward == [RESTORED - 2, RESTORED - 4]  # a relapse goes deeper
        alerts = read_jsonl(log / "alerts.jsonl")
        assert [alert["step"] for alert in alerts] == [FAULTY_STEP] * 3
        assert read_jsonl(log / "recovery.jsonl") == found[0]["rollbacks"]


def test_the_first_rank_alone_speaks(ranks):
    for _, (first, *others) in of_kind(ranks, "climbs"):
        # Three faults, each an alert, and of two of them a rollback; at last the verdict.
        assert len(first["said"]) - 1 == len(first["alerts"]) + len(first["rollbacks"]) == 5
        assert not any(rank["said"] for rank in others)


def test_the_step_is_left_out_on_all_ranks(ranks):
    rules = {"by scaler": "amp_skip", "fused": "nonfinite"}
    for name, found in of_kind(ranks, "leaves out"):
        check_all_were_told_the_same(found)
        (alert,) = found[0]["alerts"]
        assert (alert["rule"], alert["step"]) == (rules[name], 1)
        for rank in found:
            *before, _ = rank["states"][1]  # but for the buffer
            *after, _ = rank["states"][2]
            assert same(before, after)


def test_all_go_on_from_the_newest_snapshot_that_all_have(ranks):
    for _, of_ranks in of_kind(ranks, "goes on"):
        for found in of_ranks:
            assert found["whole"]["step"] == 10
            assert found["lacks one"]["step"] == 8
            assert found["nothing"] is None
            for name in ("whole", "lacks one"):
                states = found[name]["states"]
                assert set(states) == set(range(found[name]["step"], 13))
                assert all(same(state, found["first"][step]) for step, state in states.items())


def test_what_is_refused_is_refused_on_all_ranks(ranks):
    for _, found in of_kind(ranks, "goes on"):
        for rank in found:
            assert f"no snapshot that all {len(ranks)} ranks can read" in rank["lacks all"]
            assert "holds snapshots of a run, the newest of step 10" in rank["begins"]
        assert len({(rank["lacks all"], rank["begins"]) for rank in found}) == 1


def test_as_many_ranks_must_go_on(started):
    folder, ranks = started
    whole = folder / "snapshots" / "whole"
    with pytest.raises(ConfigError, match="holds snapshots of a run, the newest of step 10"):
        Archive(whole, 1, Ranks()).check_empty()
    with pytest.raises(ConfigError, match=f"a run on {len(ranks)} ranks, but this one is on 1"):
        Archive(whole / "rank0", 1, Ranks()).newest(lambda found: None)
