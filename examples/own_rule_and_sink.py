"""An alert rule and a sink of your own, without a base class. Needs ebmguard alone."""

from dataclasses import dataclass

import torch
from torch import nn

from ebmguard import guard
from ebmguard.alerts import DEFAULT_RULES, Level, Reading
from ebmguard.samplers import sgld


@dataclass(frozen=True)
class Drifting:  # WARN where the median energy of the data leaves [-limit, limit]
    limit: float = 1.0
    name: str = "drifting"

    def watcher(self):  # what keeps the state of a run; this rule has none
        return self

    def read(self, row):
        value = row.get("f_pos/median")
        if value is None:
            return Reading(None, None)  # the row does not tell
        if abs(value) <= self.limit:
            return Reading(None, True)  # nothing to say, all is calm
        advice = ("an L2 term on the energies",)
        return Reading(Level.WARN, False, "f_pos/median", value, self.limit, 1, advice)

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


class Printer:
    def write_row(self, step, scalars, histograms):
        if step % 50 == 0:
            print(f"step {step}: energy gap {scalars['energy_gap']:.3f}")

    def write_alert(self, record):
        print(f"{record['level']} {record['rule']} at step {record['step']}")

    def write_recovery(self, record):
        print(record["message"])

    def flush(self): ...


torch.manual_seed(0)
f = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 1))
rules = [*DEFAULT_RULES, Drifting()]
g = guard(None, sgld, rules=rules, sinks=[Printer()])
for shift in torch.linspace(0, 3, 151):  # energies that drift away
    x = torch.randn(128, 2)
    y = g.sampler(f, torch.randn(128, 2), steps=5, step_size=0.005, noise_std=0.1)
    g.loss(f(x) + shift, f(y) + shift)
