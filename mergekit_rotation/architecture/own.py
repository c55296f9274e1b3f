"""Families that a user declares, in files of the same format as ours.

Files are read whenever they are asked for and nothing is kept, so that no declaration outlives the
merge that names it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from mergekit_rotation.architecture.family import Family

__all__ = ["VARIABLE", "DeclarationError", "own_families", "read_families", "read_family"]

#: environment variable with files or folders, separated as in PATH
VARIABLE = "MERGEKIT_ROTATION_ARCHITECTURES"


class DeclarationError(ValueError):
    """A file that declares no family; the message names file and field."""


def read_family(file: Path) -> Family:
    """Read the declaration of one family.

    Raises
    ------
    DeclarationError
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise DeclarationError(f"cannot read {file} ({problem})") from problem
    try:
        return Family.model_validate_json(text)
    except ValidationError as problem:
        faults = [
            ": ".join([".".join(map(str, fault["loc"])), fault["msg"]]).removeprefix(": ")
            for fault in problem.errors(include_url=False)
        ]
        raise DeclarationError(f"{file}: {'; '.join(faults)}") from problem


def read_families(path: str) -> dict[Path, Family]:
    """Read a file, or all ``.json`` files of a folder in the order of their names.

    Raises
    ------
    DeclarationError
    """
    place = Path(path).expanduser()
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    if not files:
        raise DeclarationError(f"{place} holds no .json file")
    return {file: read_family(file) for file in files}


def own_families(
    path: str | None, environment: Mapping[str, str] = os.environ
) -> dict[Path, Family]:
    """Return a user's families by file: those of ``path`` first, then those of the environment.

    Raises
    ------
    DeclarationError
        Naming the parameter or variable, the file and the field.
    """
    sources = [("align_architecture", path)] if path else []
    listed = environment.get(VARIABLE, "").split(os.pathsep)
    sources += [(VARIABLE, entry) for entry in listed if entry]
    families: dict[Path, Family] = {}
    for name, entry in sources:
        try:
            families = families | read_families(entry)  # a file named twice keeps its place
        except DeclarationError as problem:
            raise DeclarationError(f"{name}: {problem}") from problem
    return families
