"""The benchmark of cost: what is to run on a GPU is rehearsed on one that is not there."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def cost(monkeypatch):
    """Make the modules of the benchmark importable."""
    for folder in (ROOT, ROOT / "cost"):
        monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:  # other benchmarks have a report as well
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT)):
            del sys.modules[name]


def test_the_measurement_of_a_gpu(cost, accelerators, monkeypatch, tmp_path):
    """Every line of it runs under the rules of a real one; the figures are those of the CPU."""
    import on_device
    import worker
    import yaml
    from report import device_markdown

    def merge(method, models, out, *options, limit):
        entries = [{"model": str(m), "parameters": {"weight": 0.5}} for m in models]
        config = {"merge_method": method, "models": entries, "dtype": "bfloat16"}
        file = out.with_suffix(".yml")
        file.write_text(yaml.safe_dump(config))
        found = worker.measured(str(file), str(out), list(options))
        return {"whole": found["wall"], "memory": 1.0, **found}

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**20)
    monkeypatch.setattr(on_device, "apart", lambda function, *arguments: function(*arguments))
    found = on_device.measure("cuda:0", True, merge)
    assert not found["left out"]
    assert set(found["layers"]) == {"small layer, near", "small layer, independent"}
    for layer in found["layers"].values():
        assert layer["distance"] == layer["distance on the CPU"] and layer["memory"] == 1.0
    pairs = [found["merges"][f"small, {kind}"] for kind in ("near", "twin", "other")]
    for pair in pairs:
        assert pair["agreement"] == {"difference": 0.0, "equal": 1.0, "distance": 0.0}
        assert pair["rotation_linear"]["device memory"] == 1.0
    assert "rotation_linear --low-cpu-memory --read-to-gpu" in pairs[0]
    machine = {"device": "one", "processor": "two", "threads": 1, "torch": "2"}
    text = device_markdown({"machine": machine, **found})
    assert "| small, near | rotation_linear --low-cpu-memory |" in text

    found = on_device.measure("cuda:0", True, merge, seconds=0.0)
    assert set(found["left out"].values()) == {"no time left"}
