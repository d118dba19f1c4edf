"""What cannot be told, or proven: one table, each with its sentence and a way out."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["REFUSALS", "Refused"]

# By name: what is wrong, and what to do then. Names in braces are facts that were seen.
REFUSALS: Mapping[str, tuple[str, str]] = {
    "no sampler": (
        "no module with an output per sample was differentiated by its input in a loop",
        "Wrap what draws the negatives by hand, with sampler_scale=1.0, which leaves it as it is. "
        "Where noise or a generator stands for a sampler, there is nothing to guard.",
    ),
    "stopped": (
        "the script stopped before: {error}",
        "Run it by itself with the same arguments until it trains, then trace it again.",
    ),
    "no difference": (
        "energies of samples and of data were met in no difference of a loss",
        "If the loss is a difference of mean energies, write it with torch's own functions, at one "
        "place, as `f(samples).mean() - f(x).mean()`, and trace again. If it is none (squares, "
        "softplus, a likelihood), there is no contrastive part that a guard could take.",
    ),
    "not evaluated": (
        "the trainer's own calls could not be made again with other energies: {error}",
        "Make `loss_fn, draws = {guard}` by hand, where the sampler is made. Call `draws` in its "
        "place, and `loss_fn(f_pos, f_neg)` in that of the difference of means.",
    ),
    "one side": (
        "the difference at {place} lowers, or raises, both of its sides",
        "Write what is no difference of mean energies in a statement of its own, and trace again.",
    ),
    "another energy": (
        "the sampler differentiates {called}, and the loss has another output, at {place}",
        "Make `{made}`. Inside of {called} write `g.temper(...)` around the part of it that is the "
        "loss's energy, and in the loss `g.loss(f_pos, f_neg)`.",
    ),
    "two losses": (
        "`{sampler}` draws for losses at {place}: a guard and a call for each",
        "Make `first_loss, first = {guard}` and `second_loss, second = {guard}`. Draw the samples "
        "of each loss with the one or the other, and call its loss there.",
    ),
    "both ways": (
        "of the samplers of this difference one goes up and another down",
        "Wrap the one that draws the negatives by hand, and leave the other as it is.",
    ),
    "no sign": (
        "which of the samplers draws the negatives: none of them has told its sign",
        "Wrap the one that draws the negatives by hand, and leave the other as it is.",
    ),
    "wrong sign": (
        "the sampler goes {way} the output, and the loss {word} the output there",
        "One of the two is turned round: change the sign of the sampler's step at {loop}, or of "
        "the loss at {place}, and trace again.",
    ),
    "no name": (
        "the sampler is no call of a name that could be bound again, at {entry}",
        "Give it a name in the line before, `draw = ...`, call `draw(...)`, and trace again.",
    ),
    "elsewhere": (
        "`{name}` is called at {entry}, and the loss is elsewhere, at {place}",
        "Put `guarded = {guard}` where the sampler is made, use `guarded.sampler` at {entry}, and "
        "hand `guarded.loss` to what computes the loss.",
    ),
    "no __init__": (
        "the class {name} has no __init__, where a guard could be made",
        "Write one, `def __init__(self): super().__init__()`, and trace again.",
    ),
    "not bound": (
        "`{name}` is bound nowhere in {file} that could be seen",
        "Write `loss_fn, draw = {guard}` above the loop around {entry}; call `draw(...)` there, "
        "and `loss_fn(f_pos, f_neg)` in the loss.",
    ),
    "inside a step": (
        "`{name}` is known only inside of the function that takes a step",
        "Write `loss_fn, {name} = {guard}` where that function's caller has it; hand in `loss_fn` "
        "as well, and call it in the loss.",
    ),
    "one place": (
        "the sampler and the loss call the energy at the same place, {site}",
        "Give the sampler a line of its own for its call of the energy, and trace again.",
    ),
    "two files": (
        "the sampler calls the energy at {site}, and the loss is at {place}",
        "Make `{made}` in a file that both import. Write `g.temper(...)` around the energy at "
        "{site}, and `g.loss(f_pos, f_neg)` in the loss.",
    ),
    "no energies' name": (
        "no name for the energies of {label} where they meet, at {place}",
        "Give the energies a name before they are averaged, in the same function, and trace again.",
    ),
    "no place": (
        "the loss at {place} is no difference of two means that could be replaced",
        "Write `f_pos, f_neg = {reweight}(f_pos, f_neg)` above it with its energies, one number "
        "per sample, and use these in its difference.",
    ),
    "no source": (
        "a file could not be read: {error}",
        "Trace the script where its sources are; of compiled files nothing can be shown.",
    ),
    "guarded run": (
        "the guarded run stopped: {error}",
        "Make the change by hand; where the error names another fix, do that first.",
    ),
    "guards": (
        "{guards} guards were made, which saw {calls} sampler calls and {losses} losses",
        "Move the line that makes the guard to where it runs once, before the first step.",
    ),
    "scale": (
        "the guard measures an output scale of {measured:g} in these lines, and {scale:g} was seen",
        "Add `output_scale={scale:g}` to the guard, and ask `g.measured` why it differs.",
    ),
    "warned": (
        "the guard itself warns: {error}",
        "Do what it says, in these lines.",
    ),
    "differs": (
        "parameters or random states differ from those of the run without them",
        "The loss rounds otherwise: pass its own expression, `guard(lambda p, n: ..., ...)`.",
    ),
    "not repeatable": (
        "Two runs without these lines differ as well: the script cannot be repeated.",
        "Fix its seeds, or start it from the same files, and trace again.",
    ),
}


class Refused(Exception):
    """What could not be told, by its name in ``REFUSALS``, with the facts of its sentences."""

    def __init__(self, why: str, /, **facts: object) -> None:
        self.why = why
        what, self.exit = (words.format(**facts) for words in REFUSALS[why])
        super().__init__(what)
