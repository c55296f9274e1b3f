"""Facts about mergekit that this package rests on: one test per seam, named after the reason.

Run this module first under another mergekit: what fails names what has to be looked at.
"""

import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import click
import mergekit.config
import mergekit.merge
import mergekit.plan
import pytest
import torch
from mergekit.architecture import (
    ModelArchitecture,
    ModuleArchitecture,
    ModuleDefinition,
    WeightInfo,
    arch_info_for_config,
    get_architecture_info,
)
from mergekit.architecture.conversion import can_convert_checkpoint_keys, convert_checkpoint_tensors
from mergekit.architecture.json_definitions import JsonModuleArchitecture
from mergekit.common import ImmutableMap, ModelReference, dtype_from_name, get_config_value
from mergekit.config import ConditionalParameter, ConfigReader, MergeConfiguration
from mergekit.evo.genome import METHOD_PARAM_MAPS, ModelGenome
from mergekit.graph import Executor, Task
from mergekit.io.lazy_tensor_loader import ShardedTensorIndex
from mergekit.io.tasks import FinalizeModel, LoaderCache, LoadTensor, ReturnTensor
from mergekit.io.tensor_writer import TensorWriter
from mergekit.merge_methods import registry
from mergekit.merge_methods.base import ParameterScope, ParameterSpec, TensorGroup
from mergekit.merge_methods.buffers import copy_non_floating_buffer
from mergekit.merge_methods.passthrough import passthrough_merge_method
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions
from mergekit.parameter_resolver import resolve_parameter
from mergekit.plan import MergePlanner
from mergekit.tokenizer import BuildTokenizer, PermutedVocabulary
from mergekit.tokenizer.build import TokenizerInfo
from mergekit.tokenizer.config import TokenizerConfig
from mergekit.tokenizer.truncate import TruncatedVocabulary
from pydantic import BaseModel, StrictBool, ValidationError
from transformers import LlamaConfig

import tiny
from mergekit_rotation.graph import patching, run, seams, spelling
from mergekit_rotation.graph.tasks import (
    CheckedLoad,
    GatherAligned,
    GatherChecked,
    Input,
    ReturnMerged,
    checked,
)
from merging import Twins, config, merge, merged, planner, weights

A = ModelReference.parse("./x/a")
EMBEDDINGS = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def llamas(tmp_path_factory) -> Twins:
    """A tiny Llama of two layers, and a twin."""
    return Twins("llama", tmp_path_factory.mktemp("llamas"))


def test_the_installed_mergekit_is_the_tested_one():
    assert patching.version("mergekit") == patching.TESTED


def test_registry_refuses_duplicates_so_registering_is_guarded():
    with pytest.raises(ValueError, match="already registered"):
        registry.register(registry.get("rotation_linear"))


def test_configurations_are_read_through_model_validate():
    for module in (mergekit.config, mergekit.merge):
        assert module.MergeConfiguration is MergeConfiguration
    from mergekit.scripts import multimerge, run_yaml

    for module in (run_yaml, multimerge):
        assert "MergeConfiguration.model_validate(" in inspect.getsource(module)
    assert MergeConfiguration.model_validate.__func__._mergekit_rotation


def test_merge_binds_the_planner_class_at_import_so_methods_are_patched_on_it():
    assert mergekit.merge.MergePlanner is MergePlanner
    for name in ("plan_layer", "_plan", "plan_to_disk", "plan_in_memory"):
        assert getattr(MergePlanner, name)._mergekit_rotation


def test_the_writer_of_a_merge_is_known(tmp_path):
    from mergekit.io.tasks import TensorWriterTask

    from mergekit_rotation.graph import run

    task = TensorWriterTask(out_path=str(tmp_path), max_shard_size=1, use_async=True)
    writer = task.execute()
    assert run.current().writer is writer
    assert hasattr(writer, "_executor")
    writer._executor.shutdown()


def test_both_plans_go_through_the_private_plan():
    for method in (MergePlanner.plan_to_disk, MergePlanner.plan_in_memory):
        assert "self._plan()" in inspect.getsource(inspect.unwrap(method))


def test_a_union_takes_new_tokens_as_a_hash_table_lists_them():
    build = import_module("mergekit.tokenizer.build")
    assert build.build_union_tokenizer._mergekit_rotation
    source = inspect.getsource(build.build_union_tokenizer.__wrapped__)
    assert "vocab = tokenizer.get_vocab()\n        for tok, idx in vocab.items():" in source
    assert "tokenizer_out = build_union_tokenizer(" in inspect.getsource(build.build_tokenizer)
    assert "return build_tokenizer(" in inspect.getsource(BuildTokenizer.execute)
    assert set(BuildTokenizer.model_fields) == {
        "base_model",
        "referenced_models",
        "tokenizer_source",
        "add_tokens",
        "trust_remote_code",
    }


def test_a_layer_appends_to_tensors_and_counts_up():
    source = inspect.getsource(inspect.unwrap(MergePlanner.plan_layer))
    assert "self._current_module_layers += 1" in source
    assert "self._tensors.append((weight, tensor_task))" in inspect.getsource(
        MergePlanner.plan_tensor
    )


def test_scripts_bind_run_merge_after_it_was_wrapped():
    from mergekit.scripts import run_yaml

    assert run_yaml.run_merge is mergekit.merge.run_merge
    assert run_yaml.run_merge._mergekit_rotation


def test_the_definition_of_a_merge_is_looked_up_in_the_module_that_merges():
    assert mergekit.merge.get_architecture_info._mergekit_rotation
    source = inspect.getsource(mergekit.merge.run_merge.__wrapped__)
    assert "arch_info = get_architecture_info(merge_config, options)" in source


def test_optional_weights_with_aliases_stop_the_planner():
    source = inspect.getsource(MergePlanner.plan_tensor)
    assert "[w_in.name] + (w_in.aliases or [])" in source
    assert WeightInfo(name="x", aliases=["y"]).aliases == ("y",)


def test_what_mergekit_converts_is_known_by_name_alone():
    stored = "model.layers.0.mlp.experts.0.w1.weight"
    stored = {stored.replace("0.w1", f"{e}.{w}"): None for e in (0, 1) for w in ("w1", "w2", "w3")}
    stored = {name.replace("mlp", "block_sparse_moe"): None for name in stored}
    packed = "model.layers.0.mlp.experts.gate_up_proj"
    assert can_convert_checkpoint_keys("mixtral", set(stored), packed)
    assert not can_convert_checkpoint_keys("mixtral", set(stored), "model.layers.1.mlp.x")
    made = convert_checkpoint_tensors("mixtral", {n: torch.ones(2, 3) for n in stored}, packed)
    assert made.shape == (2, 4, 3)


def test_genomes_compare_the_names_of_plain_methods():
    source = inspect.getsource(ModelGenome.genotype_merge_config.__wrapped__)
    assert 'self.definition.merge_method == "slerp"' in source


def test_stock_models_are_an_unordered_set():
    assert "models = set()" in inspect.getsource(
        inspect.unwrap(MergeConfiguration.referenced_models)
    )


def test_loads_have_the_fields_that_are_copied():
    assert set(LoadTensor.model_fields) == {
        "model",
        "tensor",
        "dtype",
        "device",
        "optional",
        "aliases",
        "tied_names",
        "per_gpu",
    }
    load = LoadTensor(model=A, tensor="x", aliases=("y",), optional=True, dtype="float16")
    twin = checked(load, leg=True)
    assert isinstance(twin, CheckedLoad)
    assert {name: getattr(twin, name) for name in LoadTensor.model_fields} == {
        name: getattr(load, name) for name in LoadTensor.model_fields
    }


def gathers():
    info = ImmutableMap({A: WeightInfo(name="x")})
    entry = Input(model=A, task=LoadTensor(model=A, tensor="x"))
    return [
        GatherChecked(weight_info=info),
        GatherAligned(weight_info=info, inputs=(entry,), label="x"),
    ]


@pytest.mark.parametrize("gather", gathers(), ids=lambda g: type(g).__name__)
def test_our_gatherings_are_accepted_where_stock_ones_are(gather):
    weight = WeightInfo(name="x", vocabulary_axis=0)
    tokenizer = BuildTokenizer(
        base_model=None, referenced_models=(A,), tokenizer_source="union", add_tokens=()
    )
    wrapped = [
        gather,
        TruncatedVocabulary(gather_tensors=gather, weight_info=weight),
        PermutedVocabulary(
            gather_tensors=gather,
            tokenizer_task=tokenizer,
            tokens=None,
            pad_to_multiple_of=None,
            base_model=None,
            vocabulary_axis=0,
        ),
    ]
    for task in wrapped:
        outer = ExecuteMergeMethodTask(
            method_name="linear",
            gather_tensors=task,
            model_order=(A,),
            base_model=None,
            output_weight=weight,
            parameters=ImmutableMap({}),
            input_parameters=ImmutableMap({A: ImmutableMap({"weight": 1.0})}),
        )
        assert outer.gather_tensors is task


def test_immutable_maps_compare_by_identity_so_our_tasks_hold_tuples():
    assert ImmutableMap({1: 2}) != ImmutableMap({1: 2})
    assert Input(model=A, task=LoadTensor(model=A, tensor="x")) == Input(
        model=A, task=LoadTensor(model=A, tensor="x")
    )


def test_parameters_of_ours_never_reach_a_kernel():
    for method in registry.registered_methods():
        assert not any(p.name.startswith("align_") for p in method.spec.parameters)


@pytest.mark.parametrize(
    "seam",
    ["guard_merge", "name_genomes", "plan_alignment", "read_config", "register_methods"],
)
def test_completing_a_module_again_changes_nothing(seam):
    before = (
        registry.registered_methods(),
        MergeConfiguration.model_validate.__func__,
        MergePlanner.plan_layer,
        mergekit.merge.run_merge,
        mergekit.merge.get_architecture_info,
        ModelGenome.genotype_merge_config,
        dict(METHOD_PARAM_MAPS),
    )
    getattr(seams, seam)()
    after = (
        registry.registered_methods(),
        MergeConfiguration.model_validate.__func__,
        MergePlanner.plan_layer,
        mergekit.merge.run_merge,
        mergekit.merge.get_architecture_info,
        ModelGenome.genotype_merge_config,
        dict(METHOD_PARAM_MAPS),
    )
    assert before == after


def test_another_signature_is_told_and_nothing_is_patched(monkeypatch):
    def plan_layer(self, sources, somewhere_else):
        """Stand for a later mergekit."""

    monkeypatch.setattr(MergePlanner, "plan_layer", plan_layer)
    with pytest.raises(
        patching.SeamError, match=r"differs from 0\.1\.5 at MergePlanner\.plan_layer"
    ):
        seams.plan_alignment()
    assert MergePlanner.plan_layer is plan_layer


def test_a_missing_function_is_told(monkeypatch):
    monkeypatch.delattr(mergekit.merge, "run_merge")
    with pytest.raises(patching.SeamError, match="install mergekit=="):
        seams.guard_merge()


def test_output_without_alignment_is_impossible_when_the_planner_is_not_patched():
    group = registry.get("rotation_linear")
    with pytest.raises(ValueError, match="aligns whole models"):
        group._execute(())


def test_loading_casts_before_anyone_can_look_so_dtypes_come_from_headers(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    load = LoadTensor(model=ModelReference.parse(str(tmp_path)), tensor="x", dtype="bfloat16")
    assert load.execute().dtype == torch.bfloat16


def test_a_head_of_its_own_can_be_planned():
    expected = ["self", "weight", "weights_in", "models", "cfg_reader"]
    assert list(inspect.signature(MergePlanner.plan_tensor).parameters) == expected
    source = inspect.getsource(MergePlanner.plan_tensor)
    assert "if weight.optional:" in source  # a required weight is planned without looking at files
    assert "self._tensors.append((weight, tensor_task))" in source


def test_the_planner_holds_the_configuration_that_is_saved():
    source = inspect.getsource(mergekit.merge.run_merge.__wrapped__)
    assert "out_model_config=cfg_out" in source
    assert "cfg_out.save_pretrained(out_path)" in source


def test_the_planner_knows_whether_the_vocabulary_is_rewritten():
    assert MergePlanner._tokenizer_task is None
    assert "self._tokenizer_task = BuildTokenizer(" in inspect.getsource(MergePlanner.__init__)


def test_parameter_sources_is_a_generator_that_is_read_once():
    from mergekit.config import ConfigReader

    assert inspect.isgeneratorfunction(ConfigReader.parameter_sources)


# -- what is called by ours ------------------------------------------------------------------------


def test_the_planner_tells_what_the_tensors_of_each_model_are_called(llamas):
    models = [llamas.reference, *llamas.others]
    plan = planner(config("rotation_linear", models))
    (module,) = plan.arch_info.modules
    arch = plan._model_arch(ModelReference.parse(str(models[1])))
    layer = arch.get_module(module)
    assert layer.num_layers() == 2
    names = [weight.name for weight in layer.layer_weights(index=1)]
    assert names and all(".layers.1." in name for name in names)
    assert [w.name for w in plan._out_module_arch(module).layer_weights(index=1)] == names
    outside = {w.name for w in (*layer.pre_weights(), *layer.post_weights())}
    assert EMBEDDINGS in outside
    assert {w.name for w in arch.all_weights()} > {*outside, *names}
    assert plan.arch_info.modules[module].weight_prefix is None


def test_the_configuration_of_an_output_can_be_made_before_a_merge(llamas):
    source = {"model": str(llamas.reference), "layer_range": [0, 1]}
    raw = {"merge_method": "passthrough", "slices": [{"sources": [source]}] * 3, "dtype": "float16"}
    parsed = MergeConfiguration.model_validate(raw)
    definition = get_architecture_info(parsed, MergeOptions())
    made = mergekit.merge._model_out_config(parsed, definition, trust_remote_code=False)
    assert (made.num_hidden_layers, made.to_dict()["dtype"]) == (3, "float16")


def test_loaders_are_shared_among_threads_so_that_warming_them_up_suffices(llamas):
    model = ModelReference.parse(str(llamas.reference))
    LoaderCache().setup(MergeOptions(trust_remote_code=True))
    loader, seen = LoaderCache().get(model), []

    def look() -> None:  # options are set per thread, so other threads must find the loader made
        seen.extend([LoaderCache().get(model), LoaderCache().trust_remote_code])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    LoaderCache().setup(MergeOptions())
    assert LoaderCache().get(model) is loader
    assert seen[0] is loader and LoaderCache.loaders[model] is loader
    assert seen[1] is False


def test_flushing_closes_files_and_later_reads_open_them_again(llamas):
    loader = LoaderCache().get(ModelReference.parse(str(llamas.reference)))
    first = loader.get_tensor(EMBEDDINGS)
    assert loader.current_shard is not None
    LoaderCache().flush_all()
    assert loader.current_shard is None
    assert torch.equal(loader.get_tensor(EMBEDDINGS), first)


@pytest.mark.parametrize("sharded", [False, True])
def test_an_index_tells_in_which_file_a_tensor_is(llamas, sharded, tmp_path):
    options = ("--out-shard-size", "50K") if sharded else ()
    folder = merged(config("linear", [llamas.reference], 1.0), tmp_path / "out", *options)
    index = LoaderCache().get(ModelReference.parse(str(folder))).index
    assert isinstance(index, ShardedTensorIndex) and index.is_safetensors
    assert index.base_path == str(folder)
    assert set(index.tensor_paths) == set(weights(folder))
    assert (len(set(index.tensor_paths.values())) > 1) == sharded
    assert all((folder / file).is_file() for file in index.tensor_paths.values())


def test_returned_tensors_are_cast_and_ours_may_be_none():
    load = LoadTensor(model=A, tensor="x")
    with pytest.raises(TypeError):  # the reason for ReturnMerged: no optional tensor fits
        ReturnTensor(weight_info=WeightInfo(name="x"), tensor_task=load)
    task = ReturnMerged(weight_info=WeightInfo(name="x"), tensor_task=load, dtype="float16")
    assert set(ReturnTensor.model_fields) == {"weight_info", "tensor_task", "dtype"}
    assert task.execute(torch.ones(1)).dtype == torch.float16
    assert task.arguments() == {"tensor": load}
    assert task.execute(None) is None


def test_dtypes_are_named_as_torch_names_them():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert dtype_from_name(str(dtype).removeprefix("torch.")) == dtype
    assert dtype_from_name(None) is None
    with pytest.raises(RuntimeError):
        dtype_from_name("float13")


def test_entries_of_configurations_are_found_by_dotted_path():
    nested = tiny.build("qwen2_vl").config
    assert get_config_value(nested, "text_config.num_hidden_layers") == tiny.LAYERS
    with pytest.raises(RuntimeError):
        get_config_value(nested, "text_config.no_such_entry")


def test_parameters_are_resolved_innermost_first_with_filters_and_gradients():
    switch = ParameterSpec("align_heads", StrictBool, ParameterScope.INPUT, True)

    def value(*settings: Mapping[str, Any] | None, name: str = "x.q_proj", t: float = 0.0) -> Any:
        raw = {"merge_method": "linear", "models": [{"model": "./x/a"}]}
        read = [MergeConfiguration.model_validate({**raw, "parameters": s}) for s in settings]
        levels = [parsed.parameters for parsed in read]
        return resolve_parameter(switch, levels, tensor_name=name, t=t, model=A)

    off = {"align_heads": False}
    assert value(None, {}) is True
    assert value(off, {"align_heads": True}) is False
    some = {"align_heads": [{"filter": "q_proj", "value": False}, {"value": True}]}
    assert value(some) is False and value(some, name="x.o_proj") is True
    ends = {"align_heads": [False, True]}
    assert value(ends, t=0.0) is False and value(ends, t=1.0) is True
    with pytest.raises(ValidationError):
        value({"align_heads": "no"})
    with pytest.raises(ValidationError):
        switch.validate(0)


def test_parameters_of_an_input_go_before_those_of_its_slice_and_of_the_merge():
    source = {"model": "./x/a", "layer_range": [0, 1], "parameters": {"weight": 1}}
    place = {"sources": [source], "base_model": "./x/b", "parameters": {"weight": 2}}
    raw = {"merge_method": "linear", "slices": [place], "parameters": {"weight": 3}}
    parsed = MergeConfiguration.model_validate({**raw, "base_model": "./x/c"})
    reader = ConfigReader(config=parsed, t=0.5, slice_out=parsed.slices[0])
    assert [s["weight"] for s in reader.parameter_sources(A)] == [1, 2, 3]
    assert [s["weight"] for s in reader.parameter_sources(None)] == [2, 3]
    assert str(reader.base_model) == "./x/b"
    assert (reader.t, reader.with_t(1.0).t) == (0.5, 1.0)


def _mentioned(annotation: Any) -> set[Any]:
    """Return all types that an annotation is made of."""
    return {annotation}.union(*(_mentioned(part) for part in get_args(annotation)))


def test_the_keys_that_are_checked_for_misspelling_are_those_that_mergekit_reads():
    for kind, parts in spelling._PARTS.items():
        for key, part in parts.items():
            assert part in _mentioned(kind.model_fields[key].annotation)
    models = {part for parts in spelling._PARTS.values() for part in parts.values()}
    nested = {
        m
        for kind in models | set(spelling._PARTS)
        for name, field in kind.model_fields.items()
        if name != "tokens"  # whose keys are a user's tokens
        for m in _mentioned(field.annotation)
        if isinstance(m, type) and issubclass(m, BaseModel)
    }
    # Nothing is read that nobody checks: a condition has its keys checked with our parameters.
    assert nested - {ModelReference, ConditionalParameter} == models


def test_a_tokenizer_section_names_its_source_and_may_name_tokens():
    assert set(TokenizerConfig.model_fields) == {"source", "tokens", "pad_to_multiple_of"}
    assert TokenizerConfig(source="./x/a").source == A
    assert TokenizerConfig(source="base").source == "base"
    assert {"tokenizer", "tokenizer_source"} <= set(MergeConfiguration.model_fields)


def test_mergekit_drops_keys_that_it_does_not_know_without_a_word():
    raw = {"merge_method": "linear", "models": [{"model": "./x/a", "wieght": 1}], "dytpe": "x"}
    assert "dytpe" not in MergeConfiguration.model_validate(raw).model_dump()


def test_a_model_reference_is_a_path_and_perhaps_an_adapter():
    assert set(ModelReference.model_fields) == {"model", "lora", "override_architecture"}
    both = ModelReference.parse("./x/a+./x/b")
    assert (both.model.path, both.lora.path, str(both)) == ("./x/a", "./x/b", "./x/a+./x/b")
    assert (A.model.path, A.model.revision, A.lora) == ("./x/a", None, None)
    assert ModelReference.parse("x/a@v1").model.revision == "v1"


def test_the_depth_of_a_definition_in_json_can_be_mended():
    shown = LlamaConfig(architectures=["LlamaForCausalLM"], hidden_size=64)
    stock = arch_info_for_config(shown)
    (module,) = stock.modules.values()
    assert isinstance(module.architecture, JsonModuleArchitecture)
    change = {"num_layers_config_key": "hidden_size"}
    changed = module.architecture.definition.model_copy(update=change)
    again = module.model_copy(update={"architecture": JsonModuleArchitecture(definition=changed)})
    assert again.architecture.num_layers(shown) == 64
    assert stock.model_copy(update={"modules": {"x": again}}).modules["x"] is again


def test_a_definition_of_ours_needs_four_answers_of_a_module():
    assert ModuleArchitecture.__abstractmethods__ == {
        "pre_weights",
        "layer_weights",
        "post_weights",
    }

    class Module(ModuleArchitecture):
        def pre_weights(self, config):
            return [WeightInfo(name="before")]

        def layer_weights(self, index, config):
            return [WeightInfo(name=f"{index}.x", optional=True)]

        def post_weights(self, config):
            return [WeightInfo(name="behind", tied_names=("before",))]

        def num_layers_config_key(self):
            return "num_hidden_layers"

    own = ModelArchitecture(
        modules={"m": ModuleDefinition(architecture=Module())},
        architectures=["Own"],
        model_type="own",
        tagalong_files=None,
        vocab_size_config_key=None,
    )
    names = [weight.name for weight in own.all_weights(tiny.build("llama").config)]
    assert names == ["before", "0.x", "1.x", "behind"]


def test_weights_are_described_by_six_fields():
    assert set(WeightInfo.model_fields) == {
        "name",
        "vocabulary_axis",
        "optional",
        "aliases",
        "force_dtype",
        "tied_names",
    }


def test_passing_through_returns_the_numbers_that_came_in():
    x = torch.tensor([1e-40, -0.0, 3.0])
    group = TensorGroup.from_tensors([x])
    (result,) = passthrough_merge_method((group,))
    assert torch.equal(result.view(torch.int32), x.view(torch.int32))


def test_a_method_has_a_specification_that_can_be_copied_under_another_name():
    spec = registry.get("linear").spec
    assert replace(spec, name="x").parameters == spec.parameters
    assert {p.name for p in spec.parameters} == {"weight", "normalize"}


def test_methods_can_be_taken_back_though_only_by_a_private_name():
    before = registry.registered_methods()
    assert set(registry._METHODS.values()) == set(before)
    seams.withdraw_methods()
    assert not any(m.spec.name.startswith("rotation") for m in registry.registered_methods())
    seams.register_methods()
    assert {m.spec.name for m in registry.registered_methods()} == {m.spec.name for m in before}


def test_planned_tasks_can_be_copied_with_other_inputs():
    task = ExecuteMergeMethodTask(
        method_name="linear",
        gather_tensors=gathers()[0],
        model_order=(A,),
        base_model=None,
        output_weight=WeightInfo(name="x"),
        parameters=ImmutableMap({}),
        input_parameters=ImmutableMap({A: ImmutableMap({"weight": 1.0})}),
    )
    inputs = task.gather_tensors
    assert dict(inputs.weight_info.items()) == {A: WeightInfo(name="x")}
    assert {"weight_info", "dtype", "device"} <= set(type(inputs).model_fields)
    update = {"gather_tensors": gathers()[1], "method_name": "passthrough"}
    assert type(task.model_copy(update=update).gather_tensors) is GatherAligned


# -- the graph and its output ----------------------------------------------------------------------


class Constant(Task[torch.Tensor]):
    """Return a number, and remember when."""

    name: str
    label: str | None = None

    def arguments(self) -> dict[str, Task]:
        return {}

    def group_label(self) -> str | None:
        return self.label

    def execute(self) -> torch.Tensor:
        DONE.append(self.name)
        return torch.ones(1)


class Several(Task[dict[str, torch.Tensor]]):
    """Return tensors by name."""

    parts: tuple[Task, ...]
    label: str | None = None

    def arguments(self) -> dict[str, Task]:
        return {str(position): part for position, part in enumerate(self.parts)}

    def group_label(self) -> str | None:
        return self.label

    def execute(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        DONE.append(f"{self.label}({len(tensors)})")
        return tensors


DONE: list[str] = []


def test_equal_tasks_run_once_and_the_lowest_label_first():
    """Why all tensors of a layer share one solve, and one layer at a time is resident."""
    DONE.clear()
    a, b = Constant(name="a", label="2"), Constant(name="b", label="1")
    twice = Constant(name="a", label="2")
    targets = [Several(parts=(a, b), label="2"), Several(parts=(twice,), label="3")]
    results = dict(Executor(targets).run(quiet=True))
    assert DONE == ["b", "a", "2(2)", "3(1)"]
    assert set(results[targets[0]]) == {"0", "1"}


def test_values_are_dropped_after_their_last_use():
    first, second = Constant(name="a", label="1"), Constant(name="b", label="2")
    used, later = Several(parts=(first,), label="1"), Several(parts=(second,), label="2")
    schedule = Executor([used, later]).schedule
    last = {handle.task(): position for handle, position in schedule.last_use_index.items()}
    order = [handle.task() for handle in schedule.tasks]
    assert last[first] == order.index(used) < order.index(second)


def test_a_task_is_asked_for_its_place():
    """Which our tasks answer: a name that mergekit no longer asks for would be lost silently."""
    for name in ("arguments", "execute", "group_label", "uses_accelerator", "main_thread_only"):
        assert callable(getattr(Task, name))
    source = inspect.getsource(import_module("mergekit.graph"))
    for name in ("group_label()", "uses_accelerator()", "arguments()"):
        assert f".{name}" in source
    assert ".main_thread_only()" in inspect.getsource(import_module("mergekit.multigpu_executor"))


def test_the_report_is_written_behind_the_weights_and_before_the_configuration(llamas, tmp_path):
    tasks = planner(config("rotation_linear", [llamas.reference])).plan_to_disk(str(tmp_path))
    assert sum(isinstance(task, FinalizeModel) for task in tasks) == 1
    source = inspect.getsource(mergekit.merge.run_merge.__wrapped__)
    order = ("exec.run(", "cfg_out.save_pretrained(", "generate_card(")
    places = [source.index(step) for step in order]
    assert places == sorted(places)
    assert mergekit.merge.generate_card._mergekit_rotation


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", [1, 10**9])
def test_whatever_a_writer_leaves_is_known_and_removed(safe, limit, tmp_path):
    """Shards carry other names until all are written, and their number is only known then."""
    this = run.Run(_begun=True, out_path=str(tmp_path))
    writer = TensorWriter(str(tmp_path), max_shard_size=limit, safe_serialization=safe)
    for name in "ab":
        writer.save_tensor(name, torch.ones(2))
    half = {path.name for path in tmp_path.iterdir()}
    assert bool(half) == (limit == 1)
    this.discard_output()
    assert list(tmp_path.iterdir()) == []
    writer = TensorWriter(str(tmp_path), max_shard_size=limit, safe_serialization=safe)
    for name in "ab":
        writer.save_tensor(name, torch.ones(2))
    writer.finalize()
    whole = {path.name for path in tmp_path.iterdir()}
    assert len(whole) == (3 if limit == 1 else 1) and not whole & half
    this.discard_output()
    assert list(tmp_path.iterdir()) == []


def test_what_safetensors_is_writing_when_it_is_killed_is_known_and_removed(tmp_path):
    """It writes to a file of another name first, here until a limit of the system ends it."""
    code = (
        "import resource, signal, sys\n"
        "import numpy as np\n"
        "from safetensors.numpy import save_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "save_file({'x': np.ones(1 << 16)}, sys.argv[1])\n"
    )
    file = tmp_path / "model-1.safetensors"
    ended = subprocess.run([sys.executable, "-c", code, str(file)], check=False)
    assert ended.returncode == -signal.SIGXFSZ
    assert len(list(tmp_path.iterdir())) == 1
    run.Run(_begun=True, out_path=str(tmp_path)).discard_output()
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_is_known_by_its_type():
    assert "isinstance(value, TokenizerInfo)" in inspect.getsource(
        mergekit.merge.run_merge.__wrapped__
    )
    assert BuildTokenizer.execute.__annotations__["return"] is TokenizerInfo


def test_the_options_that_are_read_have_their_names():
    known = {"device", "read_to_gpu", "trust_remote_code", "quiet", "copy_tokenizer"}
    assert known <= set(MergeOptions.model_fields)


def test_the_command_is_one_of_click_so_that_errors_are_one_sentence():
    from mergekit.scripts.run_yaml import main

    assert isinstance(main, click.Command)


# -- another version ------------------------------------------------------------------------------


def test_another_version_is_told_of_once(llamas, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(patching, "version", lambda name: "0.1.6")
    patching.warn_of_version.cache_clear()
    raw = config("rotation_linear", [llamas.reference, *llamas.others])
    for name in "ab":
        merged(raw, tmp_path / name)
    told = [record for record in caplog.messages if "0.1.6" in record]
    assert told == [
        "mergekit 0.1.6 is not the tested 0.1.5; check the merged model, or install "
        "mergekit==0.1.5 or a newer mergekit-rotation"
    ]
    patching.warn_of_version.cache_clear()


def test_a_fault_under_another_version_is_told_in_one_sentence(llamas, tmp_path, monkeypatch):
    def differs(*_: Any) -> None:
        raise AttributeError("'Architecture' object has no attribute 'get_module'")

    raw = config("rotation_linear", [llamas.reference, *llamas.others])
    monkeypatch.setattr("mergekit_rotation.graph.layer.LayerPlan._pair", differs)
    assert isinstance(merge(raw, tmp_path / "out").exception, AttributeError)
    monkeypatch.setattr(patching, "version", lambda name: "0.1.6")
    result = merge(raw, tmp_path / "out")
    assert result.exit_code == 1
    assert "mergekit 0.1.6 differs from 0.1.5 at a rotation_* merge (AttributeError: " in (
        result.output
    )


@pytest.mark.parametrize("name", ["plan_tensor", "_model_arch", "_out_module_arch"])
def test_what_is_only_called_is_looked_at_too(name, monkeypatch):
    monkeypatch.delattr(MergePlanner, name)
    with pytest.raises(patching.SeamError, match=rf"0\.1\.5 at MergePlanner\.{name}"):
        seams.plan_alignment()


def test_buffers_of_integers_are_copied_or_refused():
    """The line between two models has to treat them as a merge does."""
    x = torch.arange(3)
    assert copy_non_floating_buffer([x.float(), x.float() + 1], "x") is None
    assert torch.equal(copy_non_floating_buffer([x, x.clone()], "x"), x)
    with pytest.raises(ValueError, match="x"):
        copy_non_floating_buffer([x, x + 1], "x")


def test_what_a_merge_does_at_its_end_can_be_done_before():
    """For ``plan`` and ``barrier``: vocabulary of the output and the chat template."""
    vocabulary = inspect.signature(mergekit.merge._update_config_vocab).parameters
    assert list(vocabulary) == ["config", "arch_info", "tokenizer", "pad_to_multiple_of"]
    template = inspect.signature(mergekit.merge._set_chat_template).parameters
    assert list(template)[:2] == ["tokenizer", "merge_config"]
    raw = {"merge_method": "linear", "models": [{"model": "a"}], "chat_template": "chatlm"}
    with pytest.raises(RuntimeError, match="chatlm"):
        mergekit.merge._set_chat_template(None, MergeConfiguration.model_validate(raw))


def test_every_module_of_mergekit_that_is_imported_is_looked_at_here():
    """A new import needs a seam of its own above."""
    package = Path(seams.__file__).parents[1]
    used = set()
    for file in package.rglob("*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[:1] == ["from"] and words[1].split(".")[0] == "mergekit":
                used.add(words[1])
    here = Path(__file__).read_text(encoding="utf-8")
    assert used, "no file was looked at"
    assert [module for module in sorted(used) if module not in here] == []
