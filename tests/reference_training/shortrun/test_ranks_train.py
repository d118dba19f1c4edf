"""Two processes train one network: as one process with the joined batch, and in one folder."""

from __future__ import annotations

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.shortrun import train as train_module
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.reference_training.shortrun.draws import Draws
from ebmguard.reference_training.shortrun.trained import load_run
from ebmguard.sinks import read_jsonl
from tests.ranks import rank_fixtures
from tests.reference_training.jem.parts import largest_difference, steps_of
from tests.reference_training.shortrun import ranks_train_process
from tests.reference_training.shortrun.parts import config_for
from tests.reference_training.shortrun.ranks_train_process import ALL, CASES, WORLD
from tests.reference_training.shortrun.runs import assert_same_run, go, in_float64, same, saved

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


def test_a_run_of_two_ranks_is_written_once(seen, folder):
    out = folder / "whole"
    assert [one["runs"]["whole"] for one in seen] == [6, 6]
    assert steps_of(out, "metrics.jsonl") == list(range(6))
    assert len(list(out.glob("events.out.tfevents.*"))) == 1
    assert len(list((out / "trainer").glob("events.out.tfevents.*"))) == len(
        list((out / "samples").iterdir())
    )
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}.rank{rank}of2.pt" for step in (3, 6) for rank in (0, 1)]
    buffers = [saved(out, f".rank{rank}of2")["buffer"]["samples"] for rank in (0, 1)]
    assert [len(chains) for chains in buffers] == [6, 7]
    run = load_run(out, torch.device("cpu"))
    assert run.step == 6
    assert same(dict(run.network.state_dict()), saved(out, ".rank1of2")["network"])


def test_ctrl_c_on_one_rank_stops_both_after_the_same_update(seen, folder):
    for rank, one in enumerate(seen):
        assert one["runs"]["stopped"] is None
        assert one["runs"]["stopped at"] == f"step-00000002.rank{rank}of2.pt"
        assert_same_run(folder / "whole", folder / "cut", f".rank{rank}of2")


def test_a_nan_on_one_rank_ends_both(seen, folder):
    results = [one["runs"]["ended"] for one in seen]
    for one in results:
        assert one["steps"] == 3
        assert "nonfinite at step 2" in one["ended"]
    assert len(read_jsonl(folder / "ended" / "metrics.jsonl")) == 3


def test_what_ranks_cannot_do_is_refused_on_all_of_them(seen, folder):
    for one in seen:
        assert "batch is 9, expected a multiple of the 2 processes" in one["runs"]["refused"]
    assert not (folder / "wrong").exists()


def test_a_run_of_two_is_not_resumed_by_one(seen, folder):
    before = {path: path.read_bytes() for path in (folder / "whole").rglob("*.jsonl")}
    with pytest.raises(ConfigError, match="of 2 processes, this run has 1"):
        go(ShortRunConfig(out=folder / "whole", resume=True))
    assert {path: path.read_bytes() for path in (folder / "whole").rglob("*.jsonl")} == before
