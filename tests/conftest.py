"""The table at the end of the tests' output: of the cases that are counted, how many passed.

A test marked ``@pytest.mark.tally("options")`` counts under that heading, once for each of its
parameters; with ``case=`` several tests count as one, which passes when all of them do. A test
that finds its cases only while it runs counts them with the fixture ``tally``.
"""

from collections import defaultdict

import pytest
import torch

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


@pytest.fixture
def accelerators(monkeypatch):
    """Let torch and mergekit find two accelerators, in every worker of `MultiGPUExecutor`, too.

    Files are read and written by way of the CPU, which safetensors otherwise does by itself. The
    CPU does without its matrix units, which sum in another order.
    """
    from mergekit import multigpu_executor
    from mergekit.io.loader import TensorLoader
    from mergekit.io.tensor_writer import TensorWriter

    from accelerator import on
    from mergekit_rotation.symmetry import precision

    write, get = TensorWriter._write_shard_task, TensorLoader.get

    def write_from_cpu(writer, shard_data, *args, **kwargs):
        write(writer, {name: x.cpu() for name, x in shard_data.items()}, *args, **kwargs)

    def get_to_cpu(path, use_lazy_unpickle=False, device=None):
        return get(path, use_lazy_unpickle)

    monkeypatch.setattr(TensorWriter, "_write_shard_task", write_from_cpu)
    monkeypatch.setattr(TensorLoader, "get", staticmethod(get_to_cpu))
    monkeypatch.setattr(multigpu_executor, "get_torch_accelerator_type", lambda: "cuda")
    monkeypatch.setattr(multigpu_executor, "get_torch_accelerator_count", lambda: 2)
    monkeypatch.setattr(precision, "has_matrix_units", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "stream", on)
    with on():
        yield


def pytest_terminal_summary(terminalreporter, config):
    table = config.stash[OPEN]
    if table:
        terminalreporter.section("cases that passed")
    for what, cases in sorted(table.items()):
        passed = sum(not tests for tests in cases.values())
        terminalreporter.line(f"{what}: {passed} of {len(cases)}")
