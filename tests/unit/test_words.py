"""Each concept has one name, and docstrings state what something does, returns or is."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = [path for top in ("hf_tiered_cache", "tests", "examples") for path in sorted((ROOT / top).rglob("*.py"))]
TEXTS = [
    *PYTHON,
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "notebooks").rglob("*.ipynb")),
    ROOT / "README.md",
]

# Former words, and their replacements.
FORMER = {
    r"\bSeats?\b|\b_?seats?\b|\bsits\b": "ReaderLease, ReaderPool",
    r"\bBlockStream\b|\bblock_stream\b": "BlockReader",
    r"\bLanes?\b|\b_?lanes?\b": "DevicePipeline",
    r"\bPlaces\(|\bclass Places\b|\bat[ _]rest\b": "BlockLocations; idle",
    r"\blocations?\.(enter|leave)\(": "register, unregister",
    r"\b(blocks?|slots?|tokens?|values)( that)? lives?\b": "stored, allocated",
    r"\bDataPaths\b|\b_paths\b": "LayerOperations",
    r"\bPlacement\b|\bcompact\(": "Scatter, packed_offsets",
    r"\bclass Residency\b|[:(] ?Residency[,)]|\bResidency\.|\bResidentPool\b": "ResidencyTable, DevicePool",
    r"\bRequestBook\b|\b_book\b": "RequestTable",
    r"\bsank\b|\brose\b|\bblocks? sinks?\b": "demoted, promoted",
    r"\bpart by part\b": "split by split, streaming",
    r"\bclass Part\b|\bPart\(|\b_parts\(|\.parts\(": "Split, splits",
    r"\b(gather|streaming) form\b": "gathered attention, streaming attention",
    r"(?i)\b_?let(s|ting)?[ _]go\b": "evict, release, free",
    r"(?i)\bkinds? of models?\b": "architectures",
    # Columns and attributes of a tier; `prefetch_hits` and the hits of a replay are other counts.
    r"TierStats\.(bytes|hits)\b|\btier\.(bytes|hits)\b|\btiers\[.*\]\.(bytes|hits)\b": "used_bytes, blocks_served",
    r"[\"'](held|hits)[\"']|\bblocks {2,}held\b|\bread {2,}hits\b": "used, served",
    r"\bhits (of|per) (a |each )?tiers?\b": "blocks served",
}

# Lines that use such a word for something else.
ALLOWED = {
    "head, lane = torch.arange(heads)": "an index into the data of a test",
    "(2 * lane + 3) + 977 * row": "the same",
    "# The topics of Python's language reference": "prose",
    '_warn_of_old_name("TierStats.': "deprecated names that warn for one release",
    '(("old", "new"), [("bytes", "used_bytes"), ("hits", "blocks_served")])': "the test of that warning",
}

_QUESTIONS = re.compile(r"(Whether|How|What|Where|Which|When|Those|Whose|Who|Why|Nobody)\b")


@cache
def _lines() -> list[tuple[str, str]]:
    """Return each line of the texts, after its file and number."""
    return [
        (f"{path.relative_to(ROOT)}:{number}", line.strip())
        for path in TEXTS
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]


@pytest.mark.parametrize("pattern", FORMER)
def test_former_words_are_gone(pattern: str) -> None:
    found = [
        f"{where}: {line}"
        for where, line in _lines()
        if re.search(pattern, line) and not any(allowed in line for allowed in ALLOWED)
    ]
    assert not found, f"say {FORMER[pattern]}:\n" + "\n".join(found)


def _docstrings(path: Path) -> list[str]:
    """Return all docstrings, those of attributes included."""
    return [
        node.value.value.strip()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def test_docstrings_are_not_questions() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {docstring[:80]}"
        for path in PYTHON
        for docstring in _docstrings(path)
        if _QUESTIONS.match(docstring)
    ]
    assert not found, "\n".join(found)


def test_every_exception_is_used() -> None:
    assert not [allowed for allowed in ALLOWED if not any(allowed in line for _, line in _lines())]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    paths = re.findall(r"`((?:hf_tiered_cache|tests|examples|docs)/[\w/.]+)`", page.read_text())
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not [path for path in paths if not (ROOT / path).exists()]
