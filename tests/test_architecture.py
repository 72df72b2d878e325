"""The layout of the code: which package may import which, how long files and classes get, what starting up costs.

docs/architecture.md describes the layers; LAYERS is where they are written down for the machine.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT

# From the bottom to the top: a module imports from layers below its own, or from its own package. Packages and files in
# one layer do not import each other.
LAYERS = (
    ("utils",),
    ("atomic_files", "private_apis"),
    ("losses",),
    ("data", "preference_datasets"),
    ("settings",),
    ("report",),
    ("checkpoint",),
    ("modeling",),
    ("parallel",),
    ("planning",),
    ("training",),
    ("trainers",),
    ("train",),
    ("evaluate",),
)
# preference_datasets.py is part of the data layer: the two import each other's modules, without cycles.
TOGETHER = ({"data", "preference_datasets"},)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
MAX_FILE_LINES, MAX_CLASS_LINES, MAX_TOP_LEVEL_MODULES = 450, 250, 8


def python_files() -> list[Path]:
    """All our modules: at the top and in packages, without tests, scripts and benchmarks."""
    top = sorted(ROOT.glob("*.py"))
    packages = [folder for folder in sorted(ROOT.iterdir()) if (folder / "__init__.py").is_file()]
    inner = [path for folder in packages for path in sorted(folder.rglob("*.py"))]
    return top + [path for path in inner if path.relative_to(ROOT).parts[0] not in ("tests", "benchmarks")]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in python_files()}


@cache
def imports_of(module: str) -> dict[str, tuple[int, bool]]:
    """Our modules that `module` imports anywhere, also inside functions: {name: (line, at the top of the file)}."""
    path = MODULES[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    type_checking = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found: dict[str, tuple[int, bool]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            # `from package import x` imports the module package.x if there is one, else the package itself.
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names]
        else:
            continue
        at_top = id(node) not in inside_functions and id(node) not in type_checking
        for name in names:
            if name in MODULES and name != module:
                line, top = found.get(name, (node.lineno, False))
                found[name] = (line, top or at_top)
    return found


def room(module: str) -> str:
    return module.split(".")[0]


def may_import(importer: str, imported: str) -> bool:
    one, other = room(importer), room(imported)
    return one == other or {one, other} in TOGETHER or LEVEL[other] < LEVEL[one]


def test_every_module_has_a_place():
    assert {room(module) for module in MODULES} <= LEVEL.keys(), (
        "add the new one to LAYERS, and to docs/architecture.md"
    )


def test_imports_go_downward():
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {name}, which lies above {room(module)}"
        for module in MODULES
        for name, (line, _) in imports_of(module).items()
        if not may_import(module, name)
    ]
    assert not wrong, "\n".join(wrong)


def test_utils_imports_nothing_of_ours():
    assert not imports_of("utils")


def test_no_cycles():
    """Between modules, whether the import stands at the top of a file or in a function."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            pytest.fail("a cycle: " + " -> ".join([*path[path.index(module) :], module]))
        if module not in done:
            for name in imports_of(module):
                visit(name, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_files_and_classes_stay_short():
    wrong = []
    for path in [
        *MODULES.values(),
        *sorted((ROOT / "benchmarks").glob("*.py")),
        *sorted(ROOT.glob("examples/**/*.py")),
    ]:
        text = path.read_text(encoding="utf-8")
        name, lines = path.relative_to(ROOT), len(text.splitlines())
        if lines > MAX_FILE_LINES:
            wrong.append(f"{name} has {lines} lines, more than {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and (length := node.end_lineno - node.lineno + 1) > MAX_CLASS_LINES:
                wrong.append(f"{name}: class {node.name} has {length} lines, more than {MAX_CLASS_LINES}")
    assert not wrong, "\n".join(wrong)


def test_the_drawing_in_the_documents_is_right():
    """Its arrows are the imports between rooms, left out where other arrows lead to the same room."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = {(one, other) for one, other in re.findall(r"^\s*(\w+) --> (\w+)$", text, re.MULTILINE)}
    one_name = {"preference_datasets": "data"}
    imported = {
        (one_name.get(room(module), room(module)), one_name.get(room(name), room(name)))
        for module in MODULES
        for name in imports_of(module)
    }
    imported = {(one, other) for one, other in imported if one != other}
    assert reached(drawn) == reached(imported), sorted(reached(drawn) ^ reached(imported))
    for arrow in drawn:
        assert arrow in imported and arrow not in reached(drawn - {arrow}), f"{arrow}: not an import, or drawn twice"


def reached(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows, and those that they make one after another."""
    found = set(arrows)
    while more := {(one, last) for one, middle in found for start, last in found if middle == start} - found:
        found |= more
    return found


def test_few_modules_lie_at_the_top():
    assert len(list(ROOT.glob("*.py"))) <= MAX_TOP_LEVEL_MODULES


@pytest.mark.parametrize("module", ["train", "settings"])
def test_starting_up_imports_no_torch(module):
    """A mistake on the command line is answered within a second; loading torch takes several."""
    code = f"import sys, {module}; print(*sorted({{'torch', 'transformers', 'datasets', 'wandb'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
