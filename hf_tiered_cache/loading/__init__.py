"""Brings sealed blocks back to the accelerator, ahead of the attention that reads them.

Imports `core`, `transfer`, `residency` and `sequence`. Begin with `pipeline`.
"""

from .pipeline import DevicePipeline
from .prefetch import Prefetcher
from .reader_pool import ReaderLease, ReaderPool

__all__ = ["DevicePipeline", "Prefetcher", "ReaderLease", "ReaderPool"]
