"""Benchmarks, run as `python -m hf_tiered_cache.bench NAME`."""
