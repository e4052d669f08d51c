"""Imports go one way, only `integration` knows transformers, and the public names are the documented ones."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hf_tiered_cache

PACKAGE = Path(hf_tiered_cache.__file__).parent

# Subpackages, level by level; each imports from strictly lower levels. "" is the package's own `__init__`.
LEVELS = [
    {"core"},
    {"tiers", "transfer", "attention"},
    {"residency", "sequence"},
    {"loading", "planning"},
    {"manager"},
    {"integration"},
    {""},
    {"testing", "bench"},
]
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _subpackage(module: str) -> str:
    return module.partition(".")[0]


def _imports(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, anywhere in it."""
    package = list(path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = ".".join(base + (node.module.split(".") if node.module else []))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            target = (node.module or "").removeprefix(PACKAGE.name).strip(".")
        else:
            continue
        names = {f"{target}.{alias.name}".strip(".") for alias in node.names}
        found |= (names & MODULES.keys()) or {target}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_subpackages_import_from_lower_levels(module: str) -> None:
    own = _subpackage(module)
    assert own in LEVEL_OF, f"{own} has no level yet"
    for imported in map(_subpackage, _imports(MODULES[module])):
        assert imported == own or LEVEL_OF[imported] < LEVEL_OF[own], f"{module} imports {imported}"


@pytest.mark.parametrize("subpackage", sorted(LEVEL_OF.keys() - {""}))
def test_modules_of_a_subpackage_import_one_way(subpackage: str) -> None:
    own = [module for module in MODULES if _subpackage(module) == subpackage]
    graph = {module: {name for name in _imports(MODULES[module]) if name in own} for module in own}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("subpackage", sorted(LEVEL_OF.keys() - {"", "bench", "testing"}))
def test_a_subpackage_says_what_it_imports(subpackage: str) -> None:
    """The docstring of a subpackage names the subpackages that its modules import, and no others."""
    docstring = ast.get_docstring(ast.parse(MODULES[subpackage].read_text())) or ""
    stated, begin, _ = docstring.partition("Imports ")[2].partition("Begin with `")
    own = [path for module, path in MODULES.items() if _subpackage(module) == subpackage]
    imported = {_subpackage(name) for path in own for name in _imports(path)} - {subpackage}
    assert begin and {name for name in LEVEL_OF if f"`{name}`" in stated} == imported


def test_only_integration_knows_transformers() -> None:
    """Only `integration` imports transformers, and `bench`, which compares runs with and without the cache."""
    for module, path in MODULES.items():
        if _subpackage(module) in ("integration", "bench"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "transformers" for name in names), f"{module}: {names}"


def test_no_tier_imports_another() -> None:
    shared = {"tiers", "tiers.base", "tiers.choice", "tiers.io", "tiers.workspace"}
    tiers = {module for module in MODULES if _subpackage(module) == "tiers"} - shared
    assert tiers >= {"tiers.host", "tiers.nvme", "tiers.zarr"}
    for tier in tiers:
        own = {name for name in _imports(MODULES[tier]) if _subpackage(name) == "tiers"}
        assert own <= {"tiers.base", "tiers.io"}, f"{tier} imports {own}"


def test_exported_names_exist_and_are_documented() -> None:
    assert sorted(hf_tiered_cache.__all__) == sorted(set(hf_tiered_cache.__all__))
    for name in hf_tiered_cache.__all__:
        assert getattr(hf_tiered_cache, name).__doc__, f"{name} has no docstring"


def test_modules_are_small() -> None:
    for path in PACKAGE.rglob("*.py"):
        lines = len(path.read_text().splitlines())
        assert lines <= 400, f"{path.name} has {lines} lines: split it by concept"
