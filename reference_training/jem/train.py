"""The JEM reference trainer: classifier and EBM in one network (Grathwohl et al. 2020).

The training loop is an ordinary one; what the guard adds to it are the two marked lines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ebmguard import Guard, guard
from ebmguard.errors import ConfigError
from ebmguard.samplers import ReplayBuffer
from ebmguard.sinks import read_jsonl

from ..data import load_data
from ..device import describe, find_device
from ..interrupt import DeferredInterrupt
from ..progress import Reporter, SilentReporter, default_reporter
from ..ranks import ONE_RANK, Ranks
from ..run_folder import RunFolder
from .config import JemConfig
from .draws import Draws
from .logbook import Logbook
from .parts import (
    Classifier,
    check_run,
    make_evaluator,
    make_network,
    of_class,
    set_precision,
)
from .sampler import make_sampler


def train(
    config: JemConfig,
    folder: RunFolder,
    reporter: Reporter | None = None,
    ranks: Ranks = ONE_RANK,
) -> dict[str, Any] | None:
    """Run the training, or what is left of it, and write the run folder.

    Args:
        config: the settings, checked.
        folder: a folder of its own; if it has a checkpoint, the run goes on from there.
        reporter: what a person sees; None chooses for the terminal.
        ranks: the processes that train together.

    Returns:
        What results.json holds, or None where Ctrl-C stopped the run; it can then be resumed.

    Raises:
        ConfigError: the device or the data do not exist, what the settings ask for cannot be done
            on several ranks, or the run has more steps already than it is to have.
    """
    settings = config.settings
    if config.threads:
        torch.set_num_threads(config.threads)
    device = find_device(config.device)
    set_precision(config)
    reporter = (reporter or default_reporter()) if ranks.is_first else SilentReporter()
    data = load_data(
        config.data,
        config.root,
        train_images=settings.train_images,
        valid_images=settings.valid_images,
        test_images=settings.test_images,
    ).to(device)
    check_run(config, data, ranks)
    network = make_network(config, data, device)
    # All of a step's images and samples pass through the network at once, which is also what
    # several ranks need: their gradients are averaged in one backward pass.
    classify = Classifier(network)
    if config.compile:
        network.compile()
        classify.compile()
    classify_all = ranks.parallel(classify)
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.lr, fused=True)
    draws = Draws(data, settings, config.seed, ranks)
    # A stream of random numbers of its own on each rank, apart from that of the images.
    rng = torch.Generator(device).manual_seed(2 * config.seed + 1 + (ranks.rank << 32))
    buffer = ReplayBuffer(
        ranks.share(settings.buffer_size),
        data.sample_shape,
        reinit_rate=settings.reinit_rate,
        generator=rng,
        classes=data.classes if config.class_conditional or config.p_x_y_weight else 1,
    )
    original = make_sampler(settings, ranks.share(settings.n_neg), rng)
    logbook = Logbook(
        config,
        folder,
        network,
        data,
        make_evaluator(config, data, network, device),
        epoch=draws.steps_per_epoch,
        reporter=reporter,
    )
    state = folder.checkpoints.load(device)
    if state and state["logbook"]["record"]["next_step"] > settings.iterations:
        raise ConfigError(
            f"{folder.path} has {state['logbook']['record']['next_step']} steps already, "
            f"iterations is {settings.iterations}; give --iterations that many or more"
        )
    folder.cut_rows(state["row_sizes"] if state else {})

    # The first line of the guard. The objects it returns are drop-in replacements.
    loss_fn, sample_q = guard(
        None,
        original,
        beta_star=config.beta_star,
        output_scale=settings.output_scale,
        variant=config.variant,
        log_dir=folder.path if ranks.is_first else None,
        on_alert=logbook.on_alert,
        process_group=ranks.group,
    )
    # Optional: the guard's step then ends with the optimizer's, so that checkpoints between two
    # steps of the loop hold no half-recorded one.
    loss_fn.guard.attach(optimizer=optimizer)
    guards: dict[str, Guard] = {"p_x": loss_fn.guard}
    if config.p_x_y_weight:
        # f(x, y) is another population of energies than f(x): bands and weights of its own.
        loss_xy, sample_xy = guard(
            None,
            original,
            beta_star=config.beta_star,
            output_scale=settings.output_scale,
            variant=config.variant,
            log_dir=folder.path / "p_x_y",
            on_alert=logbook.on_alert,
        )
        guards["p_x_y"] = loss_xy.guard

    def checkpoint() -> None:
        for own in guards.values():
            own.flush()
        logbook.flush()
        folder.checkpoints.save(
            logbook.record.next_step,
            {
                "row_sizes": folder.row_sizes(),
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "buffer": buffer.state_dict(),
                "draws": draws.state_dict(),
                "guards": {name: own.state_dict() for name, own in guards.items()},
                "logbook": logbook.state_dict(),
            },
        )

    def chains_of_all_ranks() -> Tensor | None:
        if not (settings.quality_samples and config.has_samples):
            return None
        # Rows of a class lie together, so the ones that are judged are spread over all of them.
        stride = max(1, settings.buffer_size // settings.quality_samples)
        return ranks.joined(buffer.samples[::stride])[: settings.quality_samples]

    if state:
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        buffer.load_state_dict(state["buffer"])
        draws.load_state_dict(state["draws"])
        for name, own in guards.items():
            own.load_state_dict(state["guards"][name])
        logbook.load_state_dict(state["logbook"])
    del state
    first = logbook.record.next_step
    reporter.start(f"beta* = {config.beta_star:g}", first, settings.iterations)
    try:
        with DeferredInterrupt() as interrupt:
            for step in range(first, settings.iterations):
                if logbook.finished or logbook.interrupted:
                    break
                if logbook.is_due(step):
                    logbook.evaluate(step, chains_of_all_ranks())
                logbook.before_step(step)
                optimizer.param_groups[0]["lr"] = settings.lr_at(step)
                x_pos, x_lab, labels = draws.batch(step)

                x_neg = None
                parts = {"pos": x_pos}
                if config.p_x_weight:
                    y_neg = None
                    if config.class_conditional:
                        size = (ranks.share(settings.n_neg),)
                        y_neg = torch.randint(data.classes, size, generator=rng, device=device)
                    x_neg = parts["neg"] = sample_q(network, buffer, y_neg)
                if x_lab is not None:
                    parts["lab"] = x_lab
                if config.p_x_y_weight:
                    parts["neg_y"] = sample_xy(network, buffer, labels)
                sizes = [len(x) for x in parts.values()]
                every = classify_all(torch.cat(list(parts.values()))).split(sizes)
                logits = dict(zip(parts, every, strict=True))
                own = logits["pos" if x_lab is None else "lab"]

                share = ranks.weight(settings.n_labelled or settings.n_pos)
                cross_entropy = F.cross_entropy(own, labels) * share
                gap = cross_entropy.new_zeros(())
                loss = config.p_y_x_weight * cross_entropy
                if config.p_x_y_weight:
                    f_pos, f_neg = (of_class(logits_, labels) for logits_ in (own, logits["neg_y"]))
                    gap = f_pos.mean() - f_neg.mean()
                    loss = loss + config.p_x_y_weight * loss_xy(
                        f_pos, f_neg, groups=(labels, labels)
                    )
                if config.p_x_weight:
                    f_pos, f_neg = (logits[name].logsumexp(dim=1) for name in ("pos", "neg"))
                    gap = f_pos.mean() * ranks.weight(settings.n_pos) - f_neg.mean() * ranks.weight(
                        settings.n_neg
                    )
                    # The second line of the guard; it was f_neg.mean() - f_pos.mean().
                    l_p_x = loss_fn(f_pos, f_neg)
                    loss = loss + config.p_x_weight * l_p_x
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

                stopped = torch.full_like(gap, float(interrupt.requested))
                logbook.after_step(
                    step,
                    ranks.average(torch.stack((cross_entropy, gap, stopped)).detach()),
                    x_neg=parts.get("neg_y", x_neg),
                    guard=loss_fn.guard.last,
                )
                if logbook.record.next_step % config.checkpoint_every == 0:
                    checkpoint()
            checkpoint()
            if not logbook.finished:
                return None
            rows = read_jsonl(folder.path / "metrics.jsonl") if config.p_x_weight else []
            return logbook.finish(rows, describe(device), chains_of_all_ranks())
    finally:
        reporter.stop()
        logbook.close()
        for own in guards.values():
            own.close()
