"""The table at the end of the tests' output: of the cases that are counted, how many passed.

A test marked ``@pytest.mark.tally("options")`` counts under that heading, once for each of its
parameters; with ``case=`` several tests count as one, which passes when all of them do. A test
that finds its cases only while it runs counts them with the fixture ``tally``.
"""

from collections import defaultdict

import pytest

#: what is counted -> case -> tests that have not passed yet
OPEN = pytest.StashKey[defaultdict[str, defaultdict[object, set[str]]]]()


def pytest_configure(config):
    config.addinivalue_line("markers", "tally(what, case=None): count in the table at the end")
    config.stash[OPEN] = defaultdict(lambda: defaultdict(set))


def _counted(item):
    """Yield the open tests of every case that a test belongs to."""
    for mark in item.iter_markers("tally"):
        (what,) = mark.args
        yield item.config.stash[OPEN][what][mark.kwargs.get("case", item.nodeid)]


def pytest_collection_finish(session):
    for item in session.items:
        for tests in _counted(item):
            tests.add(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and report.passed:
        for tests in _counted(item):
            tests.discard(item.nodeid)
    return report


@pytest.fixture
def tally(request):
    """Count cases: ``tally(what, outcomes)``, one truth value for each case."""

    def count(what, outcomes):
        for number, passed in enumerate(outcomes):
            case = request.node.nodeid, number
            request.config.stash[OPEN][what][case] = set() if passed else {request.node.nodeid}

    return count


@pytest.fixture
def at_a_pace(monkeypatch):
    """Let plans take rates that are not measured, which takes a moment each time."""
    from mergekit_rotation.insight.pace import Pace

    rates = Pace(1e9, 1e9, 1e-9, 1e-9, 1e9, 1.0)
    monkeypatch.setattr(Pace, "measured", classmethod(lambda cls: rates))


def pytest_terminal_summary(terminalreporter, config):
    table = config.stash[OPEN]
    if table:
        terminalreporter.section("cases that passed")
    for what, cases in sorted(table.items()):
        passed = sum(not tests for tests in cases.values())
        terminalreporter.line(f"{what}: {passed} of {len(cases)}")
