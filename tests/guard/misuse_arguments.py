"""Mistakes in the arguments of ``guard`` that have to do with no sampler."""

from __future__ import annotations

from typing import Any

from torch.distributed import GroupMember

from ebmguard.errors import ConfigError
from tests.guard.misuse_world import Case, World
from tests.parts import Memory


def unwritable(w: World) -> Any:
    (w.folder / "file").write_text("not a folder")
    try:
        return w.guard(log_dir=w.folder / "file" / "logs")
    finally:
        (w.folder / "file").unlink()


ARGUMENTS = [
    Case(*case)
    for case in [
        # How strong.
        ("no strength", lambda w: w.guard(beta_star=None), ConfigError, "exactly one.*none"),
        ("NaN", lambda w: w.guard(beta_star=float("nan")), ConfigError, "nan; expected a finite"),
        ("a string", lambda w: w.guard(beta_star="0.5"), ConfigError, "is a str; expected a num"),
        ("both betas", lambda w: w.guard(beta=0.1), ConfigError, "beta_star and beta were all"),
        (
            "beta without a scale",
            lambda w: w.guard(beta_star=None, beta=0.1, output_scale=None),
            ConfigError,
            "beta= needs the output scale: add output_scale=",
        ),
        ("scale of 0", lambda w: w.guard(output_scale=0), ConfigError, "must be positive"),
        (
            "beta above 1",
            lambda w: w.guard(beta_star=11),
            ConfigError,
            "1.1 at step 0 is above 1",
        ),
        (
            "noise of 0",
            lambda w: w.guard(output_scale=None, step_size=1.0, noise_std=0.0),
            ConfigError,
            "without noise has no output scale. Give beta_star= alone",
        ),
        (
            "schedule that returns None",
            lambda w: w.guard(beta_star=lambda step: None),
            ConfigError,
            r"beta_star\(step=0\)=None is a NoneType",
        ),
        (
            "several exponents and no factor",
            lambda w: w.guard(beta_star=None, beta_stars=[1, 2]),
            ConfigError,
            "add sampler_scale=",
        ),
        # Other keywords.
        ("convention", lambda w: w.guard(convention="logp"), ConfigError, "log_density, energy"),
        ("variant", lambda w: w.guard(variant="fancy"), ConfigError, "default, no_pos, batch"),
        ("reduce", lambda w: w.guard(reduce="max"), ConfigError, "expected one of sum, mean"),
        ("action", lambda w: w.guard(action="stop"), ConfigError, "expected one of warn, raise"),
        ("model", lambda w: w.guard(model="f"), ConfigError, "model= is a str; expected the torch"),
        ("loss_fn", lambda w: w.guard(3.0), ConfigError, "loss_fn is a float; expected a function"),
        ("on_alert", lambda w: w.guard(on_alert=1), ConfigError, "on_alert is a int; expected"),
        (
            "judge_in_loss",
            lambda w: w.guard(judge_in_loss=2),
            ConfigError,
            "judge_in_loss=2; expected True, False or None",
        ),
        ("flush_every", lambda w: w.guard(flush_every=0), ConfigError, "flush_every=0; expected"),
        ("reference", lambda w: w.guard(reference_beta_star=0), ConfigError, "uniform weights"),
        (
            "ranks without this one",
            lambda w: w.guard(process_group=GroupMember.NON_GROUP_MEMBER),
            ConfigError,
            "process_group= is a int; expected the ProcessGroup",
        ),
        ("sink", lambda w: w.guard(sinks=[3]), ConfigError, "is no sink"),
        ("one sink", lambda w: w.guard(sinks=Memory()), ConfigError, "takes a list of sinks"),
        ("unwritable folder", unwritable, ConfigError, "cannot be written: Not a directory"),
        ("folder", lambda w: w.guard(log_dir=5), ConfigError, "log_dir is a int; expected the"),
    ]
]
