"""Small trainers as scripts, each in another style."""

from __future__ import annotations

HEAD = """\
import torch
from torch import nn

torch.manual_seed(3)
D, B, K = 4, 16, 6


def net(out=1):
    return nn.Sequential(nn.Linear(D, 16), nn.SiLU(), nn.Linear(16, out))


def data():
    return 2 + torch.randn(B, D)

"""

PLAIN = """
f = net()
optim = torch.optim.Adam(f.parameters(), 1e-3)
buffer = torch.rand(200, D)


def sample_q(f):
    chosen = torch.randint(0, 200, (B,))
    x = buffer[chosen].clone().requires_grad_(True)
    for _ in range(K):
        grad = torch.autograd.grad(f(x).sum(), x)[0]
        x.data += 0.5 * grad + 0.1 * torch.randn_like(x)
    buffer[chosen] = x.detach()
    return x.detach()


for step in range(100):
    x_p, x_q = data(), sample_q(f)
    loss = f(x_q).mean() - f(x_p).mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
"""

# As JEM: classes, a closure as the sampler, a likelihood beside, means before the difference.
JEM = """
class F(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.energy_output, self.class_output = net(8), nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x, y=None):
        return self.energy_output(self.f(x)).squeeze()

    def classify(self, x):
        return self.class_output(self.f(x)).squeeze()


class CCF(F):
    def forward(self, x, y=None):
        logits = self.classify(x)
        return logits.logsumexp(1) if y is None else torch.gather(logits, 1, y[:, None])


def get_sample_q():
    def sample_q(f, replay_buffer, y=None):
        f.eval()
        chosen = torch.randint(0, len(replay_buffer), (B,))
        x_k = torch.autograd.Variable(replay_buffer[chosen], requires_grad=True)
        for k in range(K):
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
    for epoch in range(5):
        for i in range(20):
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
            optim.zero_grad()
            L.backward()
            optim.step()


main()
"""

# As PyTorch ports of IGEBM: the loop stands beside the loss, the energy descends, and is bounded.
INLINE = """
def train():
    model = net()
    optim = torch.optim.Adam(model.parameters(), 1e-3)
    noise = torch.empty(B, D)
    for step in range(100):
        pos_img, neg_img = data(), torch.rand(B, D)
        neg_img.requires_grad = True
        for k in range(K):
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
"""

# As latent EBMs: one chain for the prior, one for the posterior, nested functions.
LATENT = """
def main():
    netG, netE = nn.Linear(D, 6), net()
    optE = torch.optim.Adam(netE.parameters(), 1e-3)
    optG = torch.optim.Adam(netG.parameters(), 1e-3)
    mse = nn.MSELoss(reduction="sum")

    def sample_langevin_post_z(z, x, netG, netE):
        z = z.clone().detach().requires_grad_(True)
        for i in range(K):
            g_log_lkhd = 0.5 * mse(netG(z), x)
            z_grad_g = torch.autograd.grad(g_log_lkhd, z)[0]
            en = netE(z)
            z_grad_e = torch.autograd.grad(en.sum(), z)[0]
            z.data = z.data - 0.5 * 0.1**2 * (z_grad_g + z_grad_e + z.data)
            z.data += 0.1 * torch.randn_like(z).data
        return z.detach()

    def sample_langevin_prior_z(z, netE):
        z = z.clone().detach().requires_grad_(True)
        for i in range(K):
            en = netE(z)
            z_grad = torch.autograd.grad(en.sum(), z)[0]
            z.data = z.data - 0.5 * 0.4**2 * (z_grad + z.data)
            z.data += 0.4 * torch.randn_like(z).data
        return z.detach()

    def train():
        for i in range(100):
            x = torch.randn(B, 6)
            z_e_0, z_g_0 = torch.randn(B, D), torch.randn(B, D)
            z_e_k = sample_langevin_prior_z(z_e_0, netE)
            z_g_k = sample_langevin_post_z(z_g_0, x, netG, netE)
            optG.zero_grad()
            loss_g = mse(netG(z_g_k.detach()), x) / B
            loss_g.backward()
            optG.step()
            optE.zero_grad()
            en_neg = netE(z_e_k.detach()).mean()
            en_pos = netE(z_g_k.detach()).mean()
            loss_e = en_pos - en_neg
            loss_e.backward()
            optE.step()

    train()


main()
"""

# As cooperative networks: the chain starts from a generator, energies are (B, z), sums over few.
COOP = """
class Coop:
    def __init__(self):
        self.generator, self.descriptor = nn.Linear(2, D), net(3)
        self.des_optimizer = torch.optim.Adam(self.descriptor.parameters(), 1e-3)
        self.gen_optimizer = torch.optim.Adam(self.generator.parameters(), 1e-3)

    def langevin_dynamics_descriptor(self, x):
        for i in range(K):
            noise = torch.randn(B, D)
            x = torch.autograd.Variable(x.data, requires_grad=True)
            feature = self.descriptor(x)
            grad = torch.autograd.grad(feature, x, torch.ones_like(feature))[0]
            x = x - 0.5 * 0.2**2 * (x / 0.5**2 - grad)
            x += 0.2 * noise
        return x

    def train(self):
        for i in range(100):
            obs = data()
            gen_res = self.generator(torch.randn(B, 2))
            revised = self.langevin_dynamics_descriptor(gen_res)
            obs_feature = self.descriptor(obs)
            revised_feature = self.descriptor(revised)
            des_loss = (revised_feature.mean(0) - obs_feature.mean(0)).sum()
            self.des_optimizer.zero_grad()
            des_loss.backward()
            self.des_optimizer.step()
            self.gen_optimizer.zero_grad()
            gen_loss = nn.MSELoss()(gen_res, revised.detach())
            gen_loss.backward()
            self.gen_optimizer.step()


Coop().train()
"""

MALA = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.eps = net(), 0.1

    def forward(self, x):
        return self.body(x).squeeze(-1)

    def sample(self, x):
        for _ in range(K):
            x = x.detach().requires_grad_(True)
            e = self(x)
            g = torch.autograd.grad(e.sum(), x)[0]
            mean = x - 0.5 * self.eps**2 * g
            y = (mean + self.eps * torch.randn_like(x)).detach().requires_grad_(True)
            e_y = self(y)
            g_y = torch.autograd.grad(e_y.sum(), y)[0]
            back = y - 0.5 * self.eps**2 * g_y
            log_a = e - e_y + ((y - mean) ** 2).sum(1) / (2 * self.eps**2)
            log_a = log_a - ((x - back) ** 2).sum(1) / (2 * self.eps**2)
            accepted = torch.rand(len(x)).log() < log_a
            self.eps *= 1.02 if accepted.float().mean() > 0.57 else 0.98
            x = torch.where(accepted[:, None], y, x)
        return x.detach()


model = Model()
optim = torch.optim.Adam(model.parameters(), 1e-3)
chains = torch.randn(B, D)
for step in range(100):
    chains = model.sample(chains)
    pos, neg = model(data()), model(chains)
    loss = pos.mean() - neg.mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
"""

# Everything in one class, with the sampler and the loss as methods.
CLASS = """
class Trainer:
    def __init__(self, steps):
        self.energy = net()
        self.optim = torch.optim.SGD(self.energy.parameters(), 1e-2)
        self.steps, self.x = steps, torch.randn(B, D)

    def negatives(self):
        x = self.x.clone()
        for _ in range(K):
            x = x.detach().requires_grad_(True)
            e = self.energy(x).sum()
            e.backward()
            x = x - 0.02 * x.grad + 0.2 * torch.randn(x.shape)
        self.x = x.detach()
        return self.x

    def loss(self, x):
        e_neg = self.energy(self.negatives())
        e_pos = self.energy(x)
        return (e_pos - e_neg).mean() + 0.1 * (e_pos**2 + e_neg**2).mean()

    def fit(self):
        for _ in range(self.steps):
            loss = self.loss(data())
            self.optim.zero_grad()
            loss.backward()
            self.optim.step()


Trainer(100).fit()
"""

# The energy is a method of the network, of which parts are modules.
METHOD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, 16), nn.Linear(16, 1)

    def energy(self, x):
        return self.last(torch.tanh(self.first(x)))[:, 0]


model = Net()
optim = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(100):
    x = torch.randn(B, D)
    for _ in range(K):
        x = x.detach().requires_grad_(True)
        x = x - 0.02 * torch.autograd.grad(model.energy(x).sum(), x)[0] + 0.2 * torch.randn_like(x)
    loss = model.energy(data()).mean() - model.energy(x.detach()).mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
"""

# One call for both halves, several heads, and two halves of a batch for each step.
CHUNK = """
f = net(3)
optim = torch.optim.Adam(f.parameters(), 1e-3)


def sampler():
    x = torch.rand(B, D)
    for _ in range(K):
        x.requires_grad_(True)
        x = x + 0.5 * torch.autograd.grad(f(x).sum(), x)[0] + 0.1 * torch.randn(B, D)
        x = x.detach()
    return x


for step in range(100):
    optim.zero_grad()
    for part in range(2):
        pos, neg = f(torch.cat([data(), sampler()])).sum(1).chunk(2)
        loss = (neg.mean() - pos.mean()) / 2
        loss.backward()
    optim.step()
"""

GIBBS = """
f = net()
optim = torch.optim.Adam(f.parameters(), 1e-3)


def step_of(x):
    x = x.requires_grad_()
    d = torch.autograd.grad(f(x).sum(), x)[0] * -(2 * x - 1) / 2
    q = torch.distributions.OneHotCategorical(logits=d.detach())
    flips = q.sample()
    return ((1 - x) * flips + x * (1 - flips)).detach()


x_q = torch.randint(0, 2, (B, D)).float()
for step in range(100):
    for _ in range(K):
        x_q = step_of(x_q)
    x_p = torch.randint(0, 2, (B, D)).float()
    loss = f(x_q).mean() - f(x_p).mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
"""

NO_SAMPLER = """
f = net()
optim = torch.optim.Adam(f.parameters(), 1e-3)
for step in range(100):
    loss = f(torch.rand(B, D)).mean() - f(data()).mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
"""

ENDS = PLAIN.replace("range(100)", "range(3)")
# What a run from anew does not repeat: a counter on the disk.
ONCE = PLAIN.replace(
    "for step in range(100):",
    "from pathlib import Path\n\ncount = Path('count')\n"
    "count.write_text('x' + (count.read_text() if count.exists() else ''))\n"
    "torch.manual_seed(len(count.read_text()))\nfor step in range(100):",
)

# Energies that are the negated output of the module that the sampler differentiates.
NEGATED = MALA.replace(
    "pos, neg = model(data()), model(chains)\n    loss = pos.mean() - neg.mean()",
    "e_pos, e_neg = -model(data()), -model(chains)\n    loss = e_neg.mean() - e_pos.mean()",
)
MAXIMISED = PLAIN.replace(
    "loss = f(x_q).mean() - f(x_p).mean()",
    "fp, fq = f(x_p), f(x_q)\n    value = fp.mean() - fq.mean()\n    loss = -value",
)
SQUARED = PLAIN.replace(
    "f(x_q).mean() - f(x_p).mean()", "((f(x_q) - 1) ** 2).mean() + (f(x_p) ** 2).mean()"
)

ROWS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x, y):
        return self.net(torch.stack([x.expand_as(y), y], -1)).squeeze(-1)


f = Net()
optim = torch.optim.Adam(f.parameters(), lr=1e-3)
for _ in range(4):
    x = torch.randn(B, 1)
    y, z = x + torch.randn(B, 1), torch.randn(B, 8)
    for _ in range(5):
        z.requires_grad_()
        z = z + 0.02 * torch.autograd.grad(f(x, z).sum(), z)[0] + 0.2 * torch.randn(B, 8)
        z = z.detach()
    loss = f(x, z).mean() - f(x, y).mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
"""
PAIRS = ROWS.replace("8)", "1)")
RESHAPED = (
    ROWS.replace("(B, 8)", "(8 * B, 1)")
    .replace("f(x, z)", "f(x.repeat_interleave(8, 0), z)")
    .replace("    loss = ", "    fz, fy = ")
    .replace(".mean() - f(x, y).mean()", ".reshape(B, 8), f(x, y).squeeze(1)")
    .replace(
        "    optim.zero_grad()", "    loss = torch.mean(fz.mean(dim=1) - fy)\n    optim.zero_grad()"
    )
)
LONG_STEPS = """
f = net()
optim = torch.optim.Adam(f.parameters(), 1e-3)


def draw(f):
    x = 3 * torch.randn(B, D)
    for _ in range(K):
        x = (x + torch.randn(B, D)).requires_grad_()
        x = (x - 0.01 * torch.autograd.grad(f(x).sum(), x)[0]).detach().clamp(-1, 1)
    return x


for step in range(100):
    fp, fq = f(2 * torch.rand(B, D) - 1), f(draw(f))
    loss = fp.mean() - fq.mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
"""
AFFINE = PLAIN.replace("f = net()", "f = nn.Linear(D, 1)")
