"""Models and caches that the benchmarks share."""

from __future__ import annotations

import transformers
from packaging.version import Version

CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"
"""The name under which `forward` and `generate` take a cache; 5.24 renamed it."""
