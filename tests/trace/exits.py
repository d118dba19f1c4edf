"""Structures that are refused, one function each, and the way out of each, followed literally.

They are as those of the field. ``right`` and ``guard`` are what the way out says.
"""

# ruff: noqa: F821
# mypy: ignore-errors

from __future__ import annotations

from tests.trace.field import DIFFERENCE, LOSS, SCALED, STRUCTURES, is_right

WRAPPED = "ebmguard.guard(None, climb, model=f)"


def is_left(refused, right, guard="", **more):
    """Keep the structure below: refused so, and guarded by the edits, or proven after them."""
    return is_right(right, guard, refused=refused, **{"again": not guard, **more})


@is_left("no sampler", LOSS, "walk, sampler_scale=1.0")
def a_walk_without_gradients():
    def walk(f, x):
        with torch.no_grad():
            for _ in range(K):
                y = x + 0.3 * torch.randn_like(x)
                is_taken = torch.rand(B, 1) < (f(y) - f(x)).exp()
                x = torch.where(is_taken, y, x)
        return x

    for _ in range(30):
        q = walk(f, torch.randn(B, D))
        update(optim, f(q).mean() - f(data()).mean())


@is_left("stopped", {'["training"]': '["train"]'})
def a_script_that_stops():
    batches = {"train": data}
    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        update(optim, f(q).mean() - f(batches["training"]()).mean())


@is_left(
    "no difference", {"((f(q) - 1) ** 2).mean() + (f(x) ** 2).mean()": "f(q).mean() - f(x).mean()"}
)
def squares_of_energies():
    for _ in range(30):
        x, q = data(), climb(f, torch.randn(B, D))
        update(optim, ((f(q) - 1) ** 2).mean() + (f(x) ** 2).mean())


@is_left(
    "not evaluated",
    {"energy(f, q).mean() - energy(f, data()).mean()": "loss_fn(energy(f, data()), energy(f, q))"},
    "climb, model=f",
)
def energies_under_autocast():
    def energy(f, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return f(x) @ torch.ones(1)

    for _ in range(30):
        q = climb(lambda x: energy(f, x), torch.randn(B, D))
        update(optim, energy(f, q).mean() - energy(f, data()).mean())


@is_left(
    "another energy",
    {"f(x) / level": "g.temper(f(x)) / level", DIFFERENCE: "g.loss(f(data()), f(q))"},
    "None",
)
def a_temperature_for_each_sample():
    level = torch.linspace(1, 2, B)[:, None]

    for _ in range(30):
        q = climb(lambda x: f(x) / level, torch.randn(B, D))
        update(optim, f(q).mean() - f(data()).mean())


@is_left(
    "conditional",
    {
        "f(q, c).sum()": "g.temper(f(q, c)).sum()",
        "f(q, c).mean() - f(x, y).mean()": "g.loss(f(x, y), f(q, c), groups=(y, c))",
    },
    SCALED,
)
def chains_of_classes_of_their_own():
    class Net(Model):
        def forward(self, x, y):
            return self.net(x).gather(1, y[:, None]).squeeze(1)

    f = Net(3)
    for _ in range(30):
        x, y, c = data(), torch.randint(0, 3, (B,)), torch.randint(0, 3, (B,))
        q = torch.randn(B, D)
        for _ in range(K):
            q = q.detach().requires_grad_()
            q = q + 0.02 * torch.autograd.grad(f(q, c).sum(), q)[0] + 0.2 * torch.randn(B, D)
        q = q.detach()
        update(optim, f(q, c).mean() - f(x, y).mean())


@is_left(
    "softmax",
    {
        "F.cross_entropy(torch.cat([a, b], 1), torch.zeros(B, dtype=torch.long))": (
            'loss_fn(a, b, groups="rows")'
        )
    },
    "draw, model=f",
    is_other=True,
)
def a_softmax_of_each_positive_among_its_negatives():
    def draw(f, x, z):
        return climb(lambda z: f(x, z), z)

    f = Pairs(1, 2)
    for _ in range(30):
        x = torch.randn(B, 1)
        b = f(x, draw(f, x, torch.randn(B, 8)))
        a = f(x, x + torch.randn(B, 1))
        update(optim, F.cross_entropy(torch.cat([a, b], 1), torch.zeros(B, dtype=torch.long)))


@is_left(
    "no difference",
    {
        "torch.autograd.grad(f(z).sum(), z)": (
            "torch.autograd.grad(loss_fn.guard.temper(f(z)).sum(), z)"
        ),
        "F.cross_entropy(f(torch.cat([x[:, None], z], 1)).squeeze(2), first)": (
            'loss_fn(f(x), f(z).squeeze(2), groups="rows")'
        ),
    },
    "loss_fn, draw = ebmguard.guard(None, None, output_scale=1)",
    is_other=True,
)
def a_softmax_of_one_call_and_a_chain_beside_it():
    first = torch.zeros(B, dtype=torch.long)
    for _ in range(30):
        x, z = data(), torch.randn(B, 8, D)
        for _ in range(K):
            z = z.detach().requires_grad_()
            z = z + 0.02 * torch.autograd.grad(f(z).sum(), z)[0] + 0.2 * torch.randn_like(z)
        z = z.detach()
        update(optim, F.cross_entropy(f(torch.cat([x[:, None], z], 1)).squeeze(2), first))


@is_left(
    "two losses",
    {
        "f(climb(": "f(first(",
        "torch.autograd.grad(f(r).sum(), r)": "torch.autograd.grad(second.temper(f(r)).sum(), r)",
        "one = fq.mean() - fp.mean()": "one = first_loss(fp, fq)",
        "two = fr.mean() - fp.mean()": "two = second.loss(fp, fr)",
    },
    f"first_loss, first = {WRAPPED}\nsecond = ebmguard.guard(None, None, output_scale=1)",
)
def a_second_chain_beside_the_loss():
    for _ in range(30):
        fp, fq = f(data()), f(climb(f, torch.rand(B, D)))
        one = fq.mean() - fp.mean()
        r = torch.randn(B, D)
        for _ in range(K):
            r = r.detach().requires_grad_()
            r = r + 0.02 * torch.autograd.grad(f(r).sum(), r)[0] + 0.2 * torch.randn_like(r)
        fr = f(r.detach())
        two = fr.mean() - fp.mean()
        update(optim, one + 0.5 * two)


@is_left(
    "no sign",
    {"f(q).mean() - f(p).mean()": "loss_fn(f(p), f(q))"},
    "prior, model=f, sampler_scale=1.0",
)
def two_chains_of_signs():
    def posterior(f, x):
        for _ in range(K):
            x = x.detach().requires_grad_()
            x = x + 0.02 * torch.autograd.grad(f(x).sum(), x)[0].sign()
        return x.detach()

    def prior(f, x):
        for _ in range(K):
            x = x.detach().requires_grad_()
            x = x + 0.1 * torch.autograd.grad(f(x).sum(), x)[0].sign()
        return x.detach()

    for _ in range(30):
        p, q = posterior(f, data()), prior(f, torch.randn(B, D))
        update(optim, f(q).mean() - f(p).mean())


@is_left("wrong sign", {"f(data()).mean() - f(q).mean()": DIFFERENCE})
def a_loss_that_is_turned_round():
    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        update(optim, f(data()).mean() - f(q).mean())


@is_left(
    "by hand",
    {"q = f.sample(": "q = draw(", "contrast(pos, neg)": "loss_fn(pos, neg)"},
    'loss_fn, draw = ebmguard.guard(None, f.sample, model=f, energy="energy")',
)
def a_loss_in_another_file():
    class Contrast(nn.Module):
        def forward(self, real, sampled):
            return torch.mean(-1 * (real - sampled))

    # script
    class Sampler(Model):
        def energy(self, x):
            return self.net(x).logsumexp(1)

        def forward(self, x):
            return self.net(x), self.energy(x)

        def sample(self, x):
            for _ in range(K):
                x = x.detach().requires_grad_()
                grad = torch.autograd.grad(self.energy(x).sum(), x)[0]
                x = x + 0.02 * grad + 0.2 * torch.randn_like(x)
            return x.detach()

    f, contrast = Sampler(3), Contrast()
    for _ in range(30):
        q = f.sample(torch.randn(B, D))
        _, pos = f(data())
        neg = f.energy(q)
        update(optim, contrast(pos, neg))


@is_left(
    "by hand",
    {**LOSS, 'samplers["sgld"](f, torch': "draw(f, torch"},
    'loss_fn, draw = ebmguard.guard(None, samplers["sgld"], model=f)',
)
def a_sampler_in_a_dictionary():
    samplers = {"sgld": climb}

    # script
    for _ in range(30):
        q = samplers["sgld"](f, torch.randn(B, D))
        update(optim, f(q).mean() - f(data()).mean())


@is_left("one place", {"0.02 * energy(f, x, True)": "0.02 * torch.autograd.grad(f(x).sum(), x)[0]"})
def one_function_for_energies_and_gradients():
    def energy(f, x, is_gradient):
        e = f(x)
        return torch.autograd.grad(e, x, torch.ones_like(e))[0] if is_gradient else e

    for _ in range(30):
        x = torch.randn(B, D)
        for _ in range(K):
            x = x.detach().requires_grad_()
            x = x + 0.02 * energy(f, x, True) + 0.2 * torch.randn_like(x)
        q = x.detach()
        update(optim, energy(f, q, False).mean() - energy(f, data(), False).mean())


@is_left(
    "no names",
    {
        "    update(optim, mean(f, q) - mean(f, x))": (
            "    fq, fp = f(q), f(x)\n    update(optim, fq.mean() - fp.mean())"
        )
    },
)
def means_in_a_function():
    def mean(f, x):
        return f(x).mean()

    for _ in range(30):
        x, q = data(), climb(f, torch.randn(B, D))
        update(optim, mean(f, q) - mean(f, x))


@is_left(
    "not evaluated",
    {"data(), climb(": "data(), draw(", "return b.mean() - a.mean()": "return loss_fn(a, b)"},
    f"loss_fn, draw = {WRAPPED}",
)
def a_function_without_a_file():
    text = "def contrast(a, b):\n    return b.mean() - a.mean()\n"
    exec(compile(text, "contrast.py", "exec"))
    for _ in range(30):
        x, q = data(), climb(f, torch.randn(B, D))
        update(optim, contrast(f(x), f(q)))


@is_left("guarded run", {"f(q).squeeze(1)": "f(q)"})
def energies_of_two_shapes():
    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        fq, fp = f(q).squeeze(1), f(data())
        update(optim, fq.mean() - fp.mean())


@is_left(
    "guards",
    {"f(q).mean() - self.f(x).mean()": "loss_fn(self.f(x), self.f(q))"},
    "module.loss_fn, module.sample = ebmguard.guard(None, module.sample, model=module.f)",
    at="module, other = ",
)
def a_class_of_which_there_are_two():
    # script
    class Module:
        def __init__(self):
            self.f = net()
            self.optim = torch.optim.Adam(self.f.parameters(), 1e-3)

        def sample(self, x):
            return climb(self.f, x)

        def step(self, x):
            q = self.sample(torch.randn(B, D))
            update(self.optim, self.f(q).mean() - self.f(x).mean())

    module, other = Module(), Module()
    for _ in range(30):
        module.step(data())
        other.f(data())


@is_left("warned", {"nn.Dropout(0.5)": "nn.Dropout(0)"})
def dropout_in_the_energy():
    f = nn.Sequential(net(16), nn.Dropout(0.5), nn.Linear(16, 1))
    for _ in range(30):
        q = climb(f, torch.randn(B, D))
        fq, fp = f(q), f(data())
        update(optim, fq.mean() - fp.mean())


@is_left(
    "differs",
    {"loss = (f(q) - f(x)).sum() / 16": "loss = loss_fn(f(x), f(q))"},
    "loss_fn, climb = ebmguard.guard(lambda p, n: (n - p).sum() / 16, climb, model=f)",
)
def a_rate_that_follows_the_loss():
    for _ in range(30):
        x, q = data(), climb(f, torch.randn(B, D))
        loss = (f(q) - f(x)).sum() / 16
        optim.param_groups[0]["lr"] = 1e-3 * (1 + loss.item())
        update(optim, loss)


@is_left("not repeatable", {'makedirs("run")': 'makedirs("run", exist_ok=True)'})
def a_folder_that_is_made_once():
    import os

    os.makedirs("run")


EXITS = {name: each for name, each in STRUCTURES.items() if each.refused}
