"""Refusals: one table with the reason of a refusal and its way out."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["REFUSALS", "Refused"]

_CALLS = (
    "Call `draw` in the sampler's place, and `loss_fn(f_pos, f_neg)` in that of the difference. "
    "Where `guard` is given no sampler, there is no `draw`: write `loss_fn.guard.temper(...)` "
    "around the energy that the chain climbs."
)
_BY_HAND = f"Make `loss_fn, draw = {{guard}}` once, before the first step. {_CALLS}"
# What is wrong, and what to do then. Names in braces are facts that were seen.
_TABLE = """\
no sampler = no module with an output per sample was differentiated by its input in a loop
    -> Wrap what draws the negatives by hand, with sampler_scale=1.0, which leaves it as it is; the
    guard then says that it sees no gradient, which is right. Where noise or a generator stands for
    a sampler, there is nothing to guard. Where the trainer samples later, trace more steps, with
    -n.
stopped = the script stopped before: {error}
    -> Run it by itself with the same arguments until it trains, then trace it again.
no difference = energies of samples and of data were met in no difference of a loss
    -> If the loss is a difference of mean energies, write it with torch's own functions, at one
    place, as `f(samples).mean() - f(x).mean()`, and trace again. If it is none (squares, softplus,
    a likelihood), there is no contrastive part that a guard could take. For InfoNCE, with positives
    and negatives in one call, `loss_fn(f(x, y), f(x, samples), groups="rows")` is the tempered
    form. [by hand]
conditional = the energy at {site} is a conditional one, f(x, y), and conditions come again, or
    samples have others than the data
    -> [by hand] Give `loss_fn` also `groups=(y_pos, y_neg)`, the number of the condition, such as a
    class, of each sample.
not evaluated = the trainer's own calls could not be made again with other energies: {error}
    -> [by hand]
another energy = the sampler differentiates {called}, and the loss has another output, at {place}
    -> [by hand] Temper the part of {called} that is the loss's energy. Where it has none, the
    chains draw from another density than the loss trains: let them follow the loss's energy, or
    leave out `temper`, and beta_star acts through the weights alone.
softmax = the loss at {place} is InfoNCE, a softmax of each positive among its negatives, which
    these lines make to the tempered objective, Eq. 8: another loss, so no bits can agree
    -> Take the lines as they are, with a beta_star of yours. At beta_star=1 the weights are those
    of InfoNCE; at 0 the loss is the plain difference of means.
two losses = samples of their own are drawn for several losses, each of which needs a guard
    -> Make {ways}. [calls]
no sign = which of the samplers draws the negatives: their steps do not all tell one sign
    -> [by hand] Take the one that draws the negatives, with convention="energy" where it goes down,
    and leave the other as it is.
wrong sign = the sampler goes {way} the output, and the loss {word} the output there
    -> One of the two is turned round: change the sign of the sampler's step at {loop}, or of the
    loss at {place}, and trace again.
by hand = no place was found where a guard could be made for the call at {entry} and the loss at
    {place}
    -> [by hand]
one place = the sampler and the loss call the energy at the same place, {site}
    -> Give the sampler a line of its own for its call of the energy, and trace again.
no names = the loss at {place} is no difference of two means of energies that have names there
    -> Give the energies of samples and of data a name each, in lines of their own above, in the
    same function, and trace again.
guarded run = the guarded run stopped: {error}
    -> Where the error names a fix, do that, and trace again. Else make the change by hand.
guards = {guards} guards were made, which saw {sampler_calls} sampler calls and {losses} losses
    -> Move the line that makes the guard to where it runs once, before the first step.
warned = the guard itself warns: {error}
    -> Do what it says, and trace again.
differs = parameters or random states differ from those of the run without them
    -> Where energies draw random numbers, give them names in lines of their own above, in the order
    of now, and trace again. Else the loss rounds otherwise: pass its own expression,
    `guard(lambda p, n: ..., ...)`.
not repeatable = the script cannot be repeated: a second run without these lines {error}
    -> Fix its seeds, let it write into folders that exist (`exist_ok=True`), or start it from the
    same files; then trace again.
"""
_ROWS = re.findall(
    r"^(.+?) = (.+?)\n    -> (.+?)(?=\n\S|\n\Z)",
    _TABLE.replace("[by hand]", _BY_HAND).replace("[calls]", _CALLS),
    re.M | re.S,
)
REFUSALS: Mapping[str, tuple[str, str]] = {
    name: (" ".join(what.split()), " ".join(way_out.split())) for name, what, way_out in _ROWS
}


class Refused(Exception):
    """A refusal by its name in ``REFUSALS``, with the facts of its sentences."""

    def __init__(self, why: str, /, **facts: object) -> None:
        self.why = why
        what, self.exit = (words.format(**facts) for words in REFUSALS[why])
        super().__init__(what)
