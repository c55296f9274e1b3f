"""Facts about mergekit that the seams rest on, one test per seam."""

import inspect
from importlib import import_module

import mergekit.config
import mergekit.merge
import mergekit.plan
import pytest
import torch
from mergekit.architecture import WeightInfo
from mergekit.common import ImmutableMap, ModelReference
from mergekit.config import MergeConfiguration
from mergekit.evo.genome import METHOD_PARAM_MAPS, ModelGenome
from mergekit.io.tasks import LoadTensor
from mergekit.merge_methods import registry
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.plan import MergePlanner
from mergekit.tokenizer import BuildTokenizer, PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary

from mergekit_rotation.graph import seams
from mergekit_rotation.graph.tasks import CheckedLoad, GatherAligned, GatherChecked, Input, checked

A = ModelReference.parse("./x/a")


def test_the_installed_mergekit_is_the_tested_one():
    assert seams.version("mergekit") == seams.TESTED


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


def test_conversions_are_told_by_name():
    from mergekit.architecture import conversion

    expected = ["transform", "available"]
    assert list(inspect.signature(conversion._iter_transform_matches).parameters) == expected
    expected = ["renamed_key", "target_patterns"]
    assert list(inspect.signature(conversion._expanded_target_keys).parameters) == expected


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
    with pytest.raises(seams.SeamError, match=r"differs from 0\.1\.5 at MergePlanner\.plan_layer"):
        seams.plan_alignment()
    assert MergePlanner.plan_layer is plan_layer


def test_a_missing_function_is_told(monkeypatch):
    monkeypatch.delattr(mergekit.merge, "run_merge")
    with pytest.raises(seams.SeamError, match="install mergekit=="):
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
