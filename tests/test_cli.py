"""The command ``mergekit-rotation``."""

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from environments import (
    Environment,
    Result,
    build_wheel,
    copy_source,
    install_wheel,
    lent,
    must,
    other_mergekit,
    together,
)
from mergekit_rotation.cli import main
from scramble import scramble
from tiny import build, save

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(copy_source(tmp_path_factory.mktemp("source") / "tree"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the package and with mergekit."""
    return install_wheel(tmp_path_factory.mktemp("installed") / "venv", wheel)


@pytest.fixture(scope="module")
def lonely(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the package and with click, but without mergekit."""
    environment = install_wheel(tmp_path_factory.mktemp("lonely") / "venv", wheel, lend=False)
    (environment.site / "click").symlink_to(click_folder())
    return environment


def click_folder() -> Path:
    spec = importlib.util.find_spec("click")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def command(environment: Environment, *arguments: str | Path, **variables: str) -> Result:
    """Run the console script, in a folder without a hook file of its own."""
    script = environment.command
    return environment.python(script, *arguments, cwd=environment.folder, **variables)


def without_site(environment: Environment, *arguments: str | Path, first: str = "") -> Result:
    """The command in a Python that runs no start-up hooks, with the same folders on its path."""
    folders = [str(path) for path in (environment.site, *lent())]
    code = (
        f"import sys; sys.path[:0] = {folders!r}\n"
        "from mergekit_rotation import startup; assert startup.installed() is None\n"
        f"{first}\n"
        "from mergekit_rotation.cli import main\n"
        "main(prog_name='mergekit-rotation')\n"
    )
    return environment.python("-S", "-c", code, *arguments, cwd=environment.folder)


def declared(text: str) -> set[str]:
    """The options that a help text declares, not those that it mentions."""
    lines = [line for line in text.splitlines() if line.startswith("  -")]
    words = " ".join(line.strip().split("  ")[0] for line in lines).replace(",", "").split()
    return {word for word in words if word.startswith("-")}


def facts(result: Result) -> dict[str, str]:
    """What ``doctor`` prints, line by line."""
    return {line[:18].strip(): line[18:].strip() for line in result.stdout.splitlines()}


# -- doctor ---------------------------------------------------------------------------------------


def test_doctor_when_all_is_well(installed: Environment) -> None:
    result = must(command(installed, "doctor"))
    told = facts(result)
    for package in ("mergekit-rotation", "mergekit", "torch", "transformers", "safetensors"):
        assert told[package][0].isdigit(), package
    assert told["start-up hook"] == str(installed.site / "mergekit_rotation.pth")
    assert told["hook has fired"] == "yes"
    count, names = told["methods"].split(": ")
    assert int(count) == len(names.split(", "))
    assert {"rotation_linear", "rotation_align"} <= set(names.split(", "))
    assert "CPU" in told["device"]
    assert result.stderr == ""


def test_doctor_when_disabled(installed: Environment) -> None:
    result = command(installed, "doctor", MERGEKIT_ROTATION_DISABLE="1")
    assert result.returncode == 1
    assert facts(result)["hook has fired"] == "yes"
    assert "MERGEKIT_ROTATION_DISABLE is set; unset it" in result.stderr


def test_doctor_without_start_up_hooks(installed: Environment) -> None:
    result = without_site(installed, "doctor")
    assert result.returncode == 1
    told = facts(result)
    assert told["start-up hook"] == str(installed.site / "mergekit_rotation.pth")
    assert told["hook has fired"] == "no"
    assert "the start-up hook did not run" in result.stderr
    assert "mergekit-rotation yaml CONFIG OUT" in result.stderr


def test_doctor_in_a_folder_that_is_not_site_packages(
    installed: Environment, wheel: Path, tmp_path: Path
) -> None:
    """``pip install --target`` and PYTHONPATH: Python reads no hook files there."""
    bare = Environment.create(tmp_path / "venv")
    target = tmp_path / "target"
    must(installed.uv("install", "--no-deps", "--target", target, wheel))
    arguments = ("-m", "mergekit_rotation", "doctor")
    result = bare.python(*arguments, cwd=tmp_path, PYTHONPATH=str(target))
    assert result.returncode == 1
    told = facts(result)
    assert told["start-up hook"] == str(target / "mergekit_rotation.pth")
    assert told["hook has fired"] == "no"
    assert "a folder that is not site-packages" in result.stderr


def test_doctor_when_the_hook_file_is_gone(wheel: Path, tmp_path: Path) -> None:
    environment = install_wheel(tmp_path / "venv", wheel)
    for name in ("mergekit_rotation.pth", "mergekit_rotation.start"):
        (environment.site / name).unlink()
    result = command(environment, "doctor")
    assert result.returncode == 1
    told = facts(result)
    assert told["start-up hook"] == "not found"
    assert told["hook has fired"] == "no"
    assert "reinstall mergekit-rotation" in result.stderr


def test_doctor_names_the_hook_that_python_runs(installed: Environment, wheel: Path) -> None:
    """Not a file of that name in the folder where one happens to be, such as the repository."""
    tree = wheel.parents[1]
    assert (tree / "mergekit_rotation.pth").is_file()
    arguments = ("-m", "mergekit_rotation", "doctor")
    result = installed.python(*arguments, cwd=tree, MERGEKIT_ROTATION_DISABLE="1")
    assert facts(result)["start-up hook"] == str(installed.site / "mergekit_rotation.pth")


def test_doctor_without_mergekit(lonely: Environment) -> None:
    result = command(lonely, "doctor")
    assert result.returncode == 1
    assert facts(result)["mergekit"] == "not installed"
    assert "mergekit is not installed; pip install mergekit" in result.stderr


DIFFERENT = {"config.py": "", "plan.py": "", "merge.py": "", "merge_methods/__init__.py": ""}


@pytest.mark.parametrize(
    ("files", "reason"),
    [(DIFFERENT, "is not supported"), ({"merge.py": "import no_such_module"}, "no_such_module")],
    ids=["different", "broken"],
)
def test_doctor_with_an_unsupported_mergekit(
    files: dict[str, str], reason: str, installed: Environment, tmp_path: Path
) -> None:
    """Advice, not a traceback."""
    if reason == "is not supported":
        files = {**files, "merge.py": "import mergekit.merge_methods, mergekit.plan"}
    folder = other_mergekit(tmp_path, files)
    result = command(installed, "doctor", PYTHONPATH=str(folder))
    assert result.returncode == 1
    assert facts(result)["mergekit"] == "9.9"
    assert "Traceback" not in result.stderr
    assert "The rotation_* methods are not available" in result.stderr
    assert reason in result.stderr
    assert "methods" not in facts(result)


# -- the rest of the command ----------------------------------------------------------------------


def test_help_and_version_need_no_mergekit(lonely: Environment) -> None:
    """``yaml`` is listed, and explained, without importing mergekit."""
    result = must(command(lonely, "--help"))
    listed = [line.split() for line in result.stdout.split("Commands:")[1].splitlines()]
    assert {words[0] for words in listed if words} == {
        "align",
        "barrier",
        "check-architecture",
        "compare",
        "doctor",
        "plan",
        "verify",
        "yaml",
    }
    assert all(len(words) > 3 for words in listed if words)
    assert "0.1" in must(command(lonely, "--version")).stdout
    assert must(lonely.python("-m", "mergekit_rotation", "--help", cwd=lonely.folder)).stdout == (
        result.stdout
    )


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        ("", {"check-architecture", "compare", "doctor", "verify", "yaml"}),
        ("ya", {"yaml"}),
        ("compare a --pl", {"--plot"}),
        ("compare rec", {"rec"}),
        ("verify a b --dtype ", {"float32", "float64"}),
        ("yaml con", {"con"}),
    ],
)
def test_shells_complete_without_mergekit_and_torch(
    words: str, answers: set[str], installed: Environment
) -> None:
    code = (
        "import atexit, sys\n"
        "heavy = {'mergekit', 'torch', 'transformers'}\n"
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules)), file=sys.stderr))\n"
        "from mergekit_rotation.cli import main\n"
        "main(prog_name='mergekit-rotation')\n"
    )
    result = installed.python(
        "-c",
        code,
        cwd=installed.folder,
        _MERGEKIT_ROTATION_COMPLETE="bash_complete",
        COMP_WORDS=f"mergekit-rotation {words}",
        COMP_CWORD=str(words.count(" ") + 1),
    )
    given = {line.split(",")[1] for line in must(result).stdout.splitlines()}
    assert given >= answers if words == "" else given == answers
    assert result.stderr == "[]\n"


def test_shells_complete_the_options_of_mergekit(installed: Environment) -> None:
    variables = {"COMP_WORDS": "mergekit-rotation yaml --lora", "COMP_CWORD": "2"}
    result = command(installed, _MERGEKIT_ROTATION_COMPLETE="bash_complete", **variables)
    assert "plain,--lora-merge-cache" in result.stdout.splitlines()


@pytest.mark.parametrize("name", ["", *main.commands])
def test_help_fits_into_80_columns(name: str) -> None:
    result = CliRunner().invoke(main, [*name.split(), "--help"], terminal_width=80)
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert "\\b" not in result.output and "\b" not in result.output


def test_a_wrong_command_is_refused(lonely: Environment) -> None:
    result = command(lonely, "docter")
    assert result.returncode == 2
    assert "No such command 'docter'" in result.stderr


def test_yaml_without_mergekit_says_what_is_missing(lonely: Environment) -> None:
    result = command(lonely, "yaml", "config.yml", "out")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "mergekit is not installed" in result.stderr


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, the same scrambled, and the configuration of their merge."""
    folder = tmp_path_factory.mktemp("models")
    model = build("llama")
    save(model, folder / "a")
    save(model, folder / "b")
    scrambled = scramble(load_file(folder / "a" / WEIGHTS), model.config, "llama", seed=1)
    save_file(scrambled, folder / "b" / WEIGHTS, metadata={"format": "pt"})
    lines = "merge_method: rotation_linear\ndtype: float32\nmodels:\n"
    for name in "ab":
        lines += f"  - model: {folder / name}\n    parameters: {{weight: 0.5}}\n"
    (folder / "merge.yml").write_text(lines, encoding="utf-8")
    return folder


def test_yaml_is_mergekit_yaml_where_no_hook_runs(installed: Environment, models: Path) -> None:
    """The same options, and a real merge, also where mergekit was imported before us."""
    options = ("--no-copy-tokenizer", "--no-write-model-card")
    early = (
        "import contextlib, io, json, mergekit.merge\n"
        "from mergekit_rotation.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as shown:\n"
        "    main(['yaml', '--help'], standalone_mode=False)\n"
        "from mergekit.scripts import run_yaml\n"
        "flags = [o for p in run_yaml.main.params for o in (*p.opts, *p.secondary_opts)]\n"
        "print(json.dumps([shown.getvalue(), flags]))\n"
    )

    def merge(out: str, first: str = "") -> Result:
        paths = (models / "merge.yml", models / out)
        return without_site(installed, "yaml", *paths, *options, first=first)

    results = together({"merge": lambda: merge("out"), "late": lambda: merge("late", early)})
    for result in results.values():
        assert "aligned " in must(result).stderr

    original = load_file(models / "a" / WEIGHTS)
    merged = load_file(models / "out" / WEIGHTS)
    assert merged.keys() == original.keys()
    assert max(float((merged[name] - original[name]).abs().max()) for name in original) < 1e-5
    assert (models / "out" / "config.json").is_file()
    late = (models / "late" / WEIGHTS).read_bytes()
    assert late == (models / "out" / WEIGHTS).read_bytes()

    shown, names = json.loads(results["late"].stdout.splitlines()[0])
    flags = {name for name in names if name.startswith("-")}
    assert len(flags) > 20
    assert declared(shown) - {"--help"} == flags
