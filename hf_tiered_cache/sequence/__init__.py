"""The state of one request: its layers, each with a window on the accelerator and a table of sealed blocks.

Imports `core` and `transfer`. Begin with `layer_state`.
"""

from .layer_state import LayerState
from .requests import Request
from .window import WindowBuffer

__all__ = ["LayerState", "Request", "WindowBuffer"]
