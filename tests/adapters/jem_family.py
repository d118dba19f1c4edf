"""JEM and the codebases that come from it: loops of their structure, with their own arguments."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebmguard.adapters import hdge, jem, jempp, sadajem, vera
from tests.parts import BATCH, CHAINS, Classifier, difference, draw, get_sample_q, uniform
from tests.runs import Call, Run, Trial, batches, begin, cross_entropy, train

# The scripts' settings: their defaults, but for the sizes.
COMMON = {"sgld_lr": 1.0, "sgld_std": 1e-2, "n_steps": 3, "save_dir": "run"}
JEM = COMMON | {"p_x_weight": 1.0, "p_x_y_weight": 0.0, "class_cond_p_x_sample": False}
PYLD = {"sgld_lr": 0.0, "sgld_std": 0, "pyld_lr": 0.2, "in_steps": 4, "eps": 1, "plc": "alltrain1"}
JEMPP = JEM | PYLD
SADAJEM = COMMON | {"px": 1.0, "l2_coeff": 0.0, "sgld_std": 0}
# log q(y|x) + log q(x|y) + log q(x)
TERMS = {"pxsgld": 1.0, "pxysgld": 0.0, "pxycontrast": 1.0}
HDGE = COMMON | TERMS | {"plot_contrast": 0, "log_dir": "run"}
MODES = {"jem_baseline": True, "jem": True} | dict.fromkeys(
    ("clf_only", "maximum_likelihood", "ssm", "vat"), False
)
PENALTIES = {"reinit_freq": 0.05, "pg_control": 0.1, "p_control": 0.01}
VERA = COMMON | MODES | PENALTIES | {"sgld_lr": 1e-2**2 / 2}


def around(trial: Trial, run: Run, adapter: Any, args: Namespace, sampler: Any, *term: str) -> Any:
    """Loss and sampler of one term."""
    known = {"model": run.model, "buffer": run.chains}
    return trial.around(run, difference, sampler, adapter.settings(args, *term), known)


# -- JEM: a closure as a sampler; terms for p(x) and p(x, y) --------------------------------------


def train_terms(
    trial: Trial,
    adapter: Any,
    args: Namespace,
    weights: dict[str, float],
    network: Callable[[], nn.Module] = Classifier,
    **options: Any,
) -> Run:
    """JEM's loop, with a guard for each term that is on."""
    run = begin(network)
    weight, joint_weight = weights.values()
    pairs = []
    for term in [(name,) for name in weights] if joint_weight else [()]:
        sampler = get_sample_q(args.n_steps, args.sgld_lr, args.sgld_std, trial.temper)
        pairs.append(around(trial, run, adapter, args, sampler, *term))
    run.loss_fn, run.sampler = pairs[0]
    return train(run, trial.n, weight=weight, joint_weight=joint_weight, joint=pairs[-1], **options)


def train_jem(trial: Trial, **changes: Any) -> Run:
    args = Namespace(**JEM | changes)
    weights = {"p_x": args.p_x_weight, "p_x_y": args.p_x_y_weight}
    options = {"by_class": args.class_cond_p_x_sample, "grouped": trial.beta_star is not None}
    return train_terms(trial, jem, args, weights, **options)


# -- HDGE: JEM's sampler; two terms have one weight; contrastive terms on another function of x ---


class Hybrid(Classifier):
    """With the contrastive term, which compares logits with those in a queue."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(12, 3))

    def joint(self, x: Tensor) -> Tensor:
        logits = F.normalize(self.classify(x), dim=1)
        others = logits @ F.normalize(self.queue, dim=1).T
        return torch.cat([logits.logsumexp(1, keepdim=True), others], dim=1) / 0.1


def train_hdge(trial: Trial, **changes: Any) -> Run:
    """Chains of the second term are drawn given y and scored without it, as the script does."""
    args = Namespace(**HDGE | changes)
    weights = {"pxsgld": args.pxsgld, "pxysgld": args.pxsgld if args.pxysgld else 0.0}

    def supervised(f: Any, x: Tensor, y: Tensor) -> Any:
        target = torch.zeros(len(x), dtype=torch.long)
        contrast = F.cross_entropy(f.joint(x), target)
        return cross_entropy(f, x, y) + args.pxycontrast * contrast

    return train_terms(
        trial, hdge, args, weights, Hybrid, scored_by_class=False, supervised=supervised
    )


# -- JEM++: a sampler at module level that reads the gradient behind the first layer (PYLD) -------


class Sliced(Classifier):
    """``layer_one_out`` keeps its gradient. Batch normalisation stays in train mode."""

    layer_one_out: Tensor

    def __init__(self) -> None:
        super().__init__(batch_norm=True)
        self.layer_one.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, inputs: Any, out: Tensor) -> None:
        self.layer_one_out = out
        out.retain_grad()


def sample_pyld(f, chains, y=None, n_steps=10, in_steps=10, args=None, temper=lambda f: f):
    start, rows = draw(chains, y)
    x = start.requires_grad_()
    for _ in range(n_steps):
        (eta,) = torch.autograd.grad(temper(f(x, y=y)).sum(), [x], retain_graph=True)
        p = f.layer_one_out.grad.detach() if in_steps else None
        moved = x.data.requires_grad_()
        if args.sgld_lr > 0:
            moved = (x + eta.clamp(-args.eps, args.eps) * args.sgld_lr).clamp(-1, 1)
        for _ in range(in_steps):
            hamiltonian = (f.layer_one(moved) * p).sum()
            (inner,) = torch.autograd.grad(hamiltonian, [moved], retain_graph=True)
            moved.data = moved.data + inner.clamp(-args.eps, args.eps) * args.pyld_lr
            moved = moved.clamp(-1, 1)
        x.data = moved.data
        if args.sgld_std > 0:
            x.data += args.sgld_std * torch.randn_like(x)
    if in_steps:
        (-(f.layer_one(x.data) * p).sum()).backward()  # leaves gradients on the first layer
    f.train()
    chains[rows] = x.detach()
    return x.detach()


def train_jempp(trial: Trial, **changes: Any) -> Run:
    args = Namespace(**JEMPP | changes)
    torch.manual_seed(1)
    f: Any = Sliced()
    run = Run(f, torch.optim.SGD(f.parameters(), lr=0.05, momentum=0.9), uniform(CHAINS))

    sampler = functools.partial(sample_pyld, temper=trial.temper)
    loss_fn, sample_q = around(trial, run, jempp, args, sampler)
    for x, x_lab, y_lab in batches(trial.n):
        if args.plc == "alltrain1":
            fp_all = f(x)
        x_q = sample_q(f, run.chains, n_steps=args.n_steps, in_steps=args.in_steps, args=args)
        f.norm.train(args.plc != "eval")
        if args.plc != "alltrain1":
            fp_all = f(x)
        fq_all = f(x_q)
        run.calls.append(Call(fp_all, fq_all, x_q))
        l_p_x = loss_fn(fp_all, fq_all)
        f.norm.train()
        total = args.p_x_weight * l_p_x + cross_entropy(f, x_lab, y_lab)
        run.optimizer.zero_grad()
        total.backward()
        run.optimizer.step()
    return run.end()


# -- SADAJEM: SAM takes two losses per step -------------------------------------------------------


class Sam(torch.optim.Optimizer):
    """Climbs, then descends with the gradient found there; its own ``step`` is never called."""

    def __init__(self, params: Any, rho: float, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.weights = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self.weights if p.grad is not None]).norm()
        for p in self.weights:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * self.param_groups[0]["rho"] / (norm + 1e-12))
        self.zero_grad()

    def second_step(self) -> None:
        for p in self.weights:
            p.data = self.state[p]["old"]
        self.base_optimizer.step()
        self.zero_grad()


def train_sadajem(trial: Trial, *, outer: bool = False, **changes: Any) -> Run:
    """``others`` are the losses, first and second in turn; ``outer`` attaches SAM itself."""
    args = Namespace(**SADAJEM | changes)
    torch.manual_seed(1)
    f: Any = Classifier(batch_norm=True)
    optim = Sam(f.parameters(), rho=0.2, lr=0.02, momentum=0.9)
    run = Run(f, optim if outer else optim.base_optimizer, uniform(CHAINS))

    def sample_q(f: Any, chains: Tensor, y: Any = None, n_steps: int = 10, args: Any = None) -> Any:
        start, rows = draw(chains, y)
        x = start.requires_grad_()
        for _ in range(n_steps):
            (eta,) = torch.autograd.grad(trial.temper(f(x, y=y)).sum(), [x], retain_graph=True)
            x.data = (x + eta.clamp(-1, 1) * args.sgld_lr).data
            if args.sgld_std > 0:
                x.data += args.sgld_std * torch.randn_like(x)
            x.data = x.data.clamp(-1, 1)
        f.train()
        chains[rows] = x.detach()
        return x.detach()

    loss_fn, sampler = around(trial, run, sadajem, args, sample_q)
    for x, x_lab, y_lab in batches(trial.n):
        f.norm.momentum = 0.1
        fp_all = f(x)
        x_q = sampler(f, run.chains, n_steps=args.n_steps, args=args)
        fq_all = f(x_q)
        run.calls.append(Call(fp_all, fq_all, x_q))
        l_p_x = loss_fn(fp_all, fq_all)
        run.others.append(l_p_x.item())
        l_p_x += args.l2_coeff * (fp_all.mean() ** 2 + fq_all.mean() ** 2)
        total = args.px * l_p_x + cross_entropy(f, x_lab, y_lab)
        optim.zero_grad()
        total.backward()
        optim.first_step()

        f.norm.momentum = 0.0
        fp_all, fq_all = f(x), f(x_q)
        run.calls.append(Call(fp_all, fq_all, x_q))
        second = loss_fn(fp_all, fq_all)
        run.others.append(second.item())
        (second + cross_entropy(f, x_lab, y_lab)).backward()
        optim.second_step()
    return run.end()


# -- VERA: all by position; energies, or energies and logits, or a column that is squeezed --------


class Jem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logp_net = Classifier()

    def forward(self, x: Tensor, return_logits: bool = False) -> Any:
        logits = self.logp_net.classify(x)
        return (logits.logsumexp(1), logits) if return_logits else logits.logsumexp(1)


class Column(Jem):
    def forward(self, x: Tensor, return_logits: bool = False) -> Any:
        return self.logp_net(x)[:, None]


def train_vera(trial: Trial, **changes: Any) -> Run:
    args = Namespace(**VERA | changes)
    torch.manual_seed(1)
    f = Jem() if args.jem else Column()
    run = Run(f, torch.optim.Adam(f.parameters(), lr=1e-3, betas=(0.0, 0.9)), uniform(CHAINS))

    def sample_q(f, chains, batch_size, n_steps, sgld_lr, sgld_std, reinit_freq, device):
        assert (batch_size, reinit_freq, device) == (BATCH, 0.05, "cpu")
        return get_sample_q(n_steps, sgld_lr, sgld_std, trial.temper)(f, chains)

    loss_fn, sampler = around(trial, run, vera, args, sample_q)
    given = (BATCH, args.n_steps, args.sgld_lr, args.sgld_std, args.reinit_freq, "cpu")
    for _, x, y in batches(trial.n):
        x.requires_grad_()
        ld, logits = f(x, return_logits=True) if args.jem else (f(x).squeeze(), None)
        (grad_ld,) = torch.autograd.grad(ld.sum(), x, create_graph=True)
        x_g = sampler(f, run.chains, *given)
        lg_detach = f(x_g).squeeze()
        run.calls.append(Call(ld, lg_detach, x_g))
        logp_obj = -loss_fn(ld, lg_detach)
        e_loss = -logp_obj + (ld**2).mean() * args.p_control
        e_loss = e_loss + (grad_ld.flatten(1).norm(2, 1) ** 2 / 2).mean() * args.pg_control
        if logits is not None:
            e_loss = e_loss + F.cross_entropy(logits, y)
        run.optimizer.zero_grad()
        e_loss.backward()
        run.optimizer.step()
    return run.end()
