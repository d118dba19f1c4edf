"""How runs look: a healthy one, and five that went wrong, for docs/gallery.md.

    python -m benchmarks.gallery            # trains what is missing: two minutes; draws all
    python -m benchmarks.gallery lagging    # this one

Each picture is a frame of `ebmguard watch` above the first charts of `ebmguard report`. Runs are
kept under runs/gallery. Needs Chromium, as benchmarks/screenshots.py does.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.report.page import page

from .screenshots import main, open_browser, said, svg_of

RUNS = Path("runs/gallery")
PICTURES = Path("docs/pictures/gallery")
CHARTS = 4
WIDTH = 1000


class Setting(NamedTuple):
    """What a run does differently from the healthy one."""

    updates: int = 600
    lr: float = 1e-3
    sgld_steps: int = 10
    step_size: float = 1.0
    keeps_chains: bool = True
    is_clamped: bool = False
    weight_decay: float = 0.0
    """From half of the updates on."""


KINDS = {
    "healthy": Setting(),
    "too_long_steps": Setting(updates=580, lr=1e-2),
    "lagging": Setting(updates=65, sgld_steps=5, step_size=0.003, keeps_chains=False),
    "overshooting": Setting(
        updates=150, lr=1e-5, sgld_steps=40, step_size=10.0, keeps_chains=False
    ),
    "collapsed": Setting(updates=400, weight_decay=100.0),
    "saturated": Setting(updates=300, lr=1e-4, step_size=1000.0, is_clamped=True),
}


class Energy(nn.Module):
    """f of digits with 64 pixels, high on data."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 1)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Energies ``(B,)`` of images ``(B, 64)``."""
        energies: Tensor = self.layers(x).squeeze(1)
        return energies


def train(name: str) -> Path:
    """The folder of a run, which is trained unless it is there."""
    folder = RUNS / name
    if (folder / "metrics.jsonl").is_file():
        return folder
    setting = KINDS[name]
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data).float() / 8 - 1
    f = Energy()
    optimizer = torch.optim.AdamW(f.parameters(), lr=setting.lr, weight_decay=0.0)
    buffer = 2 * torch.rand(1000, 64) - 1

    def sample_q(f: nn.Module, rows: Tensor) -> Tensor:
        fresh = torch.rand(len(rows), 1) < (0.05 if setting.keeps_chains else 1.0)
        x = torch.where(fresh, 2 * torch.rand(len(rows), 64) - 1, buffer[rows])
        for _ in range(setting.sgld_steps):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(f(x).sum(), x)
            x = x + setting.step_size * slope + 0.01 * torch.randn_like(x)
            x = x.clamp(-1, 1) if setting.is_clamped else x
        buffer[rows] = x.detach()
        return x.detach()

    loss_fn, sampler = g = guard(
        None,
        sample_q,
        model=f,
        optimizer=optimizer,
        step_size=setting.step_size,
        noise_std=0.01,
        clamp=(-1.0, 1.0) if setting.is_clamped else None,
        substeps=1,  # so that the run shows what is wrong with it
        action="warn",
        log_dir=str(folder),
    )
    for update in range(setting.updates):
        x = images[torch.randint(len(images), (64,))]
        x = x + 0.03 * torch.randn_like(x)
        loss = loss_fn(f(x), f(sampler(f, torch.randint(len(buffer), (64,)))))
        if update == setting.updates // 2:
            optimizer.param_groups[0]["weight_decay"] = setting.weight_decay
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    g.close()
    return folder


# All but the verdict and the first charts goes; a frame of `ebmguard watch` comes above them.
_KEEP = """
const [terminal, charts] = arguments;
const plots = [...document.querySelectorAll('.plots')][0];
[...plots.children].slice(charts).forEach(chart => chart.remove());
const holder = document.createElement('div');
holder.innerHTML = terminal;
holder.querySelector('svg').style.width = '100%';
document.body.replaceChildren(holder, plots);
document.body.style.padding = '12px';
return document.body.scrollHeight;
"""


def draw(name: str, path: Path) -> None:
    """The picture of a run."""
    folder = train(name)
    file = RUNS / f"{name}.html"
    file.write_text(page([folder]), encoding="utf-8")
    frame = svg_of(said("watch", str(folder), "--once"))
    with open_browser(WIDTH, 1000) as browser:
        browser.open(file.resolve().as_uri())
        height = int(browser.driver.execute_script(_KEEP, frame, CHARTS))
        size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.picture(path)


if __name__ == "__main__":
    main(about=__doc__, pictures={name: partial(draw, name) for name in KINDS}, out=PICTURES)
