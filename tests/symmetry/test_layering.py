"""Dependencies point one way: symmetry <- architecture <- graph <- insight <- command line."""

import ast
import re
import sys
from pathlib import Path

import pytest

import mergekit_rotation
from mergekit_rotation.architecture import all_families, supported

PACKAGE = mergekit_rotation.__name__
ROOT = Path(mergekit_rotation.__file__).parent
MODULES = {
    ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(ROOT.rglob("*.py"))
}

#: what a part may import besides the standard library and itself; None: whatever is installed
ALLOWED = {
    "symmetry": {"torch", "scipy"},
    "architecture": {"pydantic", f"{PACKAGE}.symmetry"},
    "proof": {"torch", "transformers", f"{PACKAGE}.symmetry", f"{PACKAGE}.architecture"},
    "graph": {None, f"{PACKAGE}.symmetry", f"{PACKAGE}.architecture"},
    "insight": {
        None,
        f"{PACKAGE}.startup",
        f"{PACKAGE}.symmetry",
        f"{PACKAGE}.architecture",
        f"{PACKAGE}.graph",
        f"{PACKAGE}.proof",
    },
    "startup": {f"{PACKAGE}.graph.seams"},
    "cli": {None, PACKAGE},
    "__main__": {f"{PACKAGE}.cli"},
    PACKAGE: set(),
}
MAY_IMPORT_MERGEKIT = {"graph", "insight", "cli"}


def part(module: str) -> str:
    """Top-level part of the package that a module belongs to."""
    return module.split(".")[1] if "." in module else module


def imports(path: Path) -> set[tuple[str, bool]]:
    """Everything a file imports, and whether a function does so when it is called."""
    found = set()

    def visit(node: ast.AST, lazily: bool) -> None:
        if isinstance(node, ast.Import):
            found.update((alias.name, lazily) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.update((f"{node.module}.{alias.name}", lazily) for alias in node.names)
        inside = lazily or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_every_part_has_a_rule():
    assert {part(module) for module in MODULES} == set(ALLOWED)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    here = part(module)
    allowed = ALLOWED[here]
    own = module if here == PACKAGE else f"{PACKAGE}.{here}"
    for name, _ in imports(MODULES[module]):
        installed = None in allowed and not within(name, PACKAGE)
        standard = name.split(".")[0] in sys.stdlib_module_names
        known = any(within(name, package) for package in {own, *allowed} - {None})
        assert installed or standard or known, f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_mergekit_is_imported_by_graph_and_command_line_alone(module):
    if part(module) not in MAY_IMPORT_MERGEKIT:
        assert not any(within(name, "mergekit") for name, _ in imports(MODULES[module]))


def test_start_up_and_command_line_import_nothing_heavy_until_it_is_asked_for():
    eager = {name for name, lazily in imports(MODULES[f"{PACKAGE}.startup"]) if not lazily}
    assert {name.split(".")[0] for name in eager} <= sys.stdlib_module_names
    eager = {name for name, lazily in imports(MODULES[f"{PACKAGE}.cli"]) if not lazily}
    assert not {name.split(".")[0] for name in eager} & {"mergekit", "torch", "transformers"}
    assert not imports(MODULES[PACKAGE])


@pytest.mark.parametrize("module", [m for m in MODULES if part(m) == "symmetry"])
def test_symmetry_names_no_family(module):
    words = set(re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)*", MODULES[module].read_text("utf-8").lower()))
    models = {model_type for family in all_families() for model_type in family.models}
    assert supported() and not words & (models | set(supported()))


def test_the_reader_of_imports_sees_all_of_them(tmp_path):
    """Negative control: imports at the top, under conditions and in functions."""
    source = tmp_path / "module.py"
    source.write_text(
        "import a.b\nfrom c import d as e\nif a:\n    import f\n"
        "class X:\n    import g\n    def y(self):\n        from h import i\n"
    )
    eager, lazy = {"a.b", "c.d", "f", "g"}, {"h.i"}
    assert imports(source) == {(n, False) for n in eager} | {(n, True) for n in lazy}
