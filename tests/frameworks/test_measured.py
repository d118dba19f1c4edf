"""What is measured of the frameworks' own loops is true, or refused for the right reason."""

from __future__ import annotations

import pytest

from tests.frameworks.lightning_parts import WARNS
from tests.frameworks.table import LOOPS, measure
from tests.sampling.table import agrees

pytestmark = WARNS


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_a_framework_is_what_it_is(name: str) -> None:
    found = measure(name)
    assert agrees(LOOPS[name][0], found), found
