"""The command line of `ebmguard train jem`: its settings in groups, with true defaults."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Annotated, Any, get_type_hints

import tyro

from .config import JemConfig
from .scenarios import DEFAULT, DIGITS

__all__ = ["GROUPS", "from_words"]

GROUPS = {
    "basics": """out resume seed data data_root download scenario iterations lr warmup n_pos n_neg
        n_labelled p_x_weight p_y_x_weight p_x_y_weight energy_l2 clip_norm class_conditional
        labels_per_class optimizer weight_decay activation norm dropout unconditional depth width
        data_noise train_images valid_images test_images image_size
        checkpoint_every""",
    "sampler": "sgld_steps step_size noise_std buffer_size reinit_rate",
    "guard": "beta_star finer_steps variant action",
    "evaluation": """eval_every quality_samples alert_context alert_window stop_after features""",
    "hardware": "device precision compile threads",
}
"""The settings of :class:`.JemConfig` by the heading under which the help has them."""

# What None stands for, where it is not a number of the scenario's.
_NONE = {
    "data": "digits, or cifar10 for a scenario of the paper",
    "data_root": "$EBMGUARD_DATA",
    "scenario": "digits, or 1 for other data",
    "clip_norm": "off",
    "labels_per_class": "all",
    "image_size": "as they are",
}


def _words() -> dict[str, str]:
    """What the settings are, by name: the strings below them in the source."""
    found = {}
    for cls in filter(dataclasses.is_dataclass, reversed(JemConfig.__mro__)):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = inspect.cleandoc(ast.literal_eval(text.value))
    return found


def _default(name: str) -> str:
    """What counts where a setting that is None by default is not given."""
    if name in _NONE:
        return _NONE[name]
    digits, paper = (getattr(scenario, name) for scenario in (DIGITS, DEFAULT))
    shown = ["all" if value is None else f"{value:,}" for value in (digits, paper)]
    return shown[0] if shown[0] == shown[1] else f"{shown[0]} on digits, {shown[1]} in scenario 1"


def _group(name: str) -> Any:
    """The dataclass of a group, whose fields are those of the settings."""
    kinds, words = get_type_hints(JemConfig), _words()
    fields = {field.name: field for field in dataclasses.fields(JemConfig)}
    made: list[tuple[str, Any, Any]] = []
    for own in GROUPS[name].split():
        default = fields[own].default
        hint = f"(default: {_default(own)})" if default is None else None
        said = tyro.conf.arg(help=words[own], help_behavior_hint=hint)
        kind = Annotated[kinds[own], said, tyro.conf.DisallowNone]  # type: ignore[valid-type]
        made.append((own, kind, dataclasses.field(default=default)))
    return tyro.conf.OmitArgPrefixes[dataclasses.make_dataclass(name, made)]  # type: ignore[misc]


def from_words(**groups: Any) -> JemConfig:
    """The settings from their groups."""
    given = {f.name: getattr(g, f.name) for g in groups.values() for f in dataclasses.fields(g)}
    return JemConfig(**given)


# What tyro reads of a function: one parameter for each group.
from_words.__doc__ = JemConfig.__doc__
from_words.__annotations__ = {name: _group(name) for name in GROUPS}
from_words.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in GROUPS]
)
