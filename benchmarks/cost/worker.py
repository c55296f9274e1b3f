"""One merge in a process of its own, as mergekit-yaml does it, with the time of its stages.

    python benchmarks/cost/worker.py [--stages] CONFIG OUT

Prints a line of JSON: wall and processor seconds from the start of the merge, after all imports,
and with --stages those of each stage, what is inside of another stage counted once.
"""

import functools
import json
import sys
import time
from collections import Counter


class Stages:
    """Wall seconds by stage; a stage inside of another interrupts it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.open: list[float] = []

    def watch(self, owner: object, name: str, stage: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: object, **kwargs: object) -> object:
            self.open.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self.seconds[stage] += spent - self.open.pop()
                if self.open:
                    self.open[-1] += spent

        setattr(owner, name, timed)


def watched() -> Stages:
    from mergekit.io.tasks import FinalizeModel, LoadTensor, SaveTensor
    from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
    from mergekit.plan import MergePlanner

    from mergekit_rotation.graph import block, tasks
    from mergekit_rotation.symmetry import factorisation, neurons
    from mergekit_rotation.symmetry.head_gram import HeadAxis
    from mergekit_rotation.symmetry.vectors import Vectors

    stages = Stages()
    for owner, name, stage in (
        (MergePlanner, "plan_to_disk", "plan"),
        (LoadTensor, "execute", "read"),
        (tasks.CheckedLoad, "execute", "check"),
        (tasks.AlignBlock, "execute", "compare"),
        (tasks.AlignBlock, "_move", "act"),
        (block, "solve_attention", "heads"),
        (HeadAxis, "bounds", "heads: bounds"),
        (HeadAxis, "gram", "heads: Gram"),
        (HeadAxis, "pairs", "heads: Gram"),
        (factorisation.torch.linalg, "svd", "heads: SVD"),
        (block, "solve_neurons", "neurons"),
        (neurons, "nearest_matching", "neurons: few columns"),
        (Vectors, "gram", "neurons: Gram"),
        (neurons, "linear_assignment", "neurons: assignment"),
        (ExecuteMergeMethodTask, "execute", "merge"),
        (SaveTensor, "execute", "write"),
        (FinalizeModel, "execute", "write"),
    ):
        stages.watch(owner, name, stage)
    return stages


def main(config: str, out: str, options: list[str]) -> None:
    from mergekit.scripts import run_yaml

    stages = watched() if "--stages" in options else None
    merge = run_yaml.run_merge
    result = {}

    def timed(*args: object, **kwargs: object) -> None:
        start, used = time.perf_counter(), time.process_time()
        merge(*args, **kwargs)
        result.update(wall=time.perf_counter() - start, cpu=time.process_time() - used)

    run_yaml.run_merge = timed
    plain = ["--no-write-model-card", "--no-copy-tokenizer", "--quiet"]
    run_yaml.main([config, out, *plain], standalone_mode=False)
    if stages is not None:
        rest = result["wall"] - sum(stages.seconds.values())
        result["stages"] = {**stages.seconds, "everything else": rest}
    print(json.dumps(result))


if __name__ == "__main__":
    *flags, config, out = sys.argv[1:]
    main(config, out, flags)
