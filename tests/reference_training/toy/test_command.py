from __future__ import annotations

import math

from ebmguard.reference_training.toy.train import table

NUMBERS = ("kl", "tv", "mode_mass_error", "energy_scale", "kl_sgld")


def member(beta, variant="default", diverged_at=None, **numbers):
    values = dict.fromkeys(NUMBERS, 1.0) | numbers
    return {"beta": beta, "variant": variant, "diverged_at": diverged_at, **values}


def cells(members):
    head, _, *lines = table(members).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines)]


def test_a_line_for_each_variant_and_beta_with_medians_over_the_seeds():
    members = [member("0", kl=kl) for kl in (8.0, 3.0, 40.0)]
    members += [member("0:0.9", "no_pos", kl=kl, tv=0.25) for kl in (0.2, 0.1)]
    members += [member("0.5", kl=kl) for kl in (math.inf, 2.0, 1.0)]
    members += [member("0.7", kl=kl) for kl in (1.0, 2.0)]
    members.append(member("0.7", kl=math.nan, diverged_at=7))
    assert cells(members) == [
        ["variant", "beta", *NUMBERS, "diverged"],
        ["default", "0", "8", "1", "1", "1", "1", "0 of 3"],
        ["no_pos", "0:0.9", "0.15", "0.25", "1", "1", "1", "0 of 2"],
        ["default", "0.5", "2", "1", "1", "1", "1", "0 of 3"],
        ["default", "0.7", "undefined", "1", "1", "1", "1", "1 of 3"],
    ]
