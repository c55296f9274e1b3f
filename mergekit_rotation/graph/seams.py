"""Every change made to mergekit, one per seam, and the check that the seam is where we think.

Facts about mergekit 0.1.5 that each seam rests on are pinned by a test of its own in
``tests/graph/test_seams.py``. A mergekit that differs gets one message and no ``rotation_*``
method, never a wrong merge: the registered twins refuse to merge by themselves.
"""

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from mergekit_rotation.graph.errors import RotationError, in_one_sentence, one_line
from mergekit_rotation.graph.patching import (
    SeamError,
    class_of,
    differs,
    expect,
    fault_of_version,
    is_stock,
    warn_of_version,
    wrap,
)

LOG = logging.getLogger(__name__)


def complete(module: str) -> None:
    """Complete one mergekit module that has just been imported.

    Parameters
    ----------
    module : str
        One of `mergekit_rotation.startup.SEAMS`.

    Raises
    ------
    SeamError
        If mergekit differs from the version that the seams were written for.
    """
    steps: dict[str, Callable[[], None]] = {
        "mergekit.merge_methods": register_methods,
        "mergekit.config": read_config,
        "mergekit.plan": plan_alignment,
        "mergekit.merge": guard_merge,
        "mergekit.evo.genome": name_genomes,
    }
    try:
        steps[module]()
    except Exception as problem:
        withdraw_methods()
        if isinstance(problem, SeamError):
            raise
        raise differs(module, str(problem)) from problem


def _methods() -> Any:
    """Return our module of methods, which needs mergekit's completed: import that one first."""
    import_module("mergekit.merge_methods")
    return import_module("mergekit_rotation.graph.methods")


# -- mergekit.merge_methods: the registry is public --------------------------------------------


def register_methods() -> None:
    """Add the twins to mergekit's registry of methods."""
    registry = import_module("mergekit.merge_methods.registry")
    expect(registry, "register", ("method",))
    expect(registry, "registered_methods", ())
    _methods().register_twins()


def withdraw_methods() -> None:
    """Take the twins back: without every seam they must not be offered."""
    methods = sys.modules.get("mergekit_rotation.graph.methods")
    if methods is not None:
        methods.withdraw_twins()


# -- mergekit.config: what a configuration may say ----------------------------------------------


def read_config() -> None:
    """Check ``rotation_*`` configurations before mergekit parses them; order their models."""
    MergeConfiguration = class_of("mergekit.config", "MergeConfiguration")
    validate = expect(MergeConfiguration, "model_validate", ("obj",))
    if not inspect.ismethod(validate):
        raise differs("MergeConfiguration.model_validate", "it is no class method")
    if is_stock(validate.__func__):

        def model_validate(cls: type, obj: Any, *args: Any, **kwargs: Any) -> Any:
            if not _names_rotation(obj):
                return validate.__func__(cls, obj, *args, **kwargs)
            checked = _checked_mapping(obj)
            try:
                return validate.__func__(cls, checked, *args, **kwargs)
            except (RuntimeError, TypeError, ValueError) as problem:
                text = f"{validation(problem)}; correct the configuration"
                raise RotationError(text) from problem

        model_validate._mergekit_rotation = True  # type: ignore[attr-defined]
        MergeConfiguration.model_validate = classmethod(model_validate)  # type: ignore[assignment]
    wrap(MergeConfiguration, "referenced_models", ("self",), _ordered_models)


def _methods_named(obj: Mapping[str, Any]) -> list[Any]:
    return [obj[key] for key in ("merge_method", "method") if obj.get(key) is not None]


def _names_rotation(obj: Any) -> bool:
    """Tell whether something is a configuration that asks for one of our methods."""
    methods = _methods()
    return isinstance(obj, Mapping) and any(map(methods.is_rotation, _methods_named(obj)))


def _checked_mapping(obj: Mapping[str, Any]) -> Mapping[str, Any]:
    """Accept ``method:`` for ``merge_method:``; check the name and our parameters.

    mergekit-multi puts models for all strings that name an earlier merge, ours among them.
    """
    from mergekit_rotation.graph import parameters, spelling

    methods = _methods()
    given = _methods_named(obj)
    if len(given) > 1:
        raise RotationError("method: and merge_method: say the same; write one of them")
    obj = {("merge_method" if key == "method" else key): value for key, value in obj.items()}
    methods.check_name(given[0])
    obj = parameters.with_paths(obj)
    parameters.check_mapping(obj)
    spec = methods.aligned_method(given[0]).spec
    dropped, _ = spelling.check_keys(obj, spec, parameters.KNOWN)
    spelling.warn_of_keys(spec, dropped)
    return obj


def validation(problem: Exception) -> str:
    """Say in one line where a configuration is not what mergekit expects."""
    from pydantic import ValidationError

    if not isinstance(problem, ValidationError):
        return one_line(problem)
    first, *others = problem.errors()
    place = ".".join(str(part) for part in first["loc"]) or "the configuration"
    more = f" (and {len(others)} more)" if others else ""
    return f"{place}: {' '.join(first['msg'].split())}{more}"


def _ordered_models(original: Callable[..., Any], config: Any) -> list[Any]:
    """Stock returns an unordered set; ours puts the reference first, then YAML order.

    mergekit takes config and tokenizer of a merge without ``base_model`` from the first one.
    """
    models = original(config)
    from mergekit_rotation.graph import parameters

    methods = _methods()
    if not methods.is_rotation(config.merge_method):
        return list(models)
    outputs = [config, *(config.modules or {}).values()]
    slices = [s for output in outputs for s in output.slices or []]
    listed = [source.model for s in slices for source in s.sources]
    listed += [entry.model for output in outputs for entry in output.models or []]
    first = [parameters.explicit_reference([config.parameters]), config.base_model]
    return [m for m in dict.fromkeys([*first, *listed]) if m in models]


# -- mergekit.plan: the inputs of planned tasks ---------------------------------------------------


#: methods of the planner that are called by ours, not replaced
_CALLED = {
    "plan_tensor": ("weight", "weights_in", "models", "cfg_reader"),
    "_model_arch": ("model",),
    "_out_module_arch": ("module",),
}


def plan_alignment() -> None:
    """Align the inputs of every planned layer; `mergekit.merge` binds the class, so patch it."""
    MergePlanner = class_of("mergekit.plan", "MergePlanner")
    layer = ("self", "sources", "layer_offset", "t", "cfg_reader", "module_name")
    expect(MergePlanner, "plan_layer", layer)
    for name, parameters in _CALLED.items():
        expect(MergePlanner, name, ("self", *parameters))
    wrap(MergePlanner, "plan_layer", layer, _plan_layer)
    wrap(MergePlanner, "_plan", ("self",), _plan)
    wrap(MergePlanner, "plan_to_disk", ("self", "out_path"), _plan_to_disk)
    wrap(MergePlanner, "plan_in_memory", ("self",), _plan_in_memory)
    writer = class_of("mergekit.io.tasks", "TensorWriterTask")
    wrap(writer, "execute", ("self",), _open_writer)
    build = import_module("mergekit.tokenizer.build")
    wrap(build, "build_union_tokenizer", ("base_tok", "tokenizers"), _build_union)


def _plan(original: Callable[..., Any], planner: Any) -> None:
    method = _methods().aligned_method(planner.config.merge_method)
    if method is None:
        original(planner)
        return
    from mergekit_rotation.graph import parameters, spelling
    from mergekit_rotation.graph.planning import Alignment
    from mergekit_rotation.graph.vocabulary import by_row

    warn_of_version()
    # A configuration that was not read but built by a program has not been looked at yet.
    given = planner.config.model_dump()
    parameters.check_mapping(given)
    _, unused = spelling.check_keys(given, method.spec, parameters.KNOWN)
    spelling.warn_of_keys(method.spec, unused)
    planner._tokenizer_task = by_row(planner._tokenizer_task)
    planner._rotation = alignment = Alignment(planner)
    alignment.check_inputs()
    original(planner)
    alignment.finish()


def _plan_layer(
    original: Callable[..., Any],
    planner: Any,
    sources: Any,
    layer_offset: int,
    t: float,
    cfg_reader: Any,
    module_name: str,
) -> None:
    alignment = getattr(planner, "_rotation", None)
    start, index = len(planner._tensors), planner._current_module_layers
    original(planner, sources, layer_offset, t, cfg_reader, module_name)
    if alignment is not None:
        planner._tensors[start:] = alignment.align_layer(
            planner._tensors[start:],
            sources,
            layer_offset,
            index,
            cfg_reader.with_t(t),
            module_name,
        )


def _plan_to_disk(original: Callable[..., Any], planner: Any, out_path: str) -> Any:
    from mergekit_rotation.graph import run

    methods = _methods()
    tasks = original(planner, out_path)
    if methods.aligned_method(planner.config.merge_method) is not None:
        run.current().begin_output(out_path, planner._rotation.context.paths())
        tasks += _reporting(planner.config, out_path, tasks)
    return tasks


def _reporting(config: Any, out_path: str, tasks: Any) -> list[Any]:
    """Return the task that writes ``alignment.json`` after mergekit has completed the weights."""
    from mergekit_rotation.graph import alignment

    if not alignment.is_asked_for(config):
        return []
    finalize = class_of("mergekit.io.tasks", "FinalizeModel")
    last = next(task for task in tasks if isinstance(task, finalize))
    return [alignment.WriteAlignment(out_path=out_path, finalize=last)]


def _plan_in_memory(original: Callable[..., Any], planner: Any) -> Any:
    """Plan a merge whose tensors are returned, for which mergekit 0.1.5 raises a TypeError."""
    from mergekit_rotation.graph import run

    methods = _methods()
    if methods.aligned_method(planner.config.merge_method) is None:
        return original(planner)
    from mergekit_rotation.graph.tasks import ReturnMerged

    run.start(ends=False)
    planner._plan()
    return [
        ReturnMerged(
            weight_info=weight,
            tensor_task=task,
            dtype=weight.force_dtype or planner.config.out_dtype,
        )
        for weight, task in planner._tensors
    ]


def _build_union(original: Callable[..., Any], base: Any, tokenizers: Any, **kwargs: Any) -> Any:
    from mergekit_rotation.graph.vocabulary import listed

    return original(base, listed(tokenizers), **kwargs)


def _open_writer(original: Callable[..., Any], task: Any, **kwargs: Any) -> Any:
    from mergekit_rotation.graph import run

    writer = original(task, **kwargs)
    run.current().writer = writer
    return writer


# -- mergekit.merge: the definition of the architecture, the end of a merge -----------------------


def guard_merge() -> None:
    """Clean up after a failed merge and say what was done; scripts bind the wrapped function."""
    merge = sys.modules["mergekit.merge"]
    expect(merge, "_model_out_config", ("config", "arch_info", "trust_remote_code"))
    wrap(merge, "run_merge", ("merge_config", "out_path", "options"), _run_merge)
    wrap(merge, "get_architecture_info", ("config", "options"), _architecture)
    wrap(merge, "generate_card", ("config", "config_yaml", "name"), _card)
    expect(class_of("mergekit.merge", "MultiGPUExecutor"), "run", ("self", "quiet"))


def _architecture(original: Callable[..., Any], config: Any, options: Any) -> Any:
    """Use a definition of `graph.definitions` where mergekit has none that fits the models."""
    from mergekit_rotation.graph import definitions

    methods = _methods()
    if not methods.is_rotation(config.merge_method):
        return original(config, options)
    return definitions.definition(config, options) or original(config, options)


def _card(original: Callable[..., Any], config: Any, *args: Any, **kw: Any) -> Any:
    """Add what was aligned to the model card."""
    text = original(config, *args, **kw)
    if not _methods().is_rotation(config.merge_method):
        return text
    from mergekit_rotation.graph import alignment, run

    return text + alignment.card(run.current()) if alignment.is_asked_for(config) else text


def _run_merge(
    original: Callable[..., Any],
    merge_config: Any,
    out_path: str,
    options: Any,
    *args: Any,
    **kw: Any,
) -> Any:
    from mergekit_rotation.graph import run
    from mergekit_rotation.graph.gathering import gathered

    methods = _methods()
    if not methods.is_rotation(merge_config.merge_method):
        return original(merge_config, out_path, options, *args, **kw)
    methods.check_name(merge_config.merge_method)
    this = run.start(merge_config)
    try:
        with gathered():
            result = original(merge_config, out_path, options, *args, **kw)
    except BaseException as problem:
        this.discard_output()
        sentence = in_one_sentence(problem, out_path) or fault_of_version(problem)
        if sentence is None:
            raise
        LOG.debug("what ended the merge", exc_info=problem)
        raise sentence from problem
    this.warn_of_left()
    if not options.quiet:
        for line in this.summary():
            print(f"aligned {line}", file=sys.stderr)
    return result


# -- mergekit.evo.genome: configurations that evolve ----------------------------------------------


def name_genomes() -> None:
    """Let a genome name a ``rotation_*`` method; it is read as that of the plain method."""
    genomes = sys.modules["mergekit.evo.genome"]
    known = getattr(genomes, "METHOD_PARAM_MAPS", None)
    if not isinstance(known, dict):
        raise differs("mergekit.evo.genome.METHOD_PARAM_MAPS", "there is no such mapping")
    methods = _methods()
    known |= {methods.PREFIX + n: known[n] for n in known if not methods.is_rotation(n)}
    ModelGenome = class_of("mergekit.evo.genome", "ModelGenome")
    wrap(ModelGenome, "__init__", ("self", "definition"), _genome)
    wrap(ModelGenome, "genotype_merge_config", ("self", "genotype"), _evolved_config)


def _plain_definition(definition: Any) -> Any:
    """Return the definition of a genome with the plain method, which mergekit then checks."""
    methods = _methods()
    method = methods.aligned_method(definition.merge_method)
    if method is None:
        return definition
    return type(definition)(**{**dict(definition), "merge_method": method.plain.spec.name})


def _genome(
    original: Callable[..., Any], genome: Any, definition: Any, *args: Any, **kw: Any
) -> None:
    _plain_definition(definition)
    original(genome, definition, *args, **kw)


def _evolved_config(original: Callable[..., Any], genome: Any, genotype: Any) -> Any:
    plain = copy.copy(genome)
    plain.definition = _plain_definition(genome.definition)
    config = original(plain, genotype)
    if plain.definition is genome.definition:
        return config
    named = {**config.model_dump(), "merge_method": genome.definition.merge_method}
    return type(config).model_validate(named)
