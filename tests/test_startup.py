"""Installing, uninstalling, and what Python does at start-up and when mergekit is imported."""

import importlib
import importlib.util
import json
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from environments import (
    REPOSITORY,
    Environment,
    Result,
    build_wheel,
    copy_source,
    install_wheel,
    must,
    other_mergekit,
    together,
)
from mergekit_rotation import startup
from mergekit_rotation.graph import patching, seams
from scramble import scramble
from tiny import build, save

NAMES = "print(*(method.spec.name for method in mergekit.merge_methods.registered_methods()))"
LIST_METHODS = f"import mergekit.merge_methods; {NAMES}"
QUIET = ("--no-copy-tokenizer", "--no-write-model-card")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree."""
    return copy_source(tmp_path_factory.mktemp("source") / "tree")


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build_wheel(source)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the package and with mergekit."""
    return install_wheel(tmp_path_factory.mktemp("installed") / "venv", wheel)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The same without the package."""
    return Environment.create(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture(scope="module")
def lonely(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the package and nothing else."""
    return install_wheel(tmp_path_factory.mktemp("lonely") / "venv", wheel, lend=False)


def rotation_methods(result: Result) -> list[str]:
    """The names of ours that a process has printed."""
    return [name for name in must(result).stdout.split() if name.startswith("rotation_")]


def silent(result: Result) -> bool:
    return (result.returncode, result.stdout, result.stderr) == (0, "", "")


# -- the files ------------------------------------------------------------------------------------


def test_wheel_has_the_hook_at_the_top_and_the_whole_package(wheel: Path) -> None:
    """The hook files only work in site-packages itself."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        for hook in ("mergekit_rotation.pth", "mergekit_rotation.start"):
            assert archive.read(hook) == (REPOSITORY / hook).read_bytes()
    package = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "mergekit_rotation").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "mergekit_rotation/architecture/data/llama.json" in package
    assert names == package | {"mergekit_rotation.pth", "mergekit_rotation.start"}


def test_hook_files_say_the_same() -> None:
    """Python 3.15 reads ``.start`` and ignores the ``.pth`` file of the same name."""
    (line,) = (REPOSITORY / "mergekit_rotation.pth").read_text().splitlines()
    (entry,) = (REPOSITORY / "mergekit_rotation.start").read_text().splitlines()
    module, function = entry.split(":")
    assert line == f"import {module}; {module}.{function}()"
    assert getattr(importlib.import_module(module), function) is startup.install


# -- installing -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pip_environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    # pip is lent as well, where the running environment has it.
    pip = importlib.util.find_spec("pip") is None
    return Environment.create(tmp_path_factory.mktemp("pip") / "venv", pip=pip)


@pytest.fixture(scope="module")
def uv_environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment.create(tmp_path_factory.mktemp("uv") / "venv")


@pytest.mark.parametrize("form", ["wheel", "editable"])
@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_install_and_uninstall(
    tool: str, form: str, source: Path, wheel: Path, request: pytest.FixtureRequest
) -> None:
    """However it was installed, a plain Python has the methods, and nothing stays behind."""
    environment: Environment = request.getfixturevalue(f"{tool}_environment")
    call = environment.pip if tool == "pip" else environment.uv
    # The running environment, which is lent to this one, may have the package as well.
    options = ["--no-deps", "--no-build-isolation"]
    options += ["--ignore-installed"] if tool == "pip" else []
    yes = ["--yes"] if tool == "pip" else []
    before = sorted(environment.site.iterdir())
    assert environment.ours() == []

    must(call("install", *options, *(["-e", source] if form == "editable" else [wheel])))
    where = "import mergekit_rotation; print(mergekit_rotation.__file__)"
    result = must(environment.python("-c", f"{LIST_METHODS}; {where}"))
    assert "rotation_linear" in rotation_methods(result)
    home = source if form == "editable" else environment.site
    assert Path(result.stdout.splitlines()[-1]) == home / "mergekit_rotation" / "__init__.py"
    assert result.stderr == ""
    if form == "wheel":
        assert any("__pycache__" in name for name in environment.ours())
    assert environment.command.is_file()

    must(call("uninstall", *yes, "mergekit-rotation"))
    assert environment.ours() == []
    assert sorted(environment.site.iterdir()) == before
    assert not environment.command.exists()
    assert silent(environment.python("-c", "pass"))
    off = "import sys; print(*(name for name in sys.modules if 'rotation' in name))"
    assert must(environment.python("-c", off)).stdout == "\n"


# -- processes without mergekit -------------------------------------------------------------------


def test_a_process_without_mergekit_imports_two_small_modules(
    installed: Environment, bare: Environment
) -> None:
    """At start-up, and however much else is imported later."""
    code = (
        "import sys, json; start = set(sys.modules)\n"
        "import asyncio, email.message, importlib.metadata, unittest, xml.dom\n"
        "print(json.dumps([sorted(start), sorted(sys.modules)]))"
    )
    with_hook, without = (
        [set(names) for names in json.loads(must(environment.python("-c", code)).stdout)]
        for environment in (installed, bare)
    )
    ours = {"mergekit_rotation", "mergekit_rotation.startup"}
    assert with_hook[0] - without[0] == ours
    assert with_hook[1] - without[1] == ours
    assert not any(name.split(".")[0] in ("torch", "mergekit", "click") for name in with_hook[1])


def test_the_hook_imports_only_sys(installed: Environment) -> None:
    """Seen from a Python that has imported as little as possible."""
    code = (
        f"import sys; sys.path.insert(0, {str(installed.site)!r}); before = set(sys.modules)\n"
        "import mergekit_rotation.startup; mergekit_rotation.startup.install()\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    result = must(installed.python("-S", "-c", code))
    assert result.stdout.split() == ["mergekit_rotation", "mergekit_rotation.startup"]


def test_without_mergekit_it_is_silent(lonely: Environment) -> None:
    """Also when somebody asks for mergekit, who gets Python's own answer."""
    assert silent(lonely.python("-c", "import json"))
    code = (
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('mergekit') is None\n"
        "for name in ('mergekit', 'mergekit.plan'):\n"
        "    try:\n"
        "        __import__(name)\n"
        "    except ModuleNotFoundError as problem:\n"
        "        assert problem.name == 'mergekit', problem.name\n"
        "    else:\n"
        "        sys.exit(1)\n"
    )
    assert silent(lonely.python("-c", code))


@pytest.mark.parametrize(
    "code",
    [
        "import no_such_module",
        "import broken_module",
        "import mergekit.no_such_module",
        "from mergekit import no_such_name",
        "import json.no_such_module",
    ],
)
def test_import_errors_of_others_are_unchanged(
    code: str, installed: Environment, bare: Environment, tmp_path: Path
) -> None:
    """To the letter, traceback included."""
    (tmp_path / "broken_module.py").write_text("import also_missing\n")
    with_hook, without = (
        environment.python("-c", code, PYTHONPATH=str(tmp_path))
        for environment in (installed, bare)
    )
    assert without.returncode == 1 and "Error" in without.stderr
    assert (with_hook.returncode, with_hook.stderr) == (without.returncode, without.stderr)


# -- the switch -----------------------------------------------------------------------------------


def test_disable_is_read_when_mergekit_is_imported(installed: Environment) -> None:
    """So it may be set by the program that imports mergekit."""
    late = "import os; os.environ['MERGEKIT_ROTATION_DISABLE'] = '1'"
    results = together(
        {
            "set": lambda: installed.python("-c", LIST_METHODS, MERGEKIT_ROTATION_DISABLE="1"),
            "set late": lambda: installed.python("-c", f"{late}; {LIST_METHODS}"),
        }
    )
    for result in results.values():
        assert rotation_methods(result) == []
        assert "linear" in result.stdout.split()
        assert result.stderr == ""


@pytest.mark.parametrize(
    ("value", "on"), [(None, True), ("", True), ("0", True), ("1", False), ("true", False)]
)
def test_values_of_the_switch(value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    completed: list[str] = []
    monkeypatch.setattr(seams, "complete", completed.append)
    if value is None:
        monkeypatch.delenv("MERGEKIT_ROTATION_DISABLE", raising=False)
    else:
        monkeypatch.setenv("MERGEKIT_ROTATION_DISABLE", value)
    startup._Finder().complete("mergekit.plan")
    assert completed == (["mergekit.plan"] if on else [])


# -- a mergekit that is not the one we know -------------------------------------------------------

CONFIG = """
class MergeConfiguration:
    @classmethod
    def model_validate(cls, obj): pass
    def referenced_models(self): pass
"""
PLAN = """
class MergePlanner:
    def plan_layer(self, sources, layer_offset, t, cfg_reader, module_name): pass
    def _plan(self): pass
    def plan_to_disk(self, out_path): pass
    def plan_tensor(self, weight, weights_in, models, cfg_reader): pass
    def _model_arch(self, model): pass
    def _out_module_arch(self, module): pass
"""
MERGE = """
def run_merge(merge_config, out_path, options, config_source=None): pass
def _model_out_config(config, arch_info, trust_remote_code=False): pass
"""
METHODS = """
def registered_methods():
    from mergekit.merge_methods import registry
    return registry.registered_methods()
"""
REGISTRY = """
_METHODS = {}
def register(method): _METHODS[method.spec.name] = method
def registered_methods(): return tuple(_METHODS.values())
"""
STUB: dict[str, str | None] = {
    "config.py": CONFIG,
    "plan.py": PLAN,
    "merge.py": MERGE,
    "merge_methods/__init__.py": METHODS,
    "merge_methods/registry.py": REGISTRY,
}
CONTINUES = (
    "import mergekit.merge_methods, mergekit.config, mergekit.plan, mergekit.merge\n"
    f"{NAMES}\nraise SystemExit(7)"
)

#: file, what is in it (None: it is missing), and the place that the message must name
DIFFERENCES: dict[str, tuple[str, str | None, str]] = {
    "no registry": ("merge_methods/registry.py", None, "registry"),
    "no register": ("merge_methods/registry.py", REGISTRY.replace("register(", "add("), "register"),
    "register(name, method)": (
        "merge_methods/registry.py",
        REGISTRY.replace("register(method)", "register(name, method)"),
        "register",
    ),
    "no base module": ("merge_methods/base.py", "raise ImportError('moved')", "merge_methods"),
    "no MergeConfiguration": ("config.py", "", "MergeConfiguration"),
    "no model_validate": ("config.py", "class MergeConfiguration: pass", "model_validate"),
    "static model_validate": (
        "config.py",
        CONFIG.replace("classmethod", "staticmethod").replace("cls, ", ""),
        "model_validate",
    ),
    "model_validate(data)": ("config.py", CONFIG.replace("obj", "data"), "model_validate"),
    "no referenced_models": ("config.py", CONFIG.replace("referenced", "all"), "referenced_models"),
    "no MergePlanner": ("plan.py", "", "MergePlanner"),
    "no plan_layer": ("plan.py", PLAN.replace("plan_layer", "plan_block"), "plan_layer"),
    "plan_layer(base)": ("plan.py", PLAN.replace("sources", "base, sources"), "plan_layer"),
    "plan_layer = 3": ("plan.py", "class MergePlanner: plan_layer = 3", "plan_layer"),
    "no _plan": ("plan.py", PLAN.replace("_plan(", "_plan_all("), "_plan"),
    "plan_to_disk(path)": ("plan.py", PLAN.replace("out_path", "path"), "plan_to_disk"),
    "no plan_tensor": ("plan.py", PLAN.replace("plan_tensor", "plan_one"), "plan_tensor"),
    "no _model_arch": ("plan.py", PLAN.replace("_model_arch", "_arch"), "_model_arch"),
    "no _out_module_arch": ("plan.py", PLAN.replace("_out_module", "_module"), "_out_module_arch"),
    "no run_merge": ("merge.py", MERGE.replace("run_merge", "merge"), "run_merge"),
    "no _model_out_config": ("merge.py", MERGE.replace("_out_", "_"), "_model_out_config"),
    "run_merge(config)": ("merge.py", MERGE.replace("merge_config", "config"), "run_merge"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_another_mergekit_gets_one_message(
    difference: str, installed: Environment, tmp_path: Path
) -> None:
    """Which names the version and the place; the program goes on as if we were not there."""
    file, text, place = DIFFERENCES[difference]
    folder = other_mergekit(tmp_path, {**STUB, file: text})
    # Only the modules that differ, so that one stub shows one difference.
    imported = ["mergekit." + file.split("/")[0].removesuffix(".py")]
    code = f"import {', '.join(imported)}\nprint('goes on')\nraise SystemExit(7)"
    result = installed.python("-c", code, PYTHONPATH=str(folder))
    assert (result.returncode, result.stdout) == (7, "goes on\n")
    (message,) = result.stderr.splitlines()
    assert message.startswith("mergekit-rotation is not available: mergekit 9.9 ")
    assert place in message
    assert "partially initialized" not in message
    assert f"install mergekit=={patching.TESTED}" in message


def test_another_mergekit_in_every_place_gets_one_message(
    installed: Environment, tmp_path: Path
) -> None:
    """The first difference is told, and the others add nothing."""
    different = {
        **STUB,
        "merge_methods/registry.py": REGISTRY.replace("register(", "add("),
        "config.py": "class MergeConfiguration: pass",
        "plan.py": "class MergePlanner: pass",
        "merge.py": "",
    }
    folder = other_mergekit(tmp_path, different)
    result = installed.python("-c", CONTINUES, PYTHONPATH=str(folder))
    assert (result.returncode, result.stdout) == (7, "\n")
    (message,) = result.stderr.splitlines()
    assert "mergekit 9.9" in message and "registry.register" in message


@pytest.mark.parametrize("difference", ["no referenced_models", "plan_layer(base)"])
def test_no_method_stays_registered(
    difference: str, installed: Environment, tmp_path: Path
) -> None:
    """Even where the difference shows after mergekit's registry was completed."""
    file, text, place = DIFFERENCES[difference]
    files: dict[str, str | None] = {"config.py": CONFIG, "plan.py": PLAN, "merge.py": MERGE}
    files[file] = text
    folder = other_mergekit(tmp_path, files, rest=True)
    result = installed.python("-c", CONTINUES, PYTHONPATH=str(folder))
    assert result.returncode == 7
    (message,) = result.stderr.splitlines()
    assert "mergekit 9.9" in message and place in message
    names = result.stdout.split()
    assert "linear" in names
    assert [name for name in names if name.startswith("rotation_")] == []


def test_a_mergekit_without_metadata_gets_the_same_message(
    lonely: Environment, tmp_path: Path
) -> None:
    """A checkout on PYTHONPATH has no version, but still a place that differs."""
    file, text, place = DIFFERENCES["no plan_layer"]
    click = Path(str(importlib.util.find_spec("click").origin)).parent  # type: ignore[union-attr]
    folder = other_mergekit(tmp_path, {file: text}, version=None)
    (folder / "click").symlink_to(click)
    result = lonely.python("-c", "import mergekit.plan", PYTHONPATH=str(folder))
    (message,) = must(result).stderr.splitlines()
    assert place in message and patching.TESTED in message


def test_a_mergekit_that_fails_by_itself_keeps_its_error(
    installed: Environment, bare: Environment, tmp_path: Path
) -> None:
    """Its exception arrives, and we say nothing about it."""
    folder = other_mergekit(tmp_path, {"plan.py": "import no_such_module"})
    with_hook, without = (
        environment.python("-c", "import mergekit.plan", PYTHONPATH=str(folder))
        for environment in (installed, bare)
    )
    assert with_hook.returncode == without.returncode == 1
    assert with_hook.stderr.splitlines()[-1] == without.stderr.splitlines()[-1]
    assert "mergekit-rotation is not available" not in with_hook.stderr


# -- the finder -----------------------------------------------------------------------------------


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of completed modules; ``pretend.a`` and ``pretend.b`` stand for mergekit's."""
    names: list[str] = []

    def complete(name: str) -> None:
        assert sys.modules[name].DONE, f"{name} was completed before it was executed"
        names.append(name)

    monkeypatch.delenv("MERGEKIT_ROTATION_DISABLE", raising=False)
    monkeypatch.setattr(startup, "SEAMS", ("pretend.a", "pretend.b"))
    monkeypatch.setattr(seams, "complete", complete)
    others = [finder for finder in sys.meta_path if not isinstance(finder, startup._Finder)]
    monkeypatch.setattr(sys, "meta_path", others)
    yield names
    for name in [name for name in sys.modules if name.split(".")[0] == "pretend"]:
        del sys.modules[name]


def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a package with two modules, one of which imports the other and a third."""
    package = folder / "pretend"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text("import pretend.c\nimport pretend.b\nDONE = True\n")
    (package / "b.py").write_text("import pretend.c\nDONE = True\n")
    (package / "c.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))


def finders() -> list[object]:
    return [finder for finder in sys.meta_path if isinstance(finder, startup._Finder)]


def test_install_twice_leaves_one_finder(
    completed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every module is completed once."""
    pretend(tmp_path, monkeypatch)
    assert startup.installed() is None
    startup.install()
    startup.install()
    (finder,) = finders()
    assert startup.installed() is finder
    importlib.import_module("pretend.a")
    importlib.import_module("pretend.b")
    startup.install()
    assert finders() == [finder]
    assert completed == ["pretend.b", "pretend.a"]


def test_modules_imported_before_are_completed_at_once(
    completed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of `SEAMS`; the others when they come."""
    pretend(tmp_path, monkeypatch)
    importlib.import_module("pretend.b")
    assert completed == []
    startup.install()
    assert completed == ["pretend.b"]
    importlib.import_module("pretend.a")
    assert completed == ["pretend.b", "pretend.a"]


def test_looking_for_a_module_does_not_run_it(
    completed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`find_spec` tells what it tells without us."""
    pretend(tmp_path, monkeypatch)
    without = importlib.util.find_spec("pretend.a")
    startup.install()
    with_hook = importlib.util.find_spec("pretend.a")
    assert without is not None and with_hook is not None
    assert with_hook.origin == without.origin
    assert type(with_hook.loader) is type(without.loader)
    assert importlib.util.find_spec("pretend.missing") is None
    assert "pretend.a" not in sys.modules
    assert completed == []


def test_a_reloaded_module_is_completed_again(
    completed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path, monkeypatch)
    startup.install()
    module = importlib.import_module("pretend.b")
    importlib.reload(module)
    assert len(completed) >= 2
    assert set(completed) == {"pretend.b"}


def test_modules_of_a_zip_file_are_completed_when_they_are_executed(
    completed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There all modules of a folder share one loader."""
    folder = tmp_path / "unpacked"
    folder.mkdir()
    pretend(folder, monkeypatch)
    with zipfile.ZipFile(tmp_path / "pretend.zip", "w") as archive:
        for path in (folder / "pretend").iterdir():
            archive.write(path, f"pretend/{path.name}")
    monkeypatch.syspath_prepend(str(tmp_path / "pretend.zip"))
    startup.install()
    module = importlib.import_module("pretend.a")
    assert "pretend.zip" in str(module.__file__)
    assert completed == ["pretend.b", "pretend.a"]


def test_a_failing_completion_is_told_once_and_never_raised(
    completed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend(tmp_path, monkeypatch)

    def fail(name: str) -> None:
        raise ValueError(f"{name} is odd")

    monkeypatch.setattr(seams, "complete", fail)
    startup.install()
    importlib.import_module("pretend.a")
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "mergekit-rotation is not available: pretend.b is odd\n"


# -- the real mergekit ----------------------------------------------------------------------------

WEIGHTS = "model.safetensors"

# Looks at mergekit's modules, then merges twice: importing mergekit takes longer than all of that.
LOOK_AND_MERGE = """
import contextlib, importlib.resources, importlib.util, inspect, io, json, runpy, sys

spec = importlib.util.find_spec("mergekit.plan")
assert spec.origin.endswith("plan.py") and "mergekit.plan" not in sys.modules
data = importlib.resources.files("mergekit._data")
assert any(data.rglob("*.json"))
import mergekit.plan
methods = importlib.resources.files("mergekit.merge_methods")
assert methods.joinpath("linear.py").is_file()
shown, arguments = io.StringIO(), sys.argv[1:]
sys.argv[1:] = ["--help"]
with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
    runpy.run_module("mergekit.scripts.run_yaml", run_name="__main__", alter_sys=True)
print(json.dumps({
    "module": inspect.getsource(mergekit.plan),
    "function": inspect.getsource(mergekit.plan.MergePlanner.plan_layer),
    "help": shown.getvalue(),
}))

from mergekit.scripts.run_yaml import main
half = len(arguments) // 2
main(arguments[:half], standalone_mode=False)
print("second", file=sys.stderr, flush=True)
main(arguments[half:], standalone_mode=False)
"""

ANOTHER_RUN_MERGE = """
_run_merge = run_merge
def run_merge(config, out_path, options, config_source=None):
    return _run_merge(config, out_path, options, config_source)
"""


@dataclass(frozen=True)
class Merges:
    """Folder with models and merges, and what the processes that merged have printed."""

    folder: Path
    results: dict[str, Result]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / WEIGHTS)

    def distance(self, one: str, other: str) -> float:
        a, b = self.weights(one), self.weights(other)
        assert a.keys() == b.keys()
        return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.fixture(scope="module")
def merges(installed: Environment, tmp_path_factory: pytest.TempPathFactory) -> Merges:
    """A model and the same in scrambled coordinates, merged in several ways."""
    folder = tmp_path_factory.mktemp("merges")
    model = build("llama")
    save(model, folder / "a")
    save(model, folder / "b")
    scrambled = scramble(load_file(folder / "a" / WEIGHTS), model.config, "llama", seed=1)
    save_file(scrambled, folder / "b" / WEIGHTS, metadata={"format": "pt"})
    entry = "  - model: {}\n    parameters: {{weight: 0.5}}\n"
    for method in ("linear", "rotation_linear"):
        lines = f"merge_method: {method}\ndtype: float32\nmodels:\n"
        lines += "".join(entry.format(folder / name) for name in "ab")
        (folder / f"{method}.yml").write_text(lines, encoding="utf-8")
    real = importlib.util.find_spec("mergekit.merge")
    assert real is not None and real.origin is not None
    changed = {"merge.py": Path(real.origin).read_text(encoding="utf-8") + ANOTHER_RUN_MERGE}
    other = str(other_mergekit(folder / "other", changed, rest=True))

    def arguments(method: str, out: str) -> list[str | Path]:
        quiet = ("--no-copy-tokenizer", "--no-write-model-card")
        return [folder / f"{method}.yml", folder / out, *quiet]

    def merge(method: str, out: str, **variables: str) -> Result:
        command = ("-m", "mergekit.scripts.run_yaml", *arguments(method, out))
        return installed.python(*command, **variables)

    both = [*arguments("linear", "hook"), *arguments("rotation_linear", "rotation")]
    jobs = {
        "hook": lambda: installed.python("-c", LOOK_AND_MERGE, *both),
        "no hook": lambda: merge("linear", "no hook", MERGEKIT_ROTATION_DISABLE="1"),
        "refused": lambda: merge("rotation_linear", "refused", PYTHONPATH=other),
    }
    return Merges(folder, together(jobs))


def test_tools_that_look_into_mergekit_still_work(merges: Merges) -> None:
    """Specs, resources, source text and ``python -m``."""
    seen = json.loads(must(merges.results["hook"]).stdout.splitlines()[0])
    assert "class MergePlanner" in seen["module"]
    assert seen["function"].strip().startswith("def plan_layer")
    assert "Usage: " in seen["help"]
    assert "--lora-merge-cache" in seen["help"]


def test_a_plain_merge_is_the_same_with_and_without_the_hook(merges: Merges) -> None:
    """To the byte, and nothing is said."""
    with_hook = must(merges.results["hook"]).stderr.split("second\n")[0]
    must(merges.results["no hook"])
    one, other = (merges.folder / name / WEIGHTS for name in ("hook", "no hook"))
    assert one.read_bytes() == other.read_bytes()
    assert "aligned" not in with_hook and "rotation" not in with_hook


def test_the_plain_command_aligns(merges: Merges) -> None:
    """With the hook from a wheel; the plain method does something else to these models."""
    with_hook = must(merges.results["hook"]).stderr.split("second\n")[1]
    assert "aligned " in with_hook
    assert merges.distance("rotation", "a") < 1e-5
    assert merges.distance("hook", "a") > 1e-2


def test_a_mergekit_that_differs_refuses_rotation_methods(merges: Merges) -> None:
    """After the message, and without a file that looks like a model."""
    refused = merges.results["refused"]
    assert refused.returncode == 1
    assert refused.stderr.count("mergekit-rotation is not available: ") == 1
    assert "mergekit-rotation is not available: mergekit 9.9 differs" in refused.stderr
    assert "run_merge" in refused.stderr
    assert "Traceback" not in refused.stderr
    out = merges.folder / "refused"
    assert not out.exists() or not any(out.iterdir())
