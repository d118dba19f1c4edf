"""A network that begins with the parameters of another run."""

from __future__ import annotations

from pathlib import Path

from ebmguard.errors import ConfigError

from ..engine.checkpoints import load_all_ranks
from ..engine.run_folder import CONFIG, read_config
from .network import EnergyNet


def start_from(network: EnergyNet, path: Path, activation: str) -> None:
    """Give a network the parameters of another run's last checkpoint.

    Args:
        network: gets them.
        path: folder of the other run.
        activation: the network's, which its parameters do not tell.
    """
    if not (path / CONFIG).is_file():
        raise ConfigError(f"start_from is {path}, which holds no checkpoint of a run")
    other = f"start_from is {path}, whose network is another than this run's"
    stored = read_config(path).get("settings", {})
    if stored.get("activation") != activation:
        raise ConfigError(
            f"{other}: its activation is {stored.get('activation')}, here it is {activation}"
        )
    _, (first, *_) = load_all_ranks(path / "checkpoints")
    try:
        network.load_state_dict(first["network"])
    except (KeyError, RuntimeError) as error:
        raise ConfigError(
            f"{other}: its parameters have other shapes; give the same data, image_size and nf"
        ) from error
