"""Cheap tests first: a failure should show as early as it can."""

import signal

CHEAP = ("test_prose", "test_knobs", "test_trace", "test_report", "test_course", "test_figures", "test_claims")


def pytest_collection_modifyitems(items):
    """Pure Python, then whatever starts ranks, then the built site, then labs that run again. Order within a file stays."""

    def cost(item):
        if item.path.suffix == ".ipynb":
            return len(CHEAP) + 2
        if item.path.stem == "test_site":
            return len(CHEAP) + 1
        return CHEAP.index(item.path.stem) if item.path.stem in CHEAP else len(CHEAP)

    items.sort(key=cost)


def pytest_configure():
    """A shell that starts tests in the background has them ignore Ctrl-C; what they start would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
