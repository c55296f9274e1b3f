"""One merge in a process of its own, as mergekit-yaml does it, with the time of its stages.

    python benchmarks/cost/worker.py [--stages] [options of mergekit-yaml] CONFIG OUT

Prints a line of JSON: wall and processor seconds from the start of the merge, after all imports,
and with --stages those of each stage, what is inside of another stage counted once. On an
accelerator, which is started before, also the peak of its memory in MiB.
"""

import functools
import json
import sys
import time
from collections import Counter

import torch
from devices import device_of, forget_peak, peak, wait_for


class Stages:
    """Wall seconds by stage; a stage inside of another interrupts it."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.seconds: Counter[str] = Counter()
        self.open: list[float] = []

    def watch(self, owner: object, name: str, stage: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: object, **kwargs: object) -> object:
            self.open.append(0.0)
            wait_for(self.device)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                wait_for(self.device)
                spent = time.perf_counter() - start
                self.seconds[stage] += spent - self.open.pop()
                if self.open:
                    self.open[-1] += spent

        setattr(owner, name, timed)


def watched(device: str) -> Stages:
    from mergekit.io.tasks import FinalizeModel, LoadTensor, SaveTensor
    from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
    from mergekit.plan import MergePlanner

    from mergekit_rotation.graph import block, tasks
    from mergekit_rotation.symmetry import factorisation, neurons
    from mergekit_rotation.symmetry.head_gram import HeadAxis
    from mergekit_rotation.symmetry.vectors import Vectors

    stages = Stages(device)
    for owner, name, stage in (
        (MergePlanner, "plan_to_disk", "plan"),
        (LoadTensor, "execute", "read"),
        (tasks.CheckedLoad, "execute", "check"),
        (tasks.AlignBlock, "execute", "blocks"),
        (tasks.AlignBlock, "_compare", "compare"),
        (tasks.AlignBlock, "_move", "act"),
        (block, "solve_attention", "heads"),
        (HeadAxis, "bounds", "heads: bounds"),
        (HeadAxis, "gram", "heads: Gram"),
        (HeadAxis, "pairs", "heads: Gram"),
        (factorisation.torch.linalg, "svd", "heads: SVD"),
        (block, "solve_neurons", "neurons"),
        (neurons, "nearest_matching", "neurons: few columns"),
        (Vectors, "gram", "neurons: Gram"),
        (neurons, "certified_assignment", "neurons: assignment"),
        (ExecuteMergeMethodTask, "execute", "merge"),
        (SaveTensor, "execute", "write"),
        (FinalizeModel, "execute", "write"),
    ):
        stages.watch(owner, name, stage)
    return stages


def measured(config: str, out: str, options: list[str]) -> dict:
    """Merge, and return what it took."""
    from mergekit.scripts import run_yaml

    device = device_of(options)
    torch.zeros(1, device=device)
    forget_peak(device)
    stages = watched(device) if "--stages" in options else None
    merge = run_yaml.run_merge
    result: dict = {}

    def timed(*args: object, **kwargs: object) -> None:
        start, used = time.perf_counter(), time.process_time()
        merge(*args, **kwargs)
        wait_for(device)
        result.update(wall=time.perf_counter() - start, cpu=time.process_time() - used)

    run_yaml.run_merge = timed
    try:
        theirs = [option for option in options if option != "--stages"]
        plain = ["--no-write-model-card", "--no-copy-tokenizer", "--quiet", *theirs]
        run_yaml.main([config, out, *plain], standalone_mode=False)
    finally:
        run_yaml.run_merge = merge
    if stages is not None:
        rest = result["wall"] - sum(stages.seconds.values())
        result["stages"] = {**stages.seconds, "everything else": rest}
    if device != "cpu":
        result["device memory"] = peak(device)
    return result


if __name__ == "__main__":
    *given, config, out = sys.argv[1:]
    print(json.dumps(measured(config, out, given)))
