"""The errors as objects: what they say and carry, also from another process."""

from __future__ import annotations

import copy
import inspect
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest

from ebmguard import errors
from ebmguard.alerts import Alert, Level
from ebmguard.errors import BudgetSpentError, DivergenceError, EbmguardError
from tests import forks
from tests.parts import PATIENCE

ALERT = Alert("energy_blowup", Level.ERROR, 7, "energy_gap", 9.0, 0.5, 64, ("a", "b"), member=2)


class OwnError(DivergenceError):
    """Of a user's rule, with an argument of its own."""

    def __init__(self, alert: Alert, hint: str = "none") -> None:
        super().__init__(alert)
        self.hint = hint


def an_error(cls: type[EbmguardError]) -> EbmguardError:
    if issubclass(cls, BudgetSpentError):
        return cls(ALERT, 5, nothing_to_go_back_to=True)
    return cls(ALERT) if issubclass(cls, DivergenceError) else cls("wrong")


ALL = [each for name in errors.__all__ if inspect.isclass(each := getattr(errors, name))]


def test_all_of_them_are_listed():
    found = {cls for _, cls in inspect.getmembers(errors, inspect.isclass)}
    assert {cls for cls in found if issubclass(cls, EbmguardError)} == set(ALL)


@pytest.mark.parametrize("cls", [*ALL, OwnError])
def test_it_goes_through_pickle_and_copy(cls):
    error = an_error(cls)
    error.add_note("seed 3")
    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    for back in (*[pickle.loads(pickle.dumps(error, p)) for p in protocols], copy.copy(error)):
        assert type(back) is cls
        assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))


def fail(cls: type[EbmguardError]) -> None:
    raise an_error(cls)


def test_it_comes_out_of_a_process_pool():
    with ProcessPoolExecutor(1, mp_context=forks.SERVER) as pool:
        for cls in (errors.EnergyBlowupError, BudgetSpentError, errors.ConfigError):
            with pytest.raises(cls) as caught:
                pool.submit(fail, cls).result(timeout=PATIENCE)
            expected = an_error(cls)
            assert (str(caught.value), vars(caught.value)) == (str(expected), vars(expected))


@pytest.mark.parametrize(("nothing", "why"), [(True, "no snapshot yet"), (False, "5 done")])
def test_a_spent_budget_says_why(nothing, why):
    error = BudgetSpentError(ALERT, 5, nothing_to_go_back_to=nothing)
    assert (error.alert, error.rollbacks) == (ALERT, 5)
    assert str(error).startswith(ALERT.message)
    assert why in str(error)
