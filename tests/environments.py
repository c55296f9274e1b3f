"""Virtual environments for tests of installing the package and of what Python does at start-up.

Nothing here touches the environment that runs the tests: the package is built from a copy of the
source tree and installed into fresh environments. torch, mergekit and the rest are not installed
again: a ``.pth`` file, which adds folders but does not run the ``.pth`` files in them, lends the
running environment's to a fresh one. No index and no network is needed.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "mergekit_rotation.pth",
    "mergekit_rotation.start",
    "mergekit_rotation",
)

Result = subprocess.CompletedProcess[str]


def environ(**more: str) -> dict[str, str]:
    """The environment of every subprocess: offline, one thread, none of the caller's settings."""
    foreign = ("PIP_", "UV_", "PYTHON", "MERGEKIT_ROTATION", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    fixed = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INDEX": "1",
        "UV_NO_CONFIG": "1",
        "UV_OFFLINE": "1",
    }
    return {**kept, **fixed, **more}


def run(command: Sequence[str | Path], *, cwd: Path | None = None, **variables: str) -> Result:
    """Run a command and return its output and exit code, whatever that is."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environ(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def must(result: Result) -> Result:
    """Insist that a command succeeded, showing what it said if not."""
    assert result.returncode == 0, f"{result.args}\n{result.stdout}\n{result.stderr}"
    return result


def together(jobs: dict[str, Callable[[], Result]]) -> dict[str, Result]:
    """Run commands two at a time; importing mergekit takes many seconds on one core."""
    with ThreadPoolExecutor(2) as pool:
        futures = {name: pool.submit(job) for name, job in jobs.items()}
        return {name: future.result() for name, future in futures.items()}


def lent() -> list[Path]:
    """Folders of the running environment with mergekit, torch, the build backend and the rest."""
    folders = set()
    for name in ("mergekit", "torch", "transformers", "click", "hatchling", "editables"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, f"the tests need {name}"
        folders.add(Path(spec.origin).parents[1])
        folders.add(Path(str(metadata.distribution(name).locate_file(""))).resolve())
    return sorted(folders)


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own."""

    folder: Path
    site: Path

    @staticmethod
    def create(folder: Path, *, pip: bool = False, lend: bool = True) -> "Environment":
        """A fresh one, with mergekit lent to it or not."""
        must(run([sys.executable, "-m", "venv", *([] if pip else ["--without-pip"]), folder]))
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(must(run([_python(folder), "-c", where])).stdout.strip())
        assert folder in site.parents
        if lend:
            lines = "".join(f"{path}\n" for path in lent())
            (site / "lent.pth").write_text(lines, encoding="utf-8")
        return Environment(folder, site)

    @property
    def command(self) -> Path:
        """The console script of the package."""
        suffix = ".exe" if os.name == "nt" else ""
        return _python(self.folder).with_name("mergekit-rotation" + suffix)

    def python(self, *arguments: str | Path, **more: Any) -> Result:
        """Run this environment's Python."""
        return run([_python(self.folder), *arguments], **more)

    def uv(self, *arguments: str | Path) -> Result:
        """Run ``uv pip`` of the running environment on this environment."""
        verb, *rest = arguments
        cache = str(self.folder.with_name(self.folder.name + "-uv-cache"))
        command = [sys.executable, "-m", "uv", "pip", verb, "--python", _python(self.folder)]
        return run([*command, *rest], UV_CACHE_DIR=cache)

    def pip(self, *arguments: str | Path) -> Result:
        """Run this environment's own pip."""
        return self.python("-m", "pip", *arguments)

    def ours(self) -> list[str]:
        """Everything of the package in site-packages, caches included."""
        return sorted(
            str(path.relative_to(self.site))
            for path in self.site.rglob("*")
            if "mergekit_rotation" in path.relative_to(self.site).as_posix().replace("-", "_")
        )


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def copy_source(folder: Path) -> Path:
    """A copy of what is needed to build the package."""
    folder.mkdir()
    for name in SOURCES:
        if (REPOSITORY / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
        else:
            shutil.copy2(REPOSITORY / name, folder / name)
    return folder


def build_wheel(source: Path) -> Path:
    """Build a wheel from a copy of the source tree."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    must(run([*build, "--outdir", source / "dist", source]))
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


def install_wheel(folder: Path, wheel: Path, *, lend: bool = True) -> Environment:
    """A fresh environment with the package, without pip."""
    environment = Environment.create(folder, lend=lend)
    must(environment.uv("install", "--no-deps", wheel))
    return environment


def other_mergekit(
    folder: Path,
    files: Mapping[str, str | None],
    *,
    version: str | None = "9.9",
    rest: bool = False,
) -> Path:
    """A folder for PYTHONPATH with a mergekit of the given files, which shadows the real one.

    None stands for no such file; with ``rest`` every other module is the real one.
    """
    package = folder / "mergekit"
    package.mkdir(parents=True)
    if rest:
        real = importlib.util.find_spec("mergekit")
        assert real is not None and real.origin is not None
        for path in Path(real.origin).parent.iterdir():
            if path.name != "__pycache__" and path.name not in files:
                (package / path.name).symlink_to(path)
    else:
        (package / "__init__.py").touch()
    for name, text in files.items():
        if text is None:
            continue
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    if version is not None:
        information = folder / f"mergekit-{version}.dist-info"
        information.mkdir()
        lines = f"Metadata-Version: 2.1\nName: mergekit\nVersion: {version}\n"
        (information / "METADATA").write_text(lines, encoding="utf-8")
    return folder
