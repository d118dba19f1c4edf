"""Small trainers as scripts, whose energies or losses are made elsewhere than they are used."""

from __future__ import annotations

# One network with an energy that is a method, and a sampler that is a function.
METHODS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

    def energy(self, x):
        return -self(x).logsumexp(1)


def sample(model, x):
    for _ in range(K):
        x = x.detach().requires_grad_(True)
        x = x - 0.02 * torch.autograd.grad(model.energy(x).sum(), x)[0] + 0.2 * torch.randn_like(x)
    return x.detach()


model = Net()
optim = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(100):
    x = sample(model, torch.randn(B, D))
    loss = model.energy(data()).mean() - model.energy(x).mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
"""

# `forward` is called by its name, which no hook of a module sees.
FORWARD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def sample(model, x):
    for _ in range(K):
        x = x.detach().requires_grad_(True)
        grad = torch.autograd.grad([model.forward(x).sum()], [x])[0]
        x = x - 0.02 * grad + 0.2 * torch.randn_like(x)
    return x.detach()


model = Net()
optim = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(100):
    e_pos = model.forward(data())
    e_neg = model.forward(sample(model, torch.randn(B, D)))
    loss = e_pos.mean() - e_neg.mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
"""

# The loss is a module, which samples and calls the energy.
LOSS_MODULE = """
class Loss(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.net = f

    def sample(self, x):
        for _ in range(K):
            x = x.detach().requires_grad_(True)
            grad = torch.autograd.grad(self.net(x).sum(), x)[0]
            x = x + 0.02 * grad + 0.2 * torch.randn_like(x)
        return x.detach()

    def forward(self, x):
        x_q = self.sample(torch.randn_like(x))
        return self.net(x_q).mean() - self.net(x).mean()


contrast = Loss(net())
optim = torch.optim.Adam(contrast.parameters(), 1e-3)
for step in range(100):
    loss = contrast(data())
    optim.zero_grad()
    loss.backward()
    optim.step()
"""

_SAMPLER = """
f = net()
optim = torch.optim.SGD(f.parameters(), 1e-3)


def sample_q(f):
    x = torch.rand(B, D, requires_grad=True)
    for _ in range(K):
        grad = torch.autograd.grad(f(x).sum(), x)[0]
        x.data += 0.5 * grad + 0.1 * torch.randn_like(x)
    return x.detach()


"""

# As SAM: two losses on the same samples.
TWICE = (
    _SAMPLER
    + """
for step in range(100):
    x_p, x_q = data(), sample_q(f)
    fp, fq = f(x_p), f(x_q)
    l = -(fp.mean() - fq.mean())
    gp, gq = f(x_p), f(x_q)
    l = l + -(gp.mean() - gq.mean())
    optim.zero_grad()
    l.backward()
    optim.step()
"""
)

# The gradient of a penalty is no sampler's.
PENALTY = (
    _SAMPLER
    + """
for step in range(100):
    x_p = data().requires_grad_(True)
    fp = f(x_p)
    slope = torch.autograd.grad(fp.sum(), x_p, create_graph=True)[0]
    x_q = sample_q(f)
    fq = f(x_q)
    loss = fq.mean() - fp.mean()
    loss = loss + 0.1 * slope.square().sum(1).mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
"""
)

# The energy is a logsumexp of what the module returns.
LOGITS = (
    _SAMPLER.replace("net()", "net(3)").replace("f(x).sum()", "f(x).logsumexp(1).sum()")
    + """
for step in range(100):
    fp, fq = f(data()).logsumexp(1), f(sample_q(f)).logsumexp(1)
    loss = fq.mean() - fp.mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
"""
)

# A function inside of the step calls the sampler, and the network lies in another object.
NESTED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def score(self, x):
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(-self.net(x).sum(), x)[0]


def langevin(score, x):
    for _ in range(K):
        x = x - 0.02 * score(x) + 0.2 * torch.randn_like(x)
    return x


class Trainer:
    def __init__(self):
        self.model = Model()
        self.optim = torch.optim.Adam(self.model.parameters(), 1e-3)

    def loss(self, x):
        def negatives():
            return langevin(lambda x: self.model.score(x), torch.rand(B, D))

        x_q = negatives()
        e_pos, e_neg = -self.model.net(x), -self.model.net(x_q)
        return e_pos.mean() - e_neg.mean()

    def step(self):
        self.optim.zero_grad()
        self.loss(data()).backward()
        self.optim.step()


trainer = Trainer()
for step in range(100):
    trainer.step()
"""

# The sampler's energy has a term more than that of the loss.
CONDITIONAL = (
    METHODS.replace("energy(self, x):", "log_prob(self, x):")
    .replace(
        "return -self(x).logsumexp(1)", "return -self(x).logsumexp(1) + 0.5 * x.square().sum(1)"
    )
    .replace("model.energy(x).sum()", "model.log_prob(x).sum()")
    .replace(
        "model.energy(data()).mean() - model.energy(x).mean()",
        "model(x).logsumexp(1).mean() - model(data()).logsumexp(1).mean()",
    )
)
