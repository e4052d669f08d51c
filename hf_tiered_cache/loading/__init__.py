"""Brings sealed blocks back to the accelerator, ahead of the attention that reads them.

Imports `core`, `transfer`, `residency` and `sequence`. Begin with `pipeline`.
"""
