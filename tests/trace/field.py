"""Structures of trainers that people have, one function each, and the lines that are right.

The body of a function is a script. ``right`` are its lines by hand, old and new.
"""

# ruff: noqa: F821, F841
# mypy: ignore-errors

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

HEAD = """\
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(3)
D, B, K = 4, 16, 6


def net(out=1, inputs=D):
    return nn.Sequential(nn.Linear(inputs, 16), nn.SiLU(), nn.Linear(16, out))


def data():
    return 2 + torch.randn(B, D)


def climb(f, x):
    for _ in range(K):
        x = x.detach().requires_grad_()
        x = x + 0.02 * torch.autograd.grad(f(x).sum(), x)[0] + 0.2 * torch.randn_like(x)
    return x.detach()


def update(optim, loss):
    optim.zero_grad()
    loss.backward()
    optim.step()


"""


@dataclass
class Structure:
    """A trainer, and what is right."""

    body: Callable[[], None]
    right: dict[str, str]
    says: tuple[str, ...] = ()
    refused: str = ""  # by this name, and ``right`` is the way out
    again: bool = False  # the way out ends with another trace, which proves
    is_other: bool = False  # the way out is another loss

    def files(self, right: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """Its files with these edits, the script last."""
        lines = inspect.getsource(self.body).splitlines()
        start = next(at for at, line in enumerate(lines) if line.startswith("def ")) + 1
        *helper, script = textwrap.dedent("\n".join(lines[start:])).split("# script\n")
        name = f"of_{self.body.__name__}"
        files = {f"{name}.py": HEAD + each for each in helper}
        files["train.py"] = HEAD + f"from {name} import *\n\n" * len(helper) + script + "\n"
        for old, new in right.items():
            assert sum(text.count(old) for text in files.values()) == 1, old
            files = {file: text.replace(old, new) for file, text in files.items()}
        return files


STRUCTURES: dict[str, Structure] = {}


def is_right(right: dict[str, str], says: tuple[str, ...] = (), **more):
    """Keep the structure below with the lines that are right."""

    def keep(body: Callable[[], None]) -> Callable[[], None]:
        STRUCTURES[body.__name__] = Structure(body, right, says, **more)
        return body

    return keep


START = "optim = torch.optim.Adam(f.parameters(), 1e-3)\n"
MADE = START + "import ebmguard\n"
CLIMB = MADE + "loss_fn, climb = ebmguard.guard(None, climb, model=f)\n"


@is_right(
    {
        START: MADE + 'g = ebmguard.guard(None, None, output_scale=1, convention="energy")\n',
        "energy = f(adj, x)": "energy = g.temper(f(adj, x))",
        "f(adj, data()).mean() - f(adj, x).mean()": "g.loss(f(adj, data()), f(adj, x))",
    }
)
def two_arguments():
    class E(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net()

        def forward(self, adj, x):
            return self.body(x @ adj).squeeze(1)

    f = E()
    adj = torch.eye(D) + 0.1
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        x = torch.randn(B, D)
        for _ in range(K):
            x = x.detach().requires_grad_()
            energy = f(adj, x)
            x = x - 0.02 * torch.autograd.grad(energy.sum(), x)[0] + 0.2 * torch.randn_like(x)
        x = x.detach()
        update(optim, f(adj, data()).mean() - f(adj, x).mean())


@is_right(
    {
        "self.f, self.optim = f, torch.optim.Adam(f.parameters(), 1e-3)\n": (
            "self.f, self.optim = f, torch.optim.Adam(f.parameters(), 1e-3)\n"
            "        import ebmguard\n"
            "        self.loss_fn, self.sample = ebmguard.guard(\n"
            "            None, self.sample, model=self.f, convention='energy')\n"
        ),
        "loss = e_pos.mean() - e_neg.mean()\n        if self": (
            "loss = self.loss_fn(e_pos, e_neg)\n        if self"
        ),
    },
    says=("the same expression stands in line", "did not run"),
)
def prior_in_the_chain_and_a_branch():
    class Module:
        def __init__(self, f):
            self.f, self.optim = f, torch.optim.Adam(f.parameters(), 1e-3)
            self.steps = 0

        def sample(self):
            z = torch.randn(B, D)
            for _ in range(K):
                z = z.detach().requires_grad_()
                energy = self.f(z) + 0.5 * z.square().sum(1, keepdim=True)
                grad = torch.autograd.grad(energy.sum(), z)[0]
                z = z - 0.02 * grad + 0.2 * torch.randn_like(z)
            return z.detach()

        def training_step(self, x):
            e_pos, e_neg = self.f(x), self.f(self.sample())
            loss = e_pos.mean() - e_neg.mean()
            if self.steps > 20:
                loss = e_pos.mean() - e_neg.mean()
            self.steps += 1
            update(self.optim, loss)

    module = Module(net())
    for _ in range(30):
        module.training_step(data())


@is_right(
    {
        "self.optim = torch.optim.Adam(self.f.parameters(), 1e-3)\n": (
            "self.optim = torch.optim.Adam(self.f.parameters(), 1e-3)\n"
            "        import ebmguard\n"
            "        self.loss_fn, self.sample = ebmguard.guard(\n"
            "            None, self.sample, model=self.f)\n"
        ),
        "neg.mean() - pos.mean()": "self.loss_fn(pos, neg)",
    },
    says=("the sampler gives it 1 more than the loss, such as a class",),
)
def chains_of_a_class_and_halves_by_chunk():
    class Jem(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net(3)

        def forward(self, x, y=None):
            logits = self.body(x)
            return logits.logsumexp(1) if y is None else logits.gather(1, y[:, None])[:, 0]

    class Module:
        def __init__(self):
            self.f = Jem()
            self.optim = torch.optim.Adam(self.f.parameters(), 1e-3)

        def sample(self, y):
            x = torch.rand(B, D)
            for _ in range(K):
                x = x.detach().requires_grad_()
                grad = torch.autograd.grad(self.f(x, y).sum(), x)[0]
                x = x + 0.02 * grad + 0.2 * torch.randn_like(x)
            return x.detach()

        def training_step(self, x):
            q = self.sample(torch.randint(0, 3, (B,)))
            pos, neg = self.f(torch.cat([x, q])).chunk(2)
            loss = neg.mean() - pos.mean()
            loss = loss + 0.1 * (pos.square().mean() + neg.square().mean())
            update(self.optim, loss)

    module = Module()
    for _ in range(30):
        module.training_step(data())


@is_right(
    {
        START: MADE + 'loss_fn, sample = ebmguard.guard(None, sample, model=f, energy="score")\n',
        "-(pos.mean() - neg.mean())": "loss_fn(pos, neg)",
    }
)
def logits_and_energy_from_forward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.classes = net(8), nn.Linear(8, 1), nn.Linear(8, 3)

        def score(self, x):
            return self.head(self.body(x)).squeeze(1)

        def forward(self, x):
            h = self.body(x)
            return self.classes(h), self.head(h).squeeze(1)

    def sample(f, x):
        for _ in range(K):
            x = x.detach().requires_grad_()
            grad = torch.autograd.grad(f.score(x).sum(), x)[0]
            x = x + 0.02 * grad + 0.2 * torch.randn_like(x)
        return x.detach()

    f = Model()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        x, y = data(), torch.randint(0, 3, (B,))
        q = sample(f, torch.randn(B, D))
        logits, pos = f(x)
        _, neg = f(q)
        update(optim, -(pos.mean() - neg.mean()) + F.cross_entropy(logits, y))


@is_right(
    {
        START: MADE + "g = ebmguard.guard(None, None, output_scale=1)\n",
        "f(x)[0].sum()": "g.temper(f(x)[0]).sum()",
        "-(pos.mean() - neg.mean())": "g.loss(pos, neg)",
    }
)
def energy_and_logits_in_a_tuple():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.classes = net(8), nn.Linear(8, 1), nn.Linear(8, 3)

        def forward(self, x):
            h = self.body(x)
            return self.head(h).squeeze(1), self.classes(h)

    def sample(f, x):
        for _ in range(K):
            x = x.detach().requires_grad_()
            grad = torch.autograd.grad(f(x)[0].sum(), x)[0]
            x = x + 0.02 * grad + 0.2 * torch.randn_like(x)
        return x.detach()

    f = Model()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        q = sample(f, torch.randn(B, D))
        (pos, logits), (neg, _) = f(data()), f(q)
        y = torch.randint(0, 3, (B,))
        update(optim, -(pos.mean() - neg.mean()) + F.cross_entropy(logits, y))


@is_right(
    {
        START: MADE + "g = ebmguard.guard(None, None, output_scale=1)\n",
        'energy = out["energy"]': 'energy = g.temper(out["energy"])',
        'f(q)["energy"].mean() - f(data())["energy"].mean()': (
            'g.loss(f(data())["energy"], f(q)["energy"])'
        ),
    }
)
def energy_in_a_dictionary():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net()

        def forward(self, x):
            return {"energy": self.body(x).squeeze(1), "norm": x.square().sum(1)}

    def sample(f, x):
        for _ in range(K):
            x = x.detach().requires_grad_()
            out = f(x)
            energy = out["energy"]
            grad = torch.autograd.grad(energy.sum(), x)[0]
            x = x + 0.02 * grad + 0.2 * torch.randn_like(x)
        return x.detach()

    f = Model()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        q = sample(f, torch.randn(B, D))
        update(optim, f(q)["energy"].mean() - f(data())["energy"].mean())


@is_right(
    {START: CLIMB, "f(q).mean() - f(data()).mean()": "loss_fn(f(data()), f(q))"},
    says=("output_scale=1 ",),
)
def two_steps_a_call():
    K = 2
    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        update(optim, f(q).mean() - f(data()).mean())


@is_right({START: CLIMB, "loss = -(fp.mean() - fq.mean())": "loss = loss_fn(fp, fq)"})
def squares_of_the_energies_beside():
    f = net()
    nn.init.constant_(f[2].bias, 3)
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        fp, fq = f(data()), f(q)
        loss = -(fp.mean() - fq.mean())
        loss += fp.square().mean() + fq.square().mean()
        update(optim, loss)


@is_right(
    {
        START: MADE + "loss_fn, climb = ebmguard.guard(None, climb, model=f)\n",
        "fq = f(q)\n": "fq = f(q)\n    fp_cd, fq_cd = loss_fn.guard.reweight(fp, fq)\n",
        "loss = fp.square().mean() - fp.mean() + fq.mean()": (
            "loss = fp.square().mean() - fp_cd.mean() + fq_cd.mean()"
        ),
    }
)
def squares_in_the_same_expression():
    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        fp = f(data())
        fq = f(q)
        loss = fp.square().mean() - fp.mean() + fq.mean()
        update(optim, loss)


@is_right(
    {
        START: MADE + "loss_fn, sample = ebmguard.guard(None, sample, model=f)\n",
        "loss = -(fp.mean() - fq.mean())": "loss = loss_fn(fp, fq)",
    },
    says=("gradient steps without noise",),
)
def squares_and_no_noise():
    def sample(f, x):
        for _ in range(K):
            x = x.detach().requires_grad_()
            x = x + 0.2 * torch.autograd.grad(f(x).sum(), x)[0]
        return x.detach()

    f = net()
    nn.init.constant_(f[2].bias, 3)
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        q = sample(f, torch.randn(B, D))
        fp, fq = f(data()), f(q)
        loss = -(fp.mean() - fq.mean())
        loss += fp.square().mean() + fq.square().mean()
        update(optim, loss)


@is_right(
    {
        "sampler = Langevin()\n": (
            "sampler = Langevin()\n    import ebmguard\n    loss_fn, sampler.draw = ebmguard.guard("
            "None, sampler.draw, model=f)\n"
        ),
        "-(f(data()).mean() - f(q).mean())": "loss_fn(f(data()), f(q))",
    }
)
def a_local_name_that_is_an_attribute_too():
    from types import SimpleNamespace

    class Langevin:
        def draw(self, f, x):
            return climb(f, x)

    def main(args):
        f = net()
        optim = torch.optim.Adam(f.parameters(), 1e-3)
        sampler = Langevin()
        assert args.sampler
        for _ in range(30):
            q = sampler.draw(f, torch.randn(B, D))
            update(optim, -(f(data()).mean() - f(q).mean()))

    main(SimpleNamespace(sampler="sgld"))


@is_right(
    {
        "sampler = Flips()\n": (
            "sampler = Flips()\n    import ebmguard\n    loss_fn, sampler.step = ebmguard.guard("
            "None, sampler.step, model=f, sampler_scale=1.0)\n"
        ),
        "f(q).mean() - f(bits()).mean()": "loss_fn(f(bits()), f(q))",
    },
    says=("discrete samples",),
)
def a_discrete_sampler_whose_steps_are_a_loop():
    class Flips:
        def step(self, x, f):
            x = x.detach().requires_grad_()
            d = torch.autograd.grad(f(x).sum(), x)[0] * -(2 * x - 1) / 2
            flips = torch.distributions.OneHotCategorical(logits=d.detach()).sample()
            return ((1 - x) * flips + x * (1 - flips)).detach()

    def bits():
        return torch.randint(0, 2, (B, 40)).float()

    def main():
        f = net(1, 40)
        optim = torch.optim.Adam(f.parameters(), 1e-3)
        sampler = Flips()
        q = bits()
        for _ in range(30):
            for _ in range(K):
                q = sampler.step(q, f)
            update(optim, f(q).mean() - f(bits()).mean())

    main()


POTENTIAL = 'g = ebmguard.guard(None, None, output_scale=1, convention="energy")\n'


@is_right(
    {
        START: MADE + POTENTIAL,
        "torch.autograd.grad(potential(f, x).sum(), x)": (
            "torch.autograd.grad(g.temper(potential(f, x)).sum(), x)"
        ),
        "neg = potential(f, sample(f, torch.randn(B, D)))\n": (
            "neg = potential(f, sample(f, torch.randn(B, D)))\n"
            "    pos_cd, neg_cd = g.reweight(pos, neg)\n"
        ),
        "kept = neg.sort()": "kept = neg_cd.sort()",
        "pos.mean() - kept.mean()": "pos_cd.mean() - kept.mean()",
    },
    says=("not affine in these", "the loss is not affine in this difference"),
)
def ten_times_a_network_with_a_trimmed_mean_and_a_clamp():
    def potential(f, x):
        return 10 * f(x).squeeze(1)

    def sample(f, x):
        for _ in range(K):
            x = x.detach().requires_grad_()
            grad = torch.autograd.grad(potential(f, x).sum(), x)[0]
            x = x - 0.02 * grad + 0.2 * torch.randn_like(x)
        return x.detach()

    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        x = data().requires_grad_()
        velocity = torch.autograd.grad(potential(f, x).sum(), x, create_graph=True)[0]
        flow = (velocity + x.detach()).square().mean()
        pos = potential(f, data())
        neg = potential(f, sample(f, torch.randn(B, D)))
        kept = neg.sort()[0][1:-1]
        contrast = pos.mean() - kept.mean()
        update(optim, flow + 0.1 * contrast.clamp(min=-50.0))


@is_right(
    {
        START: MADE + 'loss_fn, sample = ebmguard.guard(None, sample, model=f, energy="potential", '
        'convention="energy")\n',
        "flow + (pos.mean() - neg.mean())": "flow + loss_fn(pos, neg)",
    }
)
def ten_times_a_network_in_a_method():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def potential(self, x):
            return 10 * self.net(x).squeeze(1)

    def sample(f, x):
        for _ in range(K):
            x = x.detach().requires_grad_()
            grad = torch.autograd.grad(f.potential(x).sum(), x)[0]
            x = x - 0.02 * grad + 0.2 * torch.randn_like(x)
        return x.detach()

    f = Model()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        x = data().requires_grad_()
        flow = torch.autograd.grad(f.potential(x).sum(), x, create_graph=True)[0].square().mean()
        pos, neg = f.potential(data()), f.potential(sample(f, torch.randn(B, D)))
        update(optim, flow + (pos.mean() - neg.mean()))


@is_right(
    {
        START: MADE + "loss_fn, sample = ebmguard.guard(None, sample, model=f, "
        'sampler_scale=1.0, convention="energy")\n',
        "f(z_pos).mean() - f(z).mean()": "loss_fn(f(z_pos), f(z))",
    },
    says=("more than the gradient and the noise",),
)
def two_more_terms_in_the_chain():
    decoder, encoder = nn.Linear(D, 6), nn.Linear(6, D)

    def sample(f, x, z):
        for _ in range(K):
            z = z.detach().requires_grad_()
            energy = torch.autograd.grad(f(z).sum(), z)[0]
            fit = torch.autograd.grad((decoder(z) - x).square().sum(), z)[0]
            prior = torch.autograd.grad(0.5 * z.square().sum(), z)[0]
            z = z - 0.02 * (energy + fit + prior) + 0.2 * torch.randn_like(z)
        return z.detach()

    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        x = torch.randn(B, 6)
        z = sample(f, x, torch.randn(B, D))
        z_pos = encoder(x).detach()
        update(optim, f(z_pos).mean() - f(z).mean())


@is_right(
    {
        START: MADE + 'loss_fn, sample = ebmguard.guard(None, sample, model=f, energy="energy", '
        'convention="energy")\n',
        "f.energy(z_pos).mean() - f.energy(z).mean()": "loss_fn(f.energy(z_pos), f.energy(z))",
    }
)
def minus_a_logsumexp_of_heads_in_a_method():
    class Prior(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = net(5)

        def energy(self, z):
            return -self.heads(z).logsumexp(1)

    def sample(f, z):
        for _ in range(K):
            z = z.detach().requires_grad_()
            grad = torch.autograd.grad(f.energy(z).sum(), z)[0]
            z = z - 0.02 * grad + 0.2 * torch.randn_like(z)
        return z.detach()

    f = Prior()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        z_pos, z = data(), sample(f, torch.randn(B, D))
        update(optim, f.energy(z_pos).mean() - f.energy(z).mean())


@is_right({START: CLIMB, "f(q).mean() - f(data()).mean()": "loss_fn(f(data()), f(q))"})
def a_wrapper_around_the_network():
    class Parallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args):
            return self.module(*args)

    f = Parallel(net())
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        update(optim, f(q).mean() - f(data()).mean())


@is_right(
    {
        START: CLIMB,
        "fq = f(q)\n": "fq = f(q)\n    fp_cd, fq_cd = loss_fn.guard.reweight(fp, fq)\n",
        "loss = loss + fq.mean()": "loss = loss + fq_cd.mean()",
        "loss -= fp.mean()": "loss -= fp_cd.mean()",
    }
)
def added_up_in_place():
    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        fp = f(data())
        fq = f(q)
        loss = torch.zeros(())
        loss = loss + fq.mean()
        loss -= fp.mean()
        update(optim, loss)


@is_right(
    {
        START: CLIMB,
        "fq = f(q)\n": "fq = f(q)\n    fp_cd, fq_cd = loss_fn.guard.reweight(fp, fq)\n",
        "rest + fq.mean() - fp.mean()": "rest + fq_cd.mean() - fp_cd.mean()",
    }
)
def another_term_in_the_same_sum():
    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        fp = f(data())
        fq = f(q)
        rest = sum(p.square().sum() for p in f.parameters())
        update(optim, rest + fq.mean() - fp.mean())


@is_right({START: CLIMB, "e[~real].mean() - e[real].mean()": "loss_fn(e[real], e[~real])"})
def halves_by_a_mask():
    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    real = torch.arange(2 * B) < B
    for _ in range(30):
        x, q = data(), climb(f, torch.randn(B, D))
        e = f(torch.cat([x, q])).squeeze(1)
        update(optim, e[~real].mean() - e[real].mean())


@is_right({START: CLIMB, "value = fp.mean() - fq.mean()": "value = -loss_fn(fp, fq)"})
def maximised_by_hand():
    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        fp, fq = f(data()), f(climb(f, torch.randn(B, D)))
        value = fp.mean() - fq.mean()
        optim.zero_grad()
        (-value).backward()
        optim.step()


@is_right(
    {
        "sampler = Langevin(f)\n": (
            "sampler = Langevin(f)\nimport ebmguard\n"
            "loss_fn, sampler = ebmguard.guard(None, sampler, model=f)\n"
        ),
        "f(q).mean() - f(data()).mean()": "loss_fn(f(data()), f(q))",
    }
)
def a_sampler_that_is_called():
    class Langevin:
        def __init__(self, f):
            self.f = f

        def __call__(self, x):
            return climb(self.f, x)

    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    sampler = Langevin(f)
    for _ in range(30):
        q = sampler(torch.randn(B, D))
        update(optim, f(q).mean() - f(data()).mean())


@is_right({START: CLIMB, "f(q).mean() - f(data()).mean()": "loss_fn(f(data()), f(q))"})
def a_sampler_that_is_an_argument():
    def train_step(f, optim, draws):
        q = draws(f, torch.randn(B, D))
        update(optim, f(q).mean() - f(data()).mean())

    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        train_step(f, optim, climb)


@is_right({START: CLIMB, "return b.mean() - a.mean()": "return loss_fn(a, b)"})
def a_loss_of_energies_alone():
    def contrast(a, b):
        return b.mean() - a.mean()

    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        update(optim, contrast(f(data()), f(q)))


@is_right({START: CLIMB, "fq.sum() / B - fp.sum() / B": "loss_fn(fp, fq)"})
def sums_by_the_number_of_samples():
    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        fp, fq = f(data()), f(climb(f, torch.randn(B, D)))
        update(optim, fq.sum() / B - fp.sum() / B)


@is_right({START: CLIMB, "torch.mean(fq - fp)": "loss_fn(fp, fq)"})
def the_mean_of_a_difference():
    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        fp, fq = f(data()), f(climb(f, torch.randn(B, D)))
        update(optim, torch.mean(fq - fp))


@is_right(
    {
        START: MADE + "g = ebmguard.guard(None, None, output_scale=1)\n",
        "self.net(x).logsumexp(1) - 0.5 * x.square().sum(1)": (
            "g.temper(self.net(x).logsumexp(1)) - 0.5 * x.square().sum(1)"
        ),
        "f(q).logsumexp(1).mean() - f(x).logsumexp(1).mean()": (
            "g.loss(f(x).logsumexp(1), f(q).logsumexp(1))"
        ),
    }
)
def a_term_that_the_loss_has_not():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net(3)

        def forward(self, x):
            return self.net(x)

        def log_prob(self, x):
            return self.net(x).logsumexp(1) - 0.5 * x.square().sum(1)

    def sample(f, x):
        for _ in range(K):
            x = x.detach().requires_grad_()
            grad = torch.autograd.grad(f.log_prob(x).sum(), x)[0]
            x = x + 0.02 * grad + 0.2 * torch.randn_like(x)
        return x.detach()

    f = Model()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        x, q = data(), sample(f, torch.randn(B, D))
        update(optim, f(q).logsumexp(1).mean() - f(x).logsumexp(1).mean())


@is_right(
    {
        START: MADE + "g_ = ebmguard.guard(None, None, output_scale=1)\n",
        "torch.autograd.grad(f(x).logsumexp(1).sum(), x)": (
            "torch.autograd.grad(g_.temper(f(x).logsumexp(1)).sum(), x)"
        ),
        "f(q).logsumexp(1).mean() - f(x).logsumexp(1).mean()": (
            "g_.loss(f(x).logsumexp(1), f(q).logsumexp(1))"
        ),
    }
)
def a_name_that_the_trainer_has_already():
    def sample(f, x):
        for _ in range(K):
            x = x.detach().requires_grad_()
            g = torch.autograd.grad(f(x).logsumexp(1).sum(), x)[0]
            x = x + 0.02 * g + 0.2 * torch.randn_like(x)
        return x.detach()

    f = net(3)
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        x, q = data(), sample(f, torch.randn(B, D))
        update(optim, f(q).logsumexp(1).mean() - f(x).logsumexp(1).mean())


@is_right(
    {
        START: CLIMB,
        "fq = f(q)\n": "fq = f(q)\n    fp_cd, fq_cd = loss_fn.guard.reweight(fp, fq)\n",
        "+ fp - fq": "+ fp_cd - fq_cd",
    }
)
def squares_that_meet_first():
    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        fp = f(data())
        fq = f(q)
        update(optim, -torch.sum(-(0.1 * (fp**2 + fq**2)) + fp - fq, dim=0) / B)


@is_right(
    {
        "        sampler = self.samplers": (
            "        import ebmguard\n        sampler = self.samplers"
        ),
        '["sgld"]\n        for': (
            '["sgld"]\n        loss_fn, sampler = ebmguard.guard(None, sampler, model=self.f'
            ")\n        for"
        ),
        "self.f(q).mean() - self.f(data()).mean()": "loss_fn(self.f(data()), self.f(q))",
    }
)
def a_local_sampler_and_the_energy_of_self():
    class Trainer:
        def __init__(self):
            self.f, self.samplers = net(), {"sgld": self.langevin}

        def langevin(self, x):
            return climb(self.f, x)

        def fit(self):
            optim = torch.optim.Adam(self.f.parameters(), 1e-3)
            sampler = self.samplers["sgld"]
            for _ in range(30):
                q = sampler(torch.randn(B, D))
                update(optim, self.f(q).mean() - self.f(data()).mean())

    Trainer().fit()


@is_right(
    {
        "for _ in range(30):\n": (
            "import ebmguard\nloss_fn, sample = ebmguard.guard(None, sample, model=f"
            ")\nfor _ in range(30):\n"
        ),
        "f(q).mean() - f(data()).mean()": "loss_fn(f(data()), f(q))",
    },
    says=("output_scale=1 ",),
)
def a_burn_in_with_other_steps():
    def sample(f, x, step=0.02):
        for _ in range(K):
            x = x.detach().requires_grad_()
            x = x + step * torch.autograd.grad(f(x).sum(), x)[0] + 0.2 * torch.randn_like(x)
        return x.detach()

    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    q = sample(f, torch.randn(B, D), 0.2)
    for _ in range(30):
        q = sample(f, q)
        update(optim, f(q).mean() - f(data()).mean())


@is_right(
    {
        "for _epoch in range(3):\n": (
            "import ebmguard\nloss_fn, climb = ebmguard.guard(None, climb, model=f)\n"
            "for _epoch in range(3):\n"
        ),
        "f(q).mean() - f(data()).mean()": "loss_fn(f(data()), f(q))",
    },
    says=("attached: model=f, optimizer=optim",),
)
def an_epoch_that_is_given_a_function():
    def train_one_epoch(f, draws, optim):
        for _ in range(4):
            q = draws(f, torch.randn(B, D))
            update(optim, f(q).mean() - f(data()).mean())

    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _epoch in range(3):
        train_one_epoch(f, climb, optim)


@is_right(
    {
        "    sgld = Langevin(f)\n": (
            "    sgld = Langevin(f)\n    import ebmguard\n    global loss_fn\n"
            "    loss_fn, sgld.draw = ebmguard.guard(None, sgld.draw, model=f)\n"
        ),
        "f(q).mean() - f(data()).mean()": "loss_fn(f(data()), f(q))",
    }
)
def an_epoch_that_is_given_an_object_of_another_function():
    class Langevin:
        def __init__(self, f):
            self.f = f

        def draw(self, x):
            return climb(self.f, x)

    def train_one_epoch(f, sampler, optim):
        for _ in range(4):
            q = sampler.draw(torch.randn(B, D))
            update(optim, f(q).mean() - f(data()).mean())

    def main():
        f = net()
        optim = torch.optim.Adam(f.parameters(), 1e-3)
        sgld = Langevin(f)
        for _epoch in range(3):
            train_one_epoch(f, sgld, optim=optim)

    main()


@is_right(
    {
        "return torch.autograd.grad(f(x)": "return torch.autograd.grad(g.temper(f(x))",
        "f = net()\n": (
            "f = net()\nimport ebmguard\ng = ebmguard.guard(None, None, output_scale=1)\n"
        ),
        "self.f(q).mean() - self.f(data()).mean()": "g.loss(self.f(data()), self.f(q))",
    },
    says=("attached: nothing; without optimizer=",),
)
def a_trainer_that_is_made_for_each_epoch():
    def slope(f, x):
        return torch.autograd.grad(f(x).sum(), x)[0]

    class Trainer:
        def __init__(self, f):
            self.f, self.optim = f, torch.optim.Adam(f.parameters(), 1e-3)

        def draw(self, x):
            for _ in range(K):
                x = x.detach().requires_grad_()
                x = x + 0.02 * slope(self.f, x) + 0.2 * torch.randn_like(x)
            return x.detach()

        def fit(self):
            for _ in range(4):
                q = self.draw(torch.randn(B, D))
                update(self.optim, self.f(q).mean() - self.f(data()).mean())

    f = net()
    for _epoch in range(3):
        Trainer(f).fit()


@is_right(
    {
        START: MADE + "g = ebmguard.guard(None, None, output_scale=1)\n",
        "torch.autograd.grad(f(torch.cat([h(x), z], 1)).sum(), z)": (
            "torch.autograd.grad(g.temper(f(torch.cat([h(x), z], 1))).sum(), z)"
        ),
        "f(torch.cat([h(x), z], 1)).mean() - f(torch.cat([h(x), y], 1)).mean()": (
            'g.loss(f(torch.cat([h(x), y], 1)), f(torch.cat([h(x), z], 1)), groups="rows")'
        ),
    }
)
def what_an_encoder_makes_of_the_condition():
    h, f = nn.Linear(3, 2), net(1, D + 2)
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    optim.add_param_group({"params": h.parameters()})
    for _ in range(30):
        x, y, z = torch.randn(B, 3), data(), torch.randn(B, D)
        for _ in range(K):
            z = z.detach().requires_grad_()
            grad = torch.autograd.grad(f(torch.cat([h(x), z], 1)).sum(), z)[0]
            z = z + 0.02 * grad + 0.2 * torch.randn_like(z)
        z = z.detach()
        update(optim, f(torch.cat([h(x), z], 1)).mean() - f(torch.cat([h(x), y], 1)).mean())


@is_right(
    {
        START: MADE + "loss_fn, draw = ebmguard.guard(None, draw, model=f)\n",
        "b.mean() - a.mean()": 'loss_fn(a, b.reshape(-1, 8), groups="rows")',
    }
)
def eight_negatives_for_each_condition_in_one_batch():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net(1, 2 * D + 2)

        def forward(self, y, x):
            return self.net(torch.cat([x, y], 1))

    def draw(f, x, z):
        for _ in range(K):
            z = z.detach().requires_grad_()
            z = z + 0.02 * torch.autograd.grad(f(z, x).sum(), z)[0] + 0.2 * torch.randn_like(z)
        return z.detach()

    f = Net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        x, y = torch.randn(B, D + 2), data()
        many = x.repeat_interleave(8, 0)
        z = draw(f, many, torch.randn(8 * B, D))
        b = f(z, many)
        a = f(y, x)
        update(optim, b.mean() - a.mean())


@is_right(
    {
        START: MADE + "loss_fn, f = ebmguard.guard(None, f, model=f.net)\n",
        "f.net(z).mean() - f.net(x).mean()": "loss_fn(f.net(x), f.net(z))",
    }
)
def a_network_that_samples():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, z):
            z = z.requires_grad_()
            for _ in range(K):
                z = z + 0.02 * torch.autograd.grad(self.net(z).sum(), z)[0]
                z = z + 0.2 * torch.randn_like(z)
            return z

    f = Model()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        x, z = data(), f(torch.randn(B, D))
        update(optim, f.net(z).mean() - f.net(x).mean())


@is_right(
    {
        START: MADE + "g = ebmguard.guard(None, None, output_scale=1)\n",
        "torch.autograd.grad(f(x).sum(), x)[0] + 0.2 * torch.randn(B, D)": (
            "torch.autograd.grad(g.temper(f(x)).sum(), x)[0] + 0.2 * torch.randn(B, D)"
        ),
        "one = f(q).mean() - f(x).mean()": "one = g.loss(f(x), f(q))",
        "two = f(r).mean() - f(x).mean()": "two = g.loss(f(x), f(r))",
    }
)
def two_chains_of_one_step_and_their_losses():
    def step_of(f, x):
        x = x.detach().requires_grad_()
        x = x + 0.02 * torch.autograd.grad(f(x).sum(), x)[0] + 0.2 * torch.randn(B, D)
        return x.detach()

    f = net()
    optim = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(30):
        x, q, r = data(), torch.randn(B, D), 3 * torch.rand(B, D)
        for _ in range(K):
            q = step_of(f, q)
        for _ in range(K):
            r = step_of(f, r)
        one = f(q).mean() - f(x).mean()
        two = f(r).mean() - f(x).mean()
        update(optim, one + 0.5 * two)
