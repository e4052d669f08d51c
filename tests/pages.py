"""Code blocks in pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path


def code_blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)
