"""Structures of trainers that people have, one function each, and the lines that are right.

The body of a function is a script, which imports what stands above ``# script``. Where it has no
loop, it ends with ``LOOP``; where no optimizer is made, Adam of ``f`` stands before, and ``f``.
``right`` are its lines by hand, old and new, and ``guard`` is the line below ``at``.
"""

# ruff: noqa: B023, F821, F841
# mypy: ignore-errors

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


def climb(f, x, step=0.02):
    for _ in range(K):
        x = x.detach().requires_grad_()
        x = x + step * torch.autograd.grad(f(x).sum(), x)[0] + 0.2 * torch.randn_like(x)
    return x.detach()


def update(optim, loss):
    optim.zero_grad()
    loss.backward()
    optim.step()


class Model(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.net = net(*shape)

    def forward(self, x):
        return self.net(x)


class Pairs(Model):
    def forward(self, x, y):
        return self.net(torch.stack([x.expand_as(y), y], -1)).squeeze(-1)


"""
START = "optim = torch.optim.Adam(f.parameters(), 1e-3)\n"
DIFFERENCE = "f(q).mean() - f(data()).mean()"
LOOP = f"""\
for _ in range(30):
    q = climb(f, torch.randn(B, D))
    update(optim, {DIFFERENCE})
"""
SCALED = "None, output_scale=1"


@dataclass
class Structure:
    """A trainer, and what is right."""

    body: Callable[[], None]
    right: Mapping[str, str]
    guard: str  # its line
    at: str  # in the line above
    says: tuple[str, ...] = ()
    refused: str = ""  # by this name, and ``right`` is the way out
    again: bool = False  # the way out ends with another trace, which proves
    is_other: bool = False  # the way out is another loss

    def files(self, *, is_right: bool = False) -> dict[str, str]:
        """Its files, as they are or with what is right, the script last."""
        lines = inspect.getsource(self.body).splitlines()
        start = next(at for at, line in enumerate(lines) if line.startswith("def ")) + 1
        *helper, script = textwrap.dedent("\n".join(lines[start:])).split("# script\n")
        script += f"\n{LOOP}" * (not re.search(r"backward\(|update\(", script))
        if "optim = " not in script:
            made = START if re.search(r"^(\w+, )*f\b.* = ", script, re.M) else f"f = net()\n{START}"
            script = re.sub(r"^for ", f"{made}for ", script, count=1, flags=re.M)
        name = f"of_{self.body.__name__}"
        files = {f"{name}.py": HEAD + each for each in helper}
        files["train.py"] = HEAD + f"from {name} import *\n\n" * len(helper) + script + "\n"
        for old, new in self.right.items() if is_right else ():
            assert sum(text.count(old) for text in files.values()) == 1, old
            files = {file: text.replace(old, new) for file, text in files.items()}
        if is_right and self.guard:
            line = rf"^( *)(.*{re.escape(self.at.strip())}.*\n)"
            new = rf"\1\2\1import ebmguard\n\1{self.guard}\n"
            assert sum(len(re.findall(line, text, re.M)) for text in files.values()) == 1, self.at
            files = {file: re.sub(line, new, text, flags=re.M) for file, text in files.items()}
        return files


LOSS = {DIFFERENCE: "loss_fn(f(data()), f(q))"}
STRUCTURES: dict[str, Structure] = {}


def is_right(right: Mapping[str, str] = LOSS, guard="climb, model=f", at=START, **more):
    """Keep the structure below with the lines that are right.

    Of ``guard`` what begins with ``None`` is beside a loop; a line of its own is as it is.
    """
    name, *_ = guard.split(",")
    targets = "g" if name == "None" else f"{'self.' * name.startswith('self.')}loss_fn, {name}"
    line = f"{targets} = ebmguard.guard(None, {guard})" if guard and "(" not in guard else guard

    def keep(body: Callable[[], None]) -> Callable[[], None]:
        STRUCTURES[body.__name__] = Structure(body, right, line, at, **more)
        return body

    return keep


# As JEM: classes, a closure as the sampler, a likelihood beside, means before the difference.
@is_right(
    {"l_p_x = -(fp - fq)": "l_p_x = loss_fn(fp_all, fq_all)"},
    "sample_q, model=f",
    says=(
        "called at train.py:80: x_q = sample_q(f, replay_buffer)",
        "loss at train.py:85 (3 times): l_p_x = -(fp - fq)",
        'optimizer=optim, log_dir="runs/1")  # output_scale=20_000, measured',
    ),
)
def jem():
    class CCF(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.class_output = net(8), nn.Linear(8, 3)

        def classify(self, x):
            return self.class_output(self.f(x)).squeeze()

        def forward(self, x, y=None):
            logits = self.classify(x)
            return logits.logsumexp(1) if y is None else torch.gather(logits, 1, y[:, None])

    def get_sample_q():
        def sample_q(f, replay_buffer, y=None):
            f.eval()
            chosen = torch.randint(0, len(replay_buffer), (B,))
            x_k = torch.autograd.Variable(replay_buffer[chosen], requires_grad=True)
            for _ in range(K):
                f_prime = torch.autograd.grad(f(x_k, y=y).sum(), [x_k], retain_graph=True)[0]
                x_k.data += 1.0 * f_prime + 0.01 * torch.randn_like(x_k)
            f.train()
            replay_buffer[chosen] = x_k.detach()
            return x_k.detach()

        return sample_q

    def main():
        f = CCF()
        sample_q = get_sample_q()
        optim = torch.optim.Adam(f.class_output.parameters(), 1e-3)
        optim = torch.optim.Adam(f.parameters(), 1e-3)
        replay_buffer = torch.rand(200, D)
        for _ in range(5):
            for _ in range(20):
                x_p_d, y = data(), torch.randint(0, 3, (B,))
                L = 0.0
                x_q = sample_q(f, replay_buffer)
                fp_all = f(x_p_d)
                fq_all = f(x_q)
                fp = fp_all.mean()
                fq = fq_all.mean()
                l_p_x = -(fp - fq)
                L += 1.0 * l_p_x
                L += nn.CrossEntropyLoss()(f.classify(x_p_d), y)
                update(optim, L)

    main()


# As PyTorch ports of IGEBM: the loop stands beside the loss, the energy descends, and is bounded.
@is_right(
    {
        "neg_out = model(neg_img)\n            neg_out.sum": (
            "neg_out = g.temper(model(neg_img))\n            neg_out.sum"
        ),
        "loss + (pos_out - neg_out)": "loss + g.loss(pos_out, neg_out)",
    },
    'None, output_scale=100, convention="energy"',
    "optim = torch.optim.Adam(model.parameters(), 1e-3)",
    says=("its loop stands beside the loss", "loss = loss + g.loss(pos_out, neg_out)"),
)
def igebm():
    def train():
        model = net()
        optim = torch.optim.Adam(model.parameters(), 1e-3)
        noise = torch.empty(B, D)
        for _ in range(100):
            pos_img, neg_img = data(), torch.rand(B, D)
            neg_img.requires_grad = True
            for _ in range(K):
                noise.normal_(0, 0.1)
                neg_img.data.add_(noise)
                neg_out = model(neg_img)
                neg_out.sum().backward()
                neg_img.data.add_(neg_img.grad, alpha=-0.5)
                neg_img.grad.detach_()
                neg_img.grad.zero_()
            neg_img = neg_img.detach()
            model.zero_grad()
            pos_out = model(pos_img)
            neg_out = model(neg_img)
            loss = 1.0 * (pos_out**2 + neg_out**2)
            loss = loss + (pos_out - neg_out)
            loss = loss.mean()
            loss.backward()
            optim.step()

    train()


# As latent EBMs: one chain for the prior, one for the posterior, nested functions.
@is_right(
    {
        "en_neg = netE(z_e_k.detach()).mean()": "en_neg = netE(z_e_k.detach())",
        "en_pos = netE(z_g_k.detach()).mean()": "en_pos = netE(z_g_k.detach())",
        "loss_e = en_pos - en_neg": "loss_e = loss_fn(en_pos, en_neg)",
        "\n    train()": (
            "\n    import ebmguard\n    loss_fn, sample_langevin_prior_z = ebmguard.guard("
            'None, sample_langevin_prior_z, model=netE, convention="energy")\n    train()'
        ),
    },
    "",
    says=(
        "samples of `sample_langevin_post_z of netE`",
        'optimizer=optE, convention="energy", log_dir="runs/1")  # output_scale=1, measured',
    ),
)
def a_latent_model():
    def main():
        netG, netE = nn.Linear(D, 6), net()
        optE = torch.optim.Adam(netE.parameters(), 1e-3)
        optG = torch.optim.Adam(netG.parameters(), 1e-3)
        mse = nn.MSELoss(reduction="sum")

        def sample_langevin_post_z(z, x, netG, netE):
            z = z.clone().detach().requires_grad_(True)
            for _ in range(K):
                g_log_lkhd = 0.5 * mse(netG(z), x)
                z_grad_g = torch.autograd.grad(g_log_lkhd, z)[0]
                en = netE(z)
                z_grad_e = torch.autograd.grad(en.sum(), z)[0]
                z.data = z.data - 0.5 * 0.1**2 * (z_grad_g + z_grad_e + z.data)
                z.data += 0.1 * torch.randn_like(z).data
            return z.detach()

        def sample_langevin_prior_z(z, netE):
            z = z.clone().detach().requires_grad_(True)
            for _ in range(K):
                en = netE(z)
                z_grad = torch.autograd.grad(en.sum(), z)[0]
                z.data = z.data - 0.5 * 0.4**2 * (z_grad + z.data)
                z.data += 0.4 * torch.randn_like(z).data
            return z.detach()

        def train():
            for _ in range(100):
                x = torch.randn(B, 6)
                z_e_0, z_g_0 = torch.randn(B, D), torch.randn(B, D)
                z_e_k = sample_langevin_prior_z(z_e_0, netE)
                z_g_k = sample_langevin_post_z(z_g_0, x, netG, netE)
                update(optG, mse(netG(z_g_k.detach()), x) / B)
                optE.zero_grad()
                en_neg = netE(z_e_k.detach()).mean()
                en_pos = netE(z_g_k.detach()).mean()
                loss_e = en_pos - en_neg
                loss_e.backward()
                optE.step()

        train()

    main()


# As cooperative networks: the chain starts from a generator, energies are (B, z), sums over few.
@is_right(
    {
        "(revised_feature.mean(0) - obs_feature.mean(0)).sum()": (
            "self.loss_fn(obs_feature, revised_feature).sum()"
        )
    },
    "self.langevin_dynamics_descriptor, model=self.descriptor",
    "self.gen_optimizer = ",
    says=("model=self.descriptor, optimizer=self.des_optimizer, log_dir",),
)
def cooperative_networks():
    class Coop:
        def __init__(self):
            self.generator, self.descriptor = nn.Linear(2, D), net(3)
            self.des_optimizer = torch.optim.Adam(self.descriptor.parameters(), 1e-3)
            self.gen_optimizer = torch.optim.Adam(self.generator.parameters(), 1e-3)

        def langevin_dynamics_descriptor(self, x):
            for _ in range(K):
                noise = torch.randn(B, D)
                x = torch.autograd.Variable(x.data, requires_grad=True)
                feature = self.descriptor(x)
                grad = torch.autograd.grad(feature, x, torch.ones_like(feature))[0]
                x = x - 0.5 * 0.2**2 * (x / 0.5**2 - grad)
                x += 0.2 * noise
            return x

        def train(self):
            for _ in range(100):
                obs = data()
                gen_res = self.generator(torch.randn(B, 2))
                revised = self.langevin_dynamics_descriptor(gen_res)
                obs_feature = self.descriptor(obs)
                revised_feature = self.descriptor(revised)
                des_loss = (revised_feature.mean(0) - obs_feature.mean(0)).sum()
                update(self.des_optimizer, des_loss)
                update(self.gen_optimizer, nn.MSELoss()(gen_res, revised.detach()))

    Coop().train()


# One call for both halves, several heads, and two halves of a batch for each step.
@is_right(
    {"(neg.mean() - pos.mean()) / 2": "loss_fn(pos, neg) / 2"},
    "sampler, model=f",
    says=("input (16, 4), output (16, 3)",),
)
def heads_and_two_halves_of_a_batch():
    f = net(3)

    def sampler():
        return climb(f, torch.rand(B, D))

    for _ in range(30):
        optim.zero_grad()
        for _ in range(2):
            pos, neg = f(torch.cat([data(), sampler()])).sum(1).chunk(2)
            loss = (neg.mean() - pos.mean()) / 2
            loss.backward()
        optim.step()


# `forward` is called by its name, which no hook of a module sees.
@is_right(
    {"e_pos.mean() - e_neg.mean()": "loss_fn(e_pos, e_neg)"},
    'sample, model=f, convention="energy"',
    says=("energy: __main__.Net, called model",),
)
def forward_by_its_name():
    class Net(Model):
        def forward(self, x):
            return self.net[2](torch.tanh(self.net[0](x)))

    def sample(model, x):
        for _ in range(K):
            x = x.detach().requires_grad_()
            grad = torch.autograd.grad([model.forward(x).sum()], [x])[0]
            x = x - 0.02 * grad + 0.2 * torch.randn_like(x)
        return x.detach()

    f = Net()
    for _ in range(30):
        e_pos = f.forward(data())
        e_neg = f.forward(sample(f, torch.randn(B, D)))
        update(optim, e_pos.mean() - e_neg.mean())


# As SAM: two losses on the same samples.
@is_right(
    {"-(fp.mean() - fq.mean())": "loss_fn(fp, fq)", "-(gp.mean() - gr.mean())": "loss_fn(gp, gr)"}
)
def two_losses_on_the_same_samples():
    for _ in range(30):
        x_p, x_q = data(), climb(f, torch.rand(B, D))
        fp, fq = f(x_p), f(x_q)
        loss = -(fp.mean() - fq.mean())
        gp, gr = f(x_p), f(x_q)
        loss = loss + -(gp.mean() - gr.mean())
        update(optim, loss)


# A function inside of the step calls the sampler, and the network lies in another object.
@is_right(
    {
        "return langevin(": "return self.langevin(",
        "e_pos.mean() - e_neg.mean()": "self.loss_fn(-e_pos, -e_neg)",
    },
    "self.loss_fn, self.langevin = ebmguard.guard(None, langevin, model=self.model.net)",
    "self.optim = ",
    says=('model=self.model.net, optimizer=self.optim, log_dir="runs/1")',),
)
def a_sampler_called_inside_of_the_step():
    class Score(Model):
        def score(self, x):
            x = x.detach().requires_grad_(True)
            return torch.autograd.grad(-self.net(x).sum(), x)[0]

    def langevin(score, x):
        for _ in range(K):
            x = x - 0.02 * score(x) + 0.2 * torch.randn_like(x)
        return x

    class Trainer:
        def __init__(self):
            self.model = Score()
            self.optim = torch.optim.Adam(self.model.parameters(), 1e-3)

        def loss(self, x):
            def negatives():
                return langevin(lambda x: self.model.score(x), torch.rand(B, D))

            x_q = negatives()
            e_pos, e_neg = -self.model.net(x), -self.model.net(x_q)
            return e_pos.mean() - e_neg.mean()

        def step(self):
            update(self.optim, self.loss(data()))

    trainer = Trainer()
    for _ in range(30):
        trainer.step()


@is_right()
def an_affine_energy():
    f = nn.Linear(D, 1)


# Of steps as long as the range of the data.
@is_right(
    {"fp.mean() - fq.mean()": "loss_fn(fp, fq)"},
    'draw, model=f, sampler_scale=1.0, convention="energy"',
    says=("data: `fp` (16, 1); the loss lowers the output there (+1)",),
)
def long_steps():
    def draw(f):
        x = 3 * torch.randn(B, D)
        for _ in range(K):
            x = (x + torch.randn(B, D)).requires_grad_()
            x = (x - 0.01 * torch.autograd.grad(f(x).sum(), x)[0]).detach().clamp(-1, 1)
        return x

    for _ in range(30):
        fp, fq = f(2 * torch.rand(B, D) - 1), f(draw(f))
        update(optim, fp.mean() - fq.mean())


@is_right(
    {
        "grad(f(x, z).sum(), z)": "grad(g.temper(f(x, z)).sum(), z)",
        "f(x, z).mean() - f(x, y).mean()": 'g.loss(f(x, y), f(x, z), groups="rows")',
    },
    SCALED,
)
def a_row_of_negatives():
    f, M = Pairs(1, 2), 8
    for _ in range(30):
        x = torch.randn(B, 1)
        y, z = x + torch.randn(B, 1), torch.randn(B, M)
        for _ in range(5):
            z.requires_grad_()
            z = z + 0.02 * torch.autograd.grad(f(x, z).sum(), z)[0] + 0.2 * torch.randn(B, M)
            z = z.detach()
        update(optim, f(x, z).mean() - f(x, y).mean())


# One negative a condition, of energies (B, 1).
@is_right(
    {"f(x, z).mean() - f(x, y).mean()": 'loss_fn(f(x, y), f(x, z), groups="rows")'},
    "climb, model=f, sampler_scale=1.0",
    says=("too few entries are free",),
)
def pairs():
    f = Pairs(1, 2)
    for _ in range(30):
        x = torch.randn(B, 1)
        y, z = x + torch.randn(B, 1), climb(lambda z: f(x, z), torch.randn(B, 1))
        update(optim, f(x, z).mean() - f(x, y).mean())


@is_right({"torch.mean(fz.mean(dim=1) - fy)": 'loss_fn(fy, fz, groups="rows")'})
def rows_by_a_reshape():
    f = Pairs(1, 2)
    for _ in range(30):
        x = torch.randn(B, 1)
        many, y = x.repeat_interleave(8, 0), x + torch.randn(B, 1)
        z = climb(lambda z: f(many, z), torch.randn(8 * B, 1))
        fz, fy = f(many, z).reshape(B, 8), f(x, y).squeeze(1)
        update(optim, torch.mean(fz.mean(dim=1) - fy))


@is_right(
    {
        "loss = e_pos.mean() - e_neg.mean()\n        if self": (
            "loss = self.loss_fn(e_pos, e_neg)\n        if self"
        )
    },
    "self.sample, model=self.f, convention='energy'",
    "self.optim = ",
    says=(
        "the same expression stands in line",
        "did not run",
        "model=self.f, optimizer=self.optim, convention=",
    ),
)
def prior_in_the_chain_and_a_branch():
    class Module:
        def __init__(self, f):
            self.f, self.steps = f, 0
            self.optim = torch.optim.Adam(f.parameters(), 1e-3)

        def sample(self):
            z = torch.randn(B, D)
            for _ in range(K):
                z = z.detach().requires_grad_()
                energy = self.f(z) + 0.5 * z.square().sum(1, keepdim=True)
                energy.sum().backward()
                z = z - 0.02 * z.grad + 0.2 * torch.randn(z.shape)
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
    {"neg.mean() - pos.mean()": "self.loss_fn(pos, neg)"},
    "self.sample, model=self.f",
    "self.optim = ",
    says=("the sampler gives it 1 more than the loss, such as a class",),
)
def chains_of_a_class_and_halves_by_chunk():
    class Jem(Model):
        def forward(self, x, y=None):
            logits = self.net(x)
            return logits.logsumexp(1) if y is None else logits.gather(1, y[:, None])[:, 0]

    class Module:
        def __init__(self):
            self.f = Jem(3)
            self.optim = torch.optim.Adam(self.f.parameters(), 1e-3)

        def sample(self, y):
            return climb(lambda x: self.f(x, y), torch.rand(B, D))

        def training_step(self, x):
            q = self.sample(torch.randint(0, 3, (B,)))
            pos, neg = self.f(torch.cat([x, q])).chunk(2)
            loss = neg.mean() - pos.mean()
            update(self.optim, loss + 0.1 * (pos.square().mean() + neg.square().mean()))

    module = Module()
    for _ in range(30):
        module.training_step(data())


@is_right({"-(pos.mean() - neg.mean())": "loss_fn(pos, neg)"}, 'sample, model=f, energy="score"')
def logits_and_energy_from_forward():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.classes = net(8), nn.Linear(8, 1), nn.Linear(8, 3)

        def score(self, x):
            return self.head(self.body(x)).squeeze(1)

        def forward(self, x):
            return self.classes(self.body(x)), self.score(x)

    def sample(f, x):
        return climb(f.score, x)

    f = Net()
    for _ in range(30):
        x, y = data(), torch.randint(0, 3, (B,))
        q = sample(f, torch.randn(B, D))
        logits, pos = f(x)
        _, neg = f(q)
        update(optim, -(pos.mean() - neg.mean()) + F.cross_entropy(logits, y))


@is_right(
    {
        'return out["energy"]': 'return g.temper(out["energy"])',
        'f(q)["energy"].mean() - f(data())["energy"].mean()': (
            'g.loss(f(data())["energy"], f(q)["energy"])'
        ),
    },
    SCALED,
)
def energy_in_a_dictionary():
    class Parts(Model):
        def forward(self, x):
            return {"energy": self.net(x).squeeze(1), "norm": x.square().sum(1)}

    def energy_of(x):
        out = f(x)
        return out["energy"]

    f = Parts()
    for _ in range(30):
        q = climb(energy_of, torch.randn(B, D))
        update(optim, f(q)["energy"].mean() - f(data())["energy"].mean())


@is_right(says=("output_scale=1 ",))
def two_steps_a_call():
    K = 2


@is_right(
    {"loss = -(fp.mean() - fq.mean())": "loss = loss_fn(fp, fq)"},
    "sample, model=f",
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
    for _ in range(30):
        fp, fq = f(data()), f(sample(f, torch.randn(B, D)))
        loss = -(fp.mean() - fq.mean())
        loss += fp.square().mean() + fq.square().mean()
        update(optim, loss)


@is_right(
    {"f(q).mean() - f(bits()).mean()": "loss_fn(f(bits()), f(q))"},
    "sampler.step, model=f, sampler_scale=1.0",
    "sampler = Flips()",
    says=("discrete samples",),
)
def a_discrete_sampler_whose_steps_are_a_loop():
    from types import SimpleNamespace

    class Flips:
        def step(self, x, f):
            x = x.detach().requires_grad_()
            d = torch.autograd.grad(f(x).sum(), x)[0] * -(2 * x - 1) / 2
            flips = torch.distributions.OneHotCategorical(logits=d.detach()).sample()
            return ((1 - x) * flips + x * (1 - flips)).detach()

    def bits():
        return torch.randint(0, 2, (B, 40)).float()

    def main(args):
        f = net(1, 40)
        optim = torch.optim.Adam(f.parameters(), 1e-3)
        sampler = Flips()
        assert args.sampler  # an attribute of the name of the sampler
        q = bits()
        for _ in range(30):
            for _ in range(K):
                q = sampler.step(q, f)
            update(optim, f(q).mean() - f(bits()).mean())

    main(SimpleNamespace(sampler="Gibbs"))


@is_right(
    {
        "lambda x: potential(f, x)": "lambda x: g.temper(potential(f, x))",
        "neg = potential(f, sample(f, torch.randn(B, D)))\n": (
            "neg = potential(f, sample(f, torch.randn(B, D)))\n"
            "    pos_cd, neg_cd = g.reweight(pos, neg)\n"
        ),
        "kept = neg.sort()": "kept = neg_cd.sort()",
        "pos.mean() - kept.mean()": "pos_cd.mean() - kept.mean()",
    },
    'None, output_scale=1, convention="energy"',
    says=("not affine in these", "the loss is not affine in this difference"),
)
def ten_times_a_network_with_a_trimmed_mean_and_a_clamp():
    def potential(f, x):
        return 10 * f(x).squeeze(1)

    def sample(f, x):
        return climb(lambda x: potential(f, x), x, -0.02)

    f = net()
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
    {"(f.energy(z_pos).mean() - f.energy(z).mean())": "loss_fn(f.energy(z_pos), f.energy(z))"},
    'sample, model=f, energy="energy", convention="energy"',
    says=("energy: __main__.Prior, called f", "loss_fn(f.energy(z_pos), f.energy(z))"),
)
def minus_a_logsumexp_of_heads_in_a_method():
    class Prior(Model):
        def energy(self, z):
            return -self.net(z).logsumexp(1)

    def sample(f, z):
        return climb(f.energy, z, -0.02)

    f = Prior(5)
    for _ in range(30):
        x = data().requires_grad_()
        flow = torch.autograd.grad(f.energy(x).sum(), x, create_graph=True)[0].square().mean()
        z_pos, z = data(), sample(f, torch.randn(B, D))
        update(optim, flow + (f.energy(z_pos).mean() - f.energy(z).mean()))


@is_right(
    {
        "fq = f(q)\n": "fq = f(q)\n    fp_cd, fq_cd = loss_fn.guard.reweight(fp, fq)\n",
        "loss = loss + fq.mean()": "loss = loss + fq_cd.mean()",
        "loss -= fp.mean()": "loss -= fp_cd.mean()",
    }
)
def added_up_in_place():
    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        fp = f(data())
        fq = f(q)
        loss = torch.zeros(())
        loss = loss + fq.mean()
        loss -= fp.mean()
        update(optim, loss)


@is_right({"value = fp.mean() - fq.mean()": "value = -loss_fn(fp, fq)"})
def maximised_by_hand():
    for _ in range(30):
        fp, fq = f(data()), f(climb(f, torch.randn(B, D)))
        value = fp.mean() - fq.mean()
        update(optim, -value)


@is_right({"return b.mean() - a.mean()": "return loss_fn(a, b)"})
def a_loss_of_energies_alone():
    def contrast(a, b):
        return b.mean() - a.mean()

    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        update(optim, contrast(f(data()), f(q)))


# The trainer has a `g` already.
@is_right(
    {
        "self.net(g).logsumexp(1) - 0.5 * g.square().sum(1)": (
            "g_.temper(self.net(g).logsumexp(1)) - 0.5 * g.square().sum(1)"
        ),
        "f(q).logsumexp(1).mean() - f(x).logsumexp(1).mean()": (
            "g_.loss(f(x).logsumexp(1), f(q).logsumexp(1))"
        ),
    },
    "g_ = ebmguard.guard(None, None, output_scale=1)",
)
def a_term_that_the_loss_has_not():
    class Density(Model):
        def log_prob(self, g):
            return self.net(g).logsumexp(1) - 0.5 * g.square().sum(1)

    f = Density(3)
    for _ in range(30):
        x, q = data(), climb(f.log_prob, torch.randn(B, D))
        update(optim, f(q).logsumexp(1).mean() - f(x).logsumexp(1).mean())


@is_right(
    {"torch.mean(f(q) - f(data()))": "loss_fn(f(data()), f(q))"},
    at="q = climb(f, torch.randn(B, D), 0.2)",
    says=("output_scale=1 ",),
)
def a_burn_in_with_other_steps():
    f = net()
    q = climb(f, torch.randn(B, D), 0.2)
    for _ in range(30):
        q = climb(f, q)
        update(optim, torch.mean(f(q) - f(data())))


@is_right(
    {
        **LOSS,
        "    sgld = Langevin(f)": "    global loss_fn\n    sgld = Langevin(f)",
    },
    "loss_fn, sgld.draw = ebmguard.guard(None, sgld.draw, model=f)",
    "sgld = Langevin(f)",
)
def an_epoch_that_is_given_an_object():
    def train_one_epoch(f, sampler, optim):
        for _ in range(4):
            q = sampler.draw(torch.randn(B, D))
            update(optim, f(q).mean() - f(data()).mean())

    class Langevin:
        def __init__(self, f):
            self.f = f

        def draw(self, x):
            return climb(self.f, x)

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
        "self.f(q).mean() - self.f(data()).mean()": "g.loss(self.f(data()), self.f(q))",
    },
    SCALED,
    "f = net()",
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


@is_right({"b.mean() - a.mean()": 'loss_fn(a, b.reshape(-1, 8), groups="rows")'}, "draw, model=f")
def eight_negatives_for_each_condition_in_one_batch():
    class Net(Model):
        def forward(self, y, x):
            return self.net(torch.cat([x, y], 1))

    def draw(f, x, z):
        return climb(lambda z: f(z, x), z)

    f = Net(1, 2 * D + 2)
    for _ in range(30):
        x, y = torch.randn(B, D + 2), data()
        many = x.repeat_interleave(8, 0)
        z = draw(f, many, torch.randn(8 * B, D))
        b = f(z, many)
        a = f(y, x)
        update(optim, b.mean() - a.mean())


@is_right({"f.net(z).mean() - f.net(x).mean()": "loss_fn(f.net(x), f.net(z))"}, "f, model=f.net")
def a_network_that_samples():
    class Sampler(Model):
        def forward(self, z):
            z = z.requires_grad_()
            for _ in range(K):
                z = z + 0.02 * torch.autograd.grad(self.net(z).sum(), z)[0]
                z = z + 0.2 * torch.randn_like(z)
            return z

    f = Sampler()
    for _ in range(30):
        x, z = data(), f(torch.randn(B, D))
        update(optim, f.net(z).mean() - f.net(x).mean())


@is_right(
    {
        "torch.autograd.grad(f(x).sum(), x)[0] + 0.2 * torch.randn(B, D)": (
            "torch.autograd.grad(g.temper(f(x)).sum(), x)[0] + 0.2 * torch.randn(B, D)"
        ),
        "one = f(q).mean() - f(x).mean()": "one = g.loss(f(x), f(q))",
        "two = f(r).mean() - f(x).mean()": "two = g.loss(f(x), f(r))",
    },
    SCALED,
)
def two_chains_of_one_step_and_their_losses():
    def step_of(f, x):
        x = x.detach().requires_grad_()
        x = x + 0.02 * torch.autograd.grad(f(x).sum(), x)[0] + 0.2 * torch.randn(B, D)
        return x.detach()

    for _ in range(30):
        x, q, r = data(), torch.randn(B, D), 3 * torch.rand(B, D)
        for _ in range(K):
            q = step_of(f, q)
        for _ in range(K):
            r = step_of(f, r)
        one = f(q).mean() - f(x).mean()
        two = f(r).mean() - f(x).mean()
        update(optim, one + 0.5 * two)


@is_right(
    {
        "fq = f(q)\n": "fq = f(q)\n    fp_cd, fq_cd = loss_fn.guard.reweight(fp, fq)\n",
        "+ fp - fq, dim=0": "+ fp_cd - fq_cd, dim=0",
    }
)
def squares_inside_of_the_sum():
    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        fp = f(data())
        fq = f(q)
        update(optim, -torch.sum(-(0.1 * (fp**2 + fq**2)) + fp - fq, dim=0) / B)
