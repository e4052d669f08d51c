"""Imports go one way, and the public names are the documented ones."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hf_tiered_cache

PACKAGE = Path(hf_tiered_cache.__file__).parent

# Each module imports from strictly lower rows; see "Modules" in docs/decisions.md.
ROWS = [
    {"errors", "host_memory", "row_map", "values"},
    {
        "config",
        "continuation",
        "metrics",
        "blocks",
        "heat",
        "registry",
        "tier_io",
        "transfer.worker",
        "streaming_models",
        "stock_layers",
    },
    {"workspace", "locks", "places", "eviction", "geometry", "tiers.base", "transfer.engine"},
    {"replay", "tiers.host", "tiers.nvme", "tiers.zarr", "transfer.staging", "transfer.cuda", "window", "kernels"},
    {"tiers", "layers", "online_attention", "buffers", "pressure", "passes", "transfer.devices"},
    {"garbage", "tier_choice", "requests", "windows", "placement"},
    {"residency"},
    {"mover", "resident"},
    {"writeback"},
    {"lane"},
    {"prefetch", "stream"},
    {"seats"},
    {"resources"},
    {"paths"},
    {"report"},
    {"manager"},
    {"attention", "planner"},
    {"cache_layer"},
    {"rollback"},
    {"cache"},
    {"", "transfer"},
    {"testing.tiers", "testing.eviction"},
    {"testing"},
    {"bench", "bench._models", "bench._traces"},
    {"bench.longcontext", "bench.overhead", "bench.overlap", "bench.policies"},
    {"bench.__main__"},
]
ROW_OF = {module: row for row, modules in enumerate(ROWS) for module in modules}


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, wherever in the file."""
    package = list(path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = ".".join(base + (node.module.split(".") if node.module else []))
            submodules = {f"{target}.{alias.name}".strip(".") for alias in node.names}
            found |= (submodules & set(ROW_OF)) or {target}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_tiered_cache"):
            found.add((node.module or "").removeprefix("hf_tiered_cache").strip("."))
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=_module_name)
def test_imports_go_down(path: Path) -> None:
    module = _module_name(path)
    assert module in ROW_OF, f"{module} has no row yet"
    for imported in _imports(path):
        if imported == "tiers" and module.startswith("tiers."):
            continue
        assert ROW_OF[imported] < ROW_OF[module], f"{module} imports {imported}"


def test_no_tier_imports_another() -> None:
    for path in (PACKAGE / "tiers").glob("*.py"):
        if path.name not in ("__init__.py", "base.py"):
            assert not {name for name in _imports(path) if name.startswith("tiers.")} - {"tiers.base"}


def test_exported_names_exist_and_are_documented() -> None:
    assert sorted(hf_tiered_cache.__all__) == sorted(set(hf_tiered_cache.__all__))
    for name in hf_tiered_cache.__all__:
        assert getattr(hf_tiered_cache, name).__doc__, f"{name} has no docstring"


def test_modules_are_small() -> None:
    for path in PACKAGE.rglob("*.py"):
        lines = len(path.read_text().splitlines())
        assert lines <= 400, f"{path.name} has {lines} lines: split it by concept"
