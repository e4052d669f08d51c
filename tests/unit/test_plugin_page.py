"""The programs of docs/plugins.md run, and keep the rules on that page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_tiered_cache.residency.eviction import EVICTIONS
from hf_tiered_cache.tiers import TierRegistry

from ..pages import code_blocks

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"


def test_the_page_as_a_test_module(tmp_path: Path) -> None:
    """All code of the page runs in order as one module, in which pytest runs the suites."""
    module = tmp_path / "test_page.py"
    module.write_text("\n\n".join(code_blocks(PAGE, "python")))
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null"]
    package = Path(sys.modules["hf_tiered_cache"].__file__ or "").parents[1]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(module)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(package), "PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed and int(passed[1]) >= 20
    assert (tmp_path / "kv.db").exists(), "the URL was used"


def test_the_groups_of_entry_points() -> None:
    (document,) = code_blocks(PAGE, "toml")
    assert re.findall(r'entry-points\."(.*?)"', document) == [TierRegistry._group, EVICTIONS._group]


def test_the_package_needs_no_pytest() -> None:
    code = "import hf_tiered_cache, sys; sys.exit('pytest' in sys.modules or 'hypothesis' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_suites_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    import hf_tiered_cache.testing as suites

    with pytest.raises(AttributeError, match="no attribute 'Contract'"):
        suites.Contract  # noqa: B018
