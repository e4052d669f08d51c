"""Exact attention over keys and values that arrive in splits, without transformers.

Imports `core`. Begin with `online`.
"""

from .online import AttentionRule, OnlineAttention

__all__ = ["AttentionRule", "OnlineAttention"]
