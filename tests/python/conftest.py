from __future__ import annotations

import hypothesis
import pytest

# No limit on the time of an example: on a busy machine a limit would test the machine.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# Files that take longest run first: where files run side by side, none of these should be left when others are done.
LONGEST = (
    "test_simulate.py",
    "test_train_images.py",
    "test_exactness.py",
    "test_trainers.py",
    "test_adapters_on_ranks.py",
    "test_compile.py",
    "test_calibrate.py",
)


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(item, "callspec", None) and item.callspec.params.get("world", 0) > 2:
            item.add_marker("nightly")
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
