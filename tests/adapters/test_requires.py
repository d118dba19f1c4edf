"""Adapters are imported by whoever uses them, and say what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

import ebmguard.adapters

# Adapter: what it imports, and the extra that brings it. Fabric's and accelerate's import nothing.
FRAMEWORKS = {
    "lightning": (("lightning", "pytorch_lightning"), "lightning"),
    "torchebm": (("torchebm",), "torchebm"),
    "jax": (("jax",), "jax"),
    "wandb": (("wandb",), "wandb"),
    "mlflow": (("mlflow",), "mlflow"),
    "trackio": (("trackio",), "trackio"),
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_without_its_framework_an_adapter_says_what_to_install(name, monkeypatch):
    packages, extra = FRAMEWORKS[name]
    # With all that other tests have imported of it.
    parts = [each for each in sys.modules if each.split(".")[0] in packages]
    for module in {*packages, *parts}:
        monkeypatch.setitem(sys.modules, module, None)
    for module in [each for each in sys.modules if each.startswith("ebmguard.adapters.")]:
        if module.split(".")[2] in (name, f"_{name}_objective", f"_{name}_diagnostics"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(ebmguard.adapters, name, raising=False)
    with pytest.raises(ImportError) as error:
        importlib.import_module(f"ebmguard.adapters.{name}")
    assert f'pip install ".[{extra}]"' in str(error.value)
    assert str(error.value.name).split(".")[0] in packages
