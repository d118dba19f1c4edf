"""A minimal JEM on real digits. Needs scikit-learn, which has them: pip install scikit-learn"""

import sys

import torch
from torch import nn

from ebmguard import guard

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("jem_digits.py needs the digits of scikit-learn: pip install scikit-learn")
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 8 - 1  # to [-1, 1]


class F(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Sequential(nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 10))

    def forward(self, x):
        return self.logits(x).logsumexp(1)


def sample_q(f, buffer, rows):  # JEM's: step size 1, noise 0.01
    x = torch.where(torch.rand(64, 1) < 0.05, 2 * torch.rand(64, 64) - 1, buffer[rows])
    for _ in range(10):
        x = x.detach().requires_grad_()
        x = x + torch.autograd.grad(f(x).sum(), x)[0] + 0.01 * torch.randn_like(x)
    buffer[rows] = x.detach()
    return x.detach()


f = F()
optimizer = torch.optim.Adam(f.parameters(), lr=1e-3)
buffer = 2 * torch.rand(1000, 64) - 1  # chains that persist
loss_fn, sample_q = g = guard(
    None,
    sample_q,
    model=f,
    optimizer=optimizer,
    log_dir="runs/jem",
)
for _ in range(steps):
    chosen = torch.randint(1500, (64,))
    x = images[chosen] + 0.03 * torch.randn(64, 64)
    negatives = sample_q(f, buffer, torch.randint(len(buffer), (64,)))
    loss = loss_fn(f(x), f(negatives)) + nn.functional.cross_entropy(f.logits(x), labels[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
right = f.logits(images[1500:]).argmax(1) == labels[1500:]
print(f"test accuracy {right.float().mean():.1%}, GradScale {g.last['grad_scale']:.2f}")
