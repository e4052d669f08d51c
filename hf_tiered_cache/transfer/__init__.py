"""Copies between an accelerator and host memory, and the threads that start them.

Imports `core`. Begin with `engine`, the contract of a copy engine.
"""

from .devices import make_engine
from .engine import CopyEngine, Event
from .staging import StagingPool
from .worker import Task, Worker

__all__ = ["CopyEngine", "Event", "StagingPool", "Task", "Worker", "make_engine"]
