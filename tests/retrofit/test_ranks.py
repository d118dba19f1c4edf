"""Two ranks train, and are watched, as one process; one's NaN stops all, or takes all back."""

from __future__ import annotations

import re
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ebmguard import guard
from ebmguard.errors import ConfigError
from ebmguard.ranks import Ranks
from ebmguard.recovery.archive import Archive
from ebmguard.sinks import read_jsonl
from tests.parts import Energy, climb
from tests.ranks import rank_fixtures
from tests.retrofit.ranks_process import CASES, FAULTS, FAULTY_STEP, RESTORED, STEPS, WORLD, train

started, folder, seen = rank_fixtures("tests.retrofit.ranks_process", WORLD)

# -- as one process --------------------------------------------------------------------------------

WEIGHTS = (
    *("grad_scale", "weight_entropy", "ess", "max_weight"),
    *("positive_weight_entropy", "reweighting_angle"),
)
JOINED = {
    *(f"{prefix}{name}" for name in WEIGHTS for prefix in ("", "ref/")),
    *(f"{side}/{name}" for side in ("f_pos", "f_neg") for name in ("mean", "std", "min", "max")),
    *("energy_gap", "energy_gap_scaled", "output_scale", "beta_star", "loss"),
    *("nonfinite/pos", "nonfinite/neg", "nonfinite/energies", "nonfinite/samples"),
    *("nonfinite/gradients", "sampler/grad_norm", "sampler/grad_norm_max", "alert_level"),
    *("sampler/evaluations", "sampler/drift_to_noise", "sampler/clamped", "sampler/acceptance"),
    *("sampler/unit", "sampler/substeps", "sampler/repeated", "unpaired", "ref/unpaired"),
    *("optim/grad_norm", "optim/update_norm", "optim/amplification"),
}
AVERAGED = {
    *(f"{side}/{name}" for side in ("f_pos", "f_neg") for name in ("q05", "median", "q95")),
    *("energy_overlap", "pareto_k", "ref/pareto_k", "sampler/sharpness"),
}


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_have_the_parameters_gradients_and_rows_of_one_process(seen, name):
    alone, ranks = train(CASES[name]), [rank[name] for rank in seen]
    for rank in ranks:
        for x, y in zip(chain(*rank["gradients"]), chain(*alone["gradients"]), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-14, equal_nan=True)
        for x, y in zip(rank["parameters"], alone["parameters"], strict=True):
            # The loss does not depend on the last layer's bias, so that Adam amplifies roundings.
            torch.testing.assert_close(x, y, rtol=1e-11 if y.numel() > 1 else 1e-7, atol=1e-14)
        for part in ("rows", "members", "alerts"):
            assert repr(rank[part]) == repr(ranks[0][part])  # where NaN is NaN
    rows, expected = ([*x["rows"], *chain(*x["members"])] for x in (ranks[0], alone))
    assert len(ranks[0]["rows"]) == STEPS
    alerts, right = ([(a["rule"], a["step"]) for a in x["alerts"]] for x in (ranks[0], alone))
    assert alerts == right
    assert ("nonfinite", STEPS - 1) in alerts or name != "NaN on one rank"
    for row, right in zip(rows, expected, strict=True):
        assert set(row) == set(right) <= JOINED | AVERAGED
        for tag in JOINED & set(right):
            # What is known of samples is float32.
            rel = 1e-6 if tag.startswith("sampler/") or tag == "nonfinite/samples" else 1e-8
            assert row[tag] == pytest.approx(right[tag], rel=rel, abs=1e-9, nan_ok=True), tag
    assert CASES[name].betas or "optim/amplification" in alone["rows"][1]
    # Otherwise the numbers of classes would be nothing but zeros.
    assert name != "default, classes" or 0 < max(row["unpaired"] for row in rows) < 10


# -- one rank stops all, or takes all back ---------------------------------------------------------

TOLD = ("alerts", "rollbacks", "attempt", "step", "rules", "parameters")


def same(found: Any, other: Any) -> bool:
    """Whether two lists of tensors are the same to the bit."""
    return all(x.equal(y) for x, y in zip(found, other, strict=True))


def told_alike(seen: list[Any], name: str) -> list[dict[str, Any]]:
    """What the ranks saw of a run, of which all were told the same."""
    found = [rank[name] for rank in seen]
    for part in TOLD:
        assert len({repr(rank[part]) for rank in found}) == 1, part
    assert all(same(rank["parameters"], found[0]["parameters"]) for rank in found)
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_one_ranks_nan_stops_all_with_the_same_error(seen, fault):
    found = told_alike(seen, f"stops, {fault}")
    ((kind, words),) = {rank["error"] for rank in found}
    assert kind == "NonFiniteError"
    assert f"at step {FAULTY_STEP}" in words
    assert ("nonfinite/gradients" if fault == "gradient" else "nonfinite/energies") in words
    assert found[0]["step"] == FAULTY_STEP + 1
    assert all(torch.isfinite(p).all() for p in found[0]["parameters"])


@pytest.mark.parametrize("fault", FAULTS)
def test_one_ranks_nan_takes_all_back_to_the_bit(seen, fault):
    found = told_alike(seen, f"rolls back, {fault}")
    (rollback,) = found[0]["rollbacks"]
    assert (rollback["step"], rollback["restored_step"]) == (FAULTY_STEP, RESTORED)
    for rank in found:
        before = rank["before"]
        assert not same(before[RESTORED], before[FAULTY_STEP])
        assert same(rank["restored"], before[RESTORED])
        # With the same random numbers too.
        assert len(rank["again"]) == FAULTY_STEP - RESTORED + 1
        assert all(same(state, before[step]) for step, state in rank["again"].items())


def test_all_change_the_same_and_draw_numbers_of_their_own_and_the_first_alone_speaks(seen):
    found = told_alike(seen, "climbs")
    first, second = found[0]["rollbacks"]
    assert first["changes"] == {"lr": [0.01, pytest.approx(0.01 / 10)]}
    assert second["changes"] == {"beta_star": [0.7, 2.0]}
    assert (first["relapse"], second["relapse"]) == (False, True)
    assert [rank["beta_star"] for rank in found] == [2.0] * WORLD
    drawn = [tuple(draws["own"]) for rank in found for draws in rank["draws"]]
    assert len(set(drawn)) == 3 * WORLD
    common = {tuple(tuple(draws["common"]) for draws in rank["draws"]) for rank in found}
    assert len(common) == 1
    assert len(set(*common)) == 3
    # With the budget spent it goes on.
    assert [x["step"] for x in found[0]["alerts"] if x["level"] == "ERROR"][-1] == FAULTY_STEP
    assert found[0]["step"] == FAULTY_STEP + 3
    # Three faults, each an alert, and of two of them a rollback; at last the verdict.
    assert len(found[0]["said"]) - 1 == len(found[0]["alerts"]) + len(found[0]["rollbacks"]) == 5
    assert not any(rank["said"] for rank in found[1:])


def test_the_first_rank_alone_writes(folder, seen):
    log = folder / "log"
    assert len(list(log.glob("events.out.*"))) == 1
    steps = [row["step"] for row in read_jsonl(log / "metrics.jsonl")]
    backward = [now for before, now in pairwise(steps) if now != before + 1]
    # Of the rows that were under way in the snapshot, too.
    assert backward == [RESTORED - 2, RESTORED - 4]  # a relapse goes deeper
    assert [x["step"] for x in read_jsonl(log / "alerts.jsonl")] == [FAULTY_STEP] * 3
    assert read_jsonl(log / "recovery.jsonl") == seen[0]["climbs"]["rollbacks"]


def test_the_step_is_left_out_on_all_ranks(seen):
    found = told_alike(seen, "leaves out")
    assert [(alert["rule"], alert["step"]) for alert in found[0]["alerts"]] == [("amp_skip", 1)]
    for rank in found:
        before, after = (rank["states"][step][:-1] for step in (1, 2))  # but for the buffer
        assert same(before, after)


def test_all_go_on_from_the_newest_snapshot_that_all_have(folder, seen):
    for rank in seen:
        found = rank["goes on"]
        for name, step in (("whole", 10), ("lacks one", 8)):
            assert found[name]["step"] == step
            states = found[name]["states"]
            assert set(states) == set(range(step, 13))
            assert all(same(state, found["first"][at]) for at, state in states.items())
        assert f"no snapshot that all {WORLD} ranks can read" in found["lacks all"]
    assert len({rank["goes on"]["lacks all"] for rank in seen}) == 1
    # As many ranks must go on.
    whole = folder / "snapshots" / "whole"
    with pytest.raises(ConfigError, match=f"a run on {WORLD} ranks, but this one is on 1"):
        Archive(whole / "rank0", 1, Ranks()).newest(lambda found: None)


# -- on one rank, and by hand ----------------------------------------------------------------------


def test_parameters_of_which_each_rank_holds_a_part_are_refused_at_every_door(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    network = Energy()
    fully_shard(network, mesh=init_device_mesh("cpu", (1,)))
    try:
        g = guard(None, climb)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for call in (
            lambda: guard(None, climb, model=network),
            lambda: guard(None, climb, optimizer=optimizer, process_group=dist.group.WORLD),
            lambda: g.attach(optimizer=optimizer),
            lambda: g.sampler(network, torch.zeros(3, 2)),
        ):
            with pytest.raises(ConfigError, match=r"DistributedDataParallel.*contrastive_loss"):
                call()
        assert g.trainer.optimizer is None
        # What a network in one piece does.
        assert g.sampler(Energy(), torch.zeros(3, 2)).shape == (3, 2)
    finally:
        dist.destroy_process_group()


def test_the_script_for_several_ranks_on_the_page_runs(seen):
    found = re.fullmatch(r"GradScale (\S+), energy gap \S+\n", seen[0]["page"])
    assert found
    assert 0.5 < float(found[1]) < 1
    assert not seen[1]["page"]
