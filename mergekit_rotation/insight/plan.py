"""What a merge would do, found out by planning it and running its schedule without values."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from typing import Any

import psutil
import yaml
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_rotation.graph import run
from mergekit_rotation.graph.errors import RotationError, in_one_sentence
from mergekit_rotation.graph.report import SCHEMA
from mergekit_rotation.graph.seams import validation
from mergekit_rotation.insight.headers import HeaderLoaders, headers_only, stored_bytes
from mergekit_rotation.insight.pace import Pace
from mergekit_rotation.insight.plan_rows import Row, foreseen_blocks, rows_of
from mergekit_rotation.insight.rehearsal import Rehearsal, Usage
from mergekit_rotation.insight.stopping import Reached, heard, stopped
from mergekit_rotation.insight.workspace import Cost, solver_cost


@dataclass
class Plan:
    """A merge that would be accepted.

    Attributes
    ----------
    method : str
    reference : str, optional
        None for a plain merge, and where several slices have one each.
    models : sequence of (name, class, bytes)
    rows : sequence of Row
    usage : Usage
    base : int
        Bytes of the process before any tensor is read.
    solving : Cost
        Memory of what is solved before anything is written.
    mapped_while_solving : int
        Bytes of files that are mapped meanwhile.
    adapters : mapping of str to int
        Adapters that have to be merged into their models first, and bytes of these.
    output : mapping
        Class, layers, vocabulary and dtypes of the result.
    seconds : (float, float)
        An estimate, if everything fits and if full assignments are solved.
    free : int, optional
        Bytes that are free where the output goes.
    warnings : sequence of str
    """

    method: str
    reference: str | None
    models: Sequence[tuple[str, str, int]]
    rows: Sequence[Row]
    usage: Usage
    base: int
    solving: Cost
    mapped_while_solving: int
    adapters: Mapping[str, int]
    output: Mapping[str, Any]
    seconds: tuple[float, float] = (0.0, 0.0)
    free: int | None = None
    warnings: Sequence[str] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Bytes that the process holds at its worst moment, if nothing has to be assigned."""
        solving = self.mapped_while_solving + self.solving.memory
        merging = self.usage.held + self.usage.mapped
        return self.base + max(solving, merging, *self.adapters.values(), 0)

    @property
    def most(self) -> int:
        """The same where full assignments are solved."""
        solving = self.mapped_while_solving + self.solving.most
        return max(self.peak, self.base + max(solving, self.usage.most))

    @property
    def droppable(self) -> int:
        """How much of the peak are mapped files."""
        merging = self.usage.held + self.usage.mapped
        if self.base + merging >= self.peak:
            return self.usage.mapped
        return min(self.mapped_while_solving, self.peak - self.base)

    def data(self) -> dict[str, Any]:
        """Return the plan as JSON has it."""
        return {
            "schema": SCHEMA,
            "version": version("mergekit-rotation"),
            "accepted": True,
            "error": None,
            "method": self.method,
            "reference": self.reference,
            "models": [
                {"model": name, "class": kind, "bytes": size} for name, kind, size in self.models
            ],
            "output": dict(self.output),
            "layers": [row.data() for row in self.rows],
            "memory": {
                "process": self.base,
                "peak": self.peak,
                "mapped_files": self.droppable,
                "peak_with_assignments": self.most,
                "device": self.usage.device,
            },
            "disk": {
                "output": self.usage.written,
                "files": self.usage.shards,
                "adapters": sum(self.adapters.values()),
                "free": self.free,
            },
            "seconds": {"least": self.seconds[0], "with_assignments": self.seconds[1]},
            "read": self.usage.read,
            "warnings": list(self.warnings),
        }


def refused(problem: Exception) -> dict[str, Any]:
    """Return what JSON has for a merge that would fail."""
    head = {"schema": SCHEMA, "version": version("mergekit-rotation")}
    return {**head, "accepted": False, "error": str(problem)}


def parsed(source: str) -> MergeConfiguration:
    """Read a configuration as a merge does.

    Raises
    ------
    RotationError
    """
    try:
        documents = list(yaml.safe_load_all(source))
    except yaml.YAMLError as problem:
        text = " ".join(str(problem).split())
        raise RotationError(f"the configuration is no YAML ({text}); correct it") from problem
    if len(documents) > 1:
        raise RotationError(
            f"the configuration holds {len(documents)} merges, and the later ones need what the "
            "earlier ones write; plan each of them in a file of its own, once its inputs are there"
        )
    try:
        return MergeConfiguration.model_validate(documents[0] if documents else None)
    except RotationError:
        raise
    except Exception as problem:
        raise RotationError(f"{validation(problem)}; correct the configuration") from problem


def plan(source: str, out: str | None, options: MergeOptions) -> Plan:
    """Plan a merge.

    Parameters
    ----------
    source : str
        The text of a configuration of mergekit's.
    out : str, optional
        The output folder, to be checked as well.
    options : MergeOptions
        Those of the merge.

    Raises
    ------
    RotationError
        Where the merge would fail, with its sentence.
    NotHere
        If a model would have to be downloaded.
    """
    with heard() as said, tempfile.TemporaryDirectory() as folder:
        config = parsed(source)
        target = out or os.path.join(folder, "out")
        with headers_only(options) as loaders:
            try:
                found = _planned(config, target, options, loaders, folder)
            except Exception as problem:
                raise in_one_sentence(problem, target) or problem from problem
            _check_template(config, found.usage)
            if out is not None:
                found.free = _check_disk(out, found)
            found.warnings = list(said.said)
    return found


def _planned(
    config: MergeConfiguration,
    out: str,
    options: MergeOptions,
    loaders: HeaderLoaders,
    folder: str,
) -> Plan:
    """Go the way of a merge up to its end, without values."""
    merge = import_module("mergekit.merge")
    changes = {"device": "meta", "read_to_gpu": True, "lazy_unpickle": False, "quiet": True}
    method = config.merge_method
    with run.rehearsed(), stopped() as planners:
        run.start(config)
        try:
            merge.run_merge(config, out, options.model_copy(update=changes))
        except Reached as reached:
            executor = reached.executor
    this, (planner,) = run.current(), planners
    costs = [solver_cost(solver) for solver in this.solvers.values()]
    mapped = _mapped(loaders) if costs else 0
    usage = Rehearsal(executor, options, loaders, folder).run()
    pace = Pace.measured()
    base = psutil.Process().memory_info().rss  # with all that routines keep once they were used
    solving = Cost(
        memory=max((cost.memory for cost in costs), default=0),
        most=max((cost.most for cost in costs), default=0),
    )
    alignment = getattr(planner, "_rotation", None)
    reference = None
    models = list(config.referenced_models())
    if alignment is not None:
        found = alignment._one_reference()
        reference = None if found is None else str(found)
        models = list(dict.fromkeys([*models, *alignment.context._checkpoints]))
    rows = rows_of(foreseen_blocks(executor, this), this.unsolved)
    result = Plan(
        method=method,
        reference=reference,
        models=[_model(model, loaders, options) for model in models],
        rows=rows,
        usage=usage,
        base=base,
        solving=solving,
        mapped_while_solving=mapped,
        adapters={str(model): size for model, size in loaders.adapters.items()},
        output=_output(planner, usage),
    )
    reads = usage.read + (len(costs) and 2 * mapped)
    result.seconds = pace.seconds([*usage.costs, *costs], reads, usage.written, usage.merged)
    return result


def _mapped(loaders: HeaderLoaders) -> int:
    """Return the bytes of the files that stay mapped while whole models are solved."""
    total = 0
    for loader in loaders.values():
        index = loader.index
        sizes = [
            os.path.getsize(os.path.join(index.base_path, shard))
            for shard in set(index.tensor_paths.values())
        ]
        total += max(sizes, default=0)
    return total


def _model(model: Any, loaders: HeaderLoaders, options: MergeOptions) -> tuple[str, str, int]:
    config = model.config(trust_remote_code=options.trust_remote_code)
    kind = next(iter(getattr(config, "architectures", None) or ["?"]))
    return str(model), str(kind), stored_bytes(loaders[model].index)


def _output(planner: Any, usage: Usage) -> dict[str, Any]:
    """Describe the model that would be written."""
    config = planner.out_model_config
    dtypes = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in usage.tensors.values())
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if usage.tokenizer is not None:
        vocabulary = len(usage.tokenizer.get_vocab())
        multiple = planner.config.tokenizer and planner.config.tokenizer.pad_to_multiple_of
        vocabulary += -vocabulary % multiple if multiple else 0
    return {
        "class": next(iter(getattr(config, "architectures", None) or ["?"])),
        "dtype": list(dtypes),
        "vocabulary": vocabulary,
        "tensors": len(usage.tensors),
        "weights": sum(x.numel() for x in usage.tensors.values()),
    }


# -- what fails at the end of a merge -------------------------------------------------------------


def _check_template(config: MergeConfiguration, usage: Usage) -> None:
    """Refuse a chat template that mergekit would refuse once all weights are written."""
    if usage.tokenizer is None:
        return
    try:
        import_module("mergekit.merge")._set_chat_template(usage.tokenizer, config)
    except Exception as problem:
        raise in_one_sentence(problem, "") or problem from problem


def _check_disk(out: str, found: Plan) -> int:
    """Return how much space is free where the output goes.

    Raises
    ------
    RotationError
        If that is not enough.
    """
    folder = os.path.abspath(out)
    old = sum(os.path.getsize(path) for path in run.old_model(folder))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free + old
    if free < found.usage.written:
        raise RotationError(
            f"{out}: the merged model takes {found.usage.written / 1e9:.2f} GB, but only "
            f"{free / 1e9:.2f} GB are free; free space or choose another output folder"
        )
    return free
