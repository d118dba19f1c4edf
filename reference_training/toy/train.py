"""The toy trainer: an ensemble of small EBMs as one batched network under one guard.

The training loop is that of Nijkamp et al. (2020), with a leading dimension for the members.
"""

from __future__ import annotations

from typing import Any

import torch

from ebmguard import guard

from ..device import describe, find_device
from ..engine.graphs import graphed_energies
from ..engine.interrupt import DeferredInterrupt
from ..engine.progress import Reporter, default_reporter
from ..engine.restoring import restoring
from ..engine.run_folder import RunFolder
from .config import ToyConfig
from .distributions import DISTRIBUTIONS
from .draws import Draws
from .evaluate import Evaluator
from .network import EnsembleMLP
from .record import Record
from .sampler import make_training_sampler


def train(
    config: ToyConfig, folder: RunFolder, reporter: Reporter | None = None
) -> dict[str, Any] | None:
    """Run the training, or what is left of it, and write the run folder.

    Args:
        config: the settings, checked.
        folder: a folder of its own; if it has a checkpoint, the run goes on from there.
        reporter: what a person sees; None chooses for the terminal.

    Returns:
        What results.json holds, or None where Ctrl-C was pressed; the run can then be resumed.

    Raises:
        ConfigError: the device does not exist, or is not of the kind that the run began on.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    device = find_device(config.device)
    settings, members = config.settings, config.members
    distribution = DISTRIBUTIONS[settings.data]
    reporter = reporter or default_reporter(every=max(1, settings.iterations // 20))

    network = EnsembleMLP(members.seed_of_each, distribution.dim).to(device)
    # Every member's gradient is its own, and so is every entry of Adam's state.
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.lr, fused=True)
    draws = Draws(distribution, settings, members, members.seeds, device)
    evaluator = Evaluator(settings, members, device)
    record = Record(config, folder, len(members), device)
    state = folder.checkpoints.load(device)
    with restoring(folder.path):
        folder.cut_rows(state["row_sizes"] if state else {})

    sample_q = make_training_sampler(settings, device)
    # One guard for the whole ensemble: beta* is a vector over the members, and so is the variant.
    loss_fn, sample_q = guard(
        None,
        sample_q,
        variant=members.variant_of_each,
        log_dir=folder.path,
        on_alert=record.on_alert,
        **members.strength(settings.output_scale, settings.iterations, device),
    )
    energies = graphed_energies(
        network,
        *(
            torch.zeros(len(members), n, distribution.dim, device=device)
            for n in (settings.n_pos, settings.negatives)
        ),
    )

    def checkpoint() -> None:
        loss_fn.guard.flush()
        folder.checkpoints.save(
            record.next_step,
            {
                "row_sizes": folder.row_sizes(),
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "draws": draws.state_dict(),
                "guard": loss_fn.guard.state_dict(),
                "record": record.state_dict(),
            },
        )

    if state:
        with restoring(folder.path):
            network.load_state_dict(state["network"])
            optimizer.load_state_dict(state["optimizer"])
            draws.load_state_dict(state["draws"])
            loss_fn.guard.load_state_dict(state["guard"])
            record.load_state_dict(state["record"])
    reporter.start(config.scenario, record.next_step, settings.iterations)
    try:
        with DeferredInterrupt() as interrupt:
            for step in range(record.next_step, settings.iterations):
                if interrupt.requested:
                    break
                optimizer.param_groups[0]["lr"] = settings.lr_at(step)
                x_pos = draws.positives()
                x0, noise = draws.chains(settings.n_neg)
                x_neg = sample_q(network, x0, noise) if sample_q else x0
                f_pos, f_neg = energies(x_pos, x_neg)
                loss = loss_fn(f_pos, f_neg)  # summed over the members
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

                record.after_update(f_pos.detach(), f_neg.detach())
                reporter.step(step + 1, record.shown(loss_fn.guard.last))
                if record.is_due:
                    record.evaluate(evaluator, network, loss_fn.guard.members)
                if record.is_due or record.next_step % config.checkpoint_every == 0:
                    checkpoint()
            checkpoint()
            results = None
            if not interrupt.requested:
                if not record.is_evaluated:  # resumed with as many updates as there were
                    record.evaluate(evaluator, network, loss_fn.guard.members)
                results = record.finish(evaluator, network, describe(device))
            # A caller with more to do must hear of a Ctrl-C that came at the very end.
            return None if interrupt.requested else results
    finally:
        reporter.stop()
        loss_fn.guard.close()
