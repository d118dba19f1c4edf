"""Every refusal has a sentence and a way out, and the code names no other one."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

from ebmguard import trace
from ebmguard.trace.refusals import REFUSALS, Refused

CODE = "".join(path.read_text() for path in Path(trace.__file__).parent.glob("*.py"))
# A way out says what to do.
VERBS = re.compile(r"\b([aA]dd|Do|Fix|Give|Make|Move|Put|Run|Trace|Wrap|[wW]rite|change|pass)\b")


@pytest.mark.parametrize("name", REFUSALS)
def test_none_lacks_a_way_out(name: str) -> None:
    what, way_out = REFUSALS[name]
    facts = {field: f"<{field}>" for _, field, _, _ in string.Formatter().parse(what) if field}
    more = {field: f"<{field}>" for _, field, _, _ in string.Formatter().parse(way_out) if field}
    numbers = dict.fromkeys(("scale", "measured"), 1.0)
    refused = Refused(name, **{**facts, **more, **{k: v for k, v in numbers.items() if k in facts}})
    assert str(refused)
    assert "{" not in str(refused) + refused.exit
    assert VERBS.search(refused.exit), refused.exit
    assert refused.exit.endswith(".")


def test_the_code_names_no_other_and_each_of_them() -> None:
    named = set(re.findall(r'Refused\(\s*"([^"]+)"', CODE))
    assert named == set(REFUSALS)
