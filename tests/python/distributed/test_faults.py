"""Every fault in every call (`make faults`); daily one of each kind of ending and of each call."""

from __future__ import annotations

import pytest
from faults import Case, all_cases, problem, run

DAILY = [
    Case("kill", "route", "nested", 4),
    Case("kill", "backward", "flat", 2),
    Case("return", "attention", "nested", 4),
    Case("exception", "loader", "flat", 2),
    Case("sigint", "plan", "nested", 2),
    Case("sigterm", "reverse", "flat", 4),
    Case("stop", "route", "nested", 2),
]
CASES = [pytest.param(case, marks=[] if case in DAILY else pytest.mark.nightly, id=str(case)) for case in all_cases()]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_fails_is_named_on_all_others(case: Case) -> None:
    fault_time, outcomes = run(case)
    assert problem(case, fault_time, outcomes) == "", outcomes
