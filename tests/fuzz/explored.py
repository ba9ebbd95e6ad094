"""What `tests.fuzz.properties` adds to pytest: more examples, another order, failures kept."""

import os
import random
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle by the seed, so that a short pass does not always see the same tests."""
    random.Random(config.getoption("--hypothesis-seed")).shuffle(items)
    for function in {getattr(item, "obj", None) for item in items}:
        asked = getattr(function, "_hypothesis_internal_use_settings", None)
        if function is not None and asked is not None:
            more = int(os.environ["EXPLORED_TIMES"]) * asked.max_examples
            function._hypothesis_internal_use_settings = settings(asked, max_examples=more)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    """Say at once what failed and where it is kept: the pass may be ended at any moment."""
    report = yield
    if call.excinfo is not None and report.failed and isinstance(item, pytest.Function):
        from replay import save

        kept = save(item, call.excinfo.value)
        where = kept or "nowhere: its arguments are not literals, so write a test of your own"
        terminal: Any = item.config.pluginmanager.getplugin("terminalreporter")
        terminal.write_line(f"\nexplored: FAILED {item.nodeid}, kept in {where}", flush=True)
    return report
