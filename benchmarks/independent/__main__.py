"""Train small models independently, align and merge them, and write down what comes of it.

    python benchmarks/independent [--quick]

Trains what is not cached (about 50 minutes on two cores without a GPU), evaluates, and writes
results.md and results.png beside this file. With --quick there is one pair per architecture and
the results go to the cache, so that those of a full run stay.
"""

import argparse
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

import evaluate
import heal
import report
import train

WORKERS = 2


def measure(count: int | None) -> report.Results:
    """Everything; `count` limits pairs and targets."""
    began = time.monotonic()
    shutil.rmtree(train.CACHE / "merged", ignore_errors=True)
    with ProcessPoolExecutor(WORKERS, get_context("spawn"), evaluate.prepare) as pool:
        curves = {}
        for name in train.ARCHITECTURES:
            curves[name] = list(pool.map(evaluate.curves, repeat(name), evaluate.PAIRS[:count]))
            print(f"{name}: {len(curves[name])} pairs measured", flush=True)
        forks = pool.submit(evaluate.forks)
        healed = pool.map(heal.heal, heal.PAIRS[:count])
        transport = pool.map(evaluate.transport, evaluate.TARGETS[:count])
        return report.Results(
            curves,
            forks.result(),
            list(transport),
            list(healed),
            time.monotonic() - began,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one pair per architecture")
    quick: bool = parser.parse_args().quick
    train.train_all(WORKERS)
    results = measure(1 if quick else None)
    folder = train.CACHE if quick else Path(__file__).resolve().parent
    report.write(results, folder)
    print(report.text(results))


if __name__ == "__main__":
    main()
