"""Copies of nested containers: leaves of their own, on the devices where they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ebmguard.recovery.snapshots import copied, copied_back, devices_of


def test_leaves_go_back_to_where_they_were() -> None:
    tree: dict[str, Any] = {"a": torch.ones(2), "b": [3, torch.zeros(1, dtype=torch.float64)]}
    assert devices_of(tree) == ["cpu", "cpu"]
    back = copied_back(copied(tree), ["meta", "cpu"])
    assert back["a"].device.type == "meta"
    assert back["b"][0] == 3
    assert back["b"][1].equal(tree["b"][1])


def test_a_device_that_is_not_there_leaves_the_host() -> None:
    assert copied_back([torch.ones(1)], ["cuda:99"])[0].device.type == "cpu"


def test_nothing_is_shared() -> None:
    tree: dict[str, Any] = {"a": torch.ones(2), "b": np.ones(2), "c": {"d": [1]}}
    mine = copied_back(tree)
    mine["a"].zero_()
    mine["b"][:] = 0
    mine["c"]["d"].append(2)
    assert tree["a"].tolist() == [1, 1]
    assert tree["b"].tolist() == [1, 1]
    assert tree["c"] == {"d": [1]}
