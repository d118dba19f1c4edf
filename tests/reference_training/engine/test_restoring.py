from __future__ import annotations

import json

import pytest
import torch

from ebmguard.errors import ConfigError, EbmguardError
from ebmguard.reference_training.engine.restoring import restoring
from ebmguard.reference_training.jem.config import JemConfig


@pytest.mark.parametrize(
    "take",
    [
        lambda: json.loads("{}")["network"],
        lambda: min(json.loads('["x", 3]')),
        lambda: torch.nn.Linear(2, 1).load_state_dict({"weight": torch.zeros(3)}),
        lambda: float(10**400),
        lambda: json.loads("[]").network,
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, take):
    with pytest.raises(ConfigError, match="cannot be resumed") as caught, restoring(tmp_path):
        take()
    assert len(str(caught.value).splitlines()) == 1


def test_errors_that_say_what_is_wrong_stay_as_they_are(tmp_path):
    error = EbmguardError("said already")
    with pytest.raises(EbmguardError) as caught, restoring(tmp_path):
        raise error
    assert caught.value is error


def test_settings_of_the_wrong_type_are_refused(tmp_path):
    settings = JemConfig(tmp_path).to_json() | {"beta_star": "two"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="cannot be resumed"):
        JemConfig(tmp_path, resume=True).open()
