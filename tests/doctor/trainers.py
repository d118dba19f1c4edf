"""Small trainers that run, each with the structure of a published one. They leave `losses`."""

HEAD = """
import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, y=None):
        return self.net(x).squeeze(-1)


losses = []
"""

# A factory that returns the sampler; energies and their means have names; a check at 1e8.
JEM = (
    HEAD
    + """
import argparse
import io

parser = argparse.ArgumentParser()
parser.add_argument("--sgld_lr", type=float, default=1.0)
parser.add_argument("--sgld_std", type=float, default=1e-2)
parser.add_argument("--n-steps", type=int, default=3)
args = parser.parse_args([])
buffer = torch.rand(20, 2) * 2 - 1


def get_sample_q(args):
    def sample_q(f, replay_buffer, y=None, n_steps=args.n_steps):
        f.eval()
        rows = torch.randint(len(replay_buffer), (8,))
        x_k = replay_buffer[rows].clone().requires_grad_()
        for k in range(n_steps):
            f_prime = torch.autograd.grad(f(x_k, y=y).sum(), [x_k], retain_graph=True)[0]
            x_k.data += args.sgld_lr * f_prime + args.sgld_std * torch.randn_like(x_k)
        f.train()
        replay_buffer[rows] = x_k.detach()
        return x_k.detach()

    return sample_q


def main(args):
    sample_q = get_sample_q(args)
    f = Net()
    optim = torch.optim.Adam(f.parameters(), lr=1e-3)
    for i in range(5):
        x_p_d = torch.randn(8, 2)
        x_q = sample_q(f, buffer)
        fp_all = f(x_p_d)
        fq_all = f(x_q)
        fp = fp_all.mean()
        fq = fq_all.mean()
        l_p_x = -(fp - fq)
        if i % 2 == 0:
            print("P(x)", fp.item(), fq.item(), (fp - fq).item())
        L = 0.0
        L += 1.0 * l_p_x
        if L.abs().item() > 1e8:
            print("bad")
            1 / 0
        optim.zero_grad()
        L.backward()
        optim.step()
        losses.append(L.item())
        torch.save({"model_state_dict": f.state_dict(), "replay_buffer": buffer}, io.BytesIO())


main(args)
"""
)

# A sampler that uses a global model, and a difference that is maximised.
SHORT_RUN = (
    HEAD
    + """
f = Net()


def sample_q(K=3):
    x_k = (torch.rand(8, 2) * 2 - 1).requires_grad_()
    for k in range(K):
        f_prime = torch.autograd.grad(f(x_k).sum(), [x_k])[0]
        x_k.data += f_prime + 1e-2 * torch.randn_like(x_k)
    return x_k.detach()


optim = torch.optim.Adam(f.parameters(), lr=1e-4)
for i in range(5):
    x_p_d, x_q = torch.randn(8, 2), sample_q()
    L = f(x_p_d).mean() - f(x_q).mean()
    optim.zero_grad()
    (-L).backward()
    optim.step()
    losses.append(-L.item())
"""
)

# An energy that is low on data, whose chains descend; `sample_q` draws data.
ANATOMY = (
    HEAD
    + """
config = {"epsilon": 0.01}
f = Net()
data = torch.randn(50, 2)


def sample_q():
    return data[torch.randperm(50)[:8]]


def sample_s_t(L, init_type="uniform"):
    x_s_t = (torch.rand(8, 2) * 2 - 1).requires_grad_()
    for ell in range(L):
        f_prime = torch.autograd.grad(f(x_s_t).sum(), [x_s_t])[0]
        x_s_t.data += - f_prime + config["epsilon"] * torch.randn_like(x_s_t)
    return x_s_t.detach(), f_prime.norm()


optim = torch.optim.Adam(f.parameters(), lr=1e-4)
for i in range(5):
    x_q = sample_q()
    x_s_t, r_s_t = sample_s_t(L=3)
    d_s_t = f(x_q).mean() - f(x_s_t).mean()
    optim.zero_grad()
    d_s_t.backward()
    optim.step()
    losses.append(d_s_t.item())
"""
)

# A sampler in the training loop, with a clipped gradient, a clamp, and a generator that is empty.
INLINE = (
    HEAD
    + """
def requires_grad(parameters, flag=True):
    for p in parameters:
        p.requires_grad = flag


def train(model, alpha=1, step_size=10, sample_step=3):
    noise = torch.randn(8, 2)
    parameters = model.parameters()
    optimizer = torch.optim.Adam(parameters, lr=1e-4)
    for i in range(5):
        pos_img = torch.rand(8, 2)
        neg_img = torch.rand(8, 2)
        neg_img.requires_grad = True
        requires_grad(parameters, False)
        model.eval()
        for k in range(sample_step):
            noise.normal_(0, 0.005)
            neg_img.data.add_(noise.data)
            neg_out = model(neg_img)
            neg_out.sum().backward()
            neg_img.grad.data.clamp_(-0.01, 0.01)
            neg_img.data.add_(neg_img.grad.data, alpha=-step_size)
            neg_img.grad.detach_()
            neg_img.grad.zero_()
            neg_img.data.clamp_(0, 1)
        neg_img = neg_img.detach()
        model.train()
        model.zero_grad()
        pos_out = model(pos_img)
        neg_out = model(neg_img)
        loss = alpha * (pos_out ** 2 + neg_out ** 2)
        loss = loss + (pos_out - neg_out)
        loss = loss.mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


train(Net())
"""
)

# A sampler object whose static method has the loop; one forward pass for data and samples.
OBJECT = (
    HEAD
    + """
class Sampler:
    def __init__(self, model, sample_size):
        self.model = model
        self.sample_size = sample_size

    def sample_new_exmps(self, steps=3, step_size=10):
        start = torch.rand(self.sample_size, 2) * 2 - 1
        return Sampler.generate_samples(self.model, start, steps=steps, step_size=step_size)

    @staticmethod
    def generate_samples(model, inp_imgs, steps=60, step_size=10):
        for p in model.parameters():
            p.requires_grad = False
        inp_imgs.requires_grad = True
        noise = torch.randn(inp_imgs.shape)
        for _ in range(steps):
            noise.normal_(0, 0.005)
            inp_imgs.data.add_(noise.data)
            out_imgs = -model(inp_imgs)
            out_imgs.sum().backward()
            inp_imgs.grad.data.clamp_(-0.03, 0.03)
            inp_imgs.data.add_(-step_size * inp_imgs.grad.data)
            inp_imgs.grad.zero_()
            inp_imgs.data.clamp_(min=-1.0, max=1.0)
        for p in model.parameters():
            p.requires_grad = True
        return inp_imgs.detach()


class Model:
    def __init__(self):
        self.cnn = Net()
        self.sampler = Sampler(self.cnn, sample_size=8)

    def training_step(self, real_imgs):
        fake_imgs = self.sampler.sample_new_exmps(steps=3, step_size=10)
        inp_imgs = torch.cat([real_imgs, fake_imgs], dim=0)
        real_out, fake_out = self.cnn(inp_imgs).chunk(2, dim=0)
        reg_loss = 0.1 * (real_out ** 2 + fake_out ** 2).mean()
        cdiv_loss = fake_out.mean() - real_out.mean()
        return reg_loss + cdiv_loss


m = Model()
optim = torch.optim.Adam(m.cnn.parameters(), lr=1e-4)
for i in range(5):
    loss = m.training_step(torch.randn(8, 2))
    optim.zero_grad()
    loss.backward()
    optim.step()
    losses.append(loss.item())
"""
)

TRAINERS = {
    "jem": JEM,
    "short_run": SHORT_RUN,
    "anatomy": ANATOMY,
    "inline": INLINE,
    "object": OBJECT,
}
