"""Ctrl-C after a delay."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType


class CtrlC:
    """One SIGINT for this process, some time after `begin`; made on the main thread, which it interrupts.

    The sending thread exists before `begin`: starting a thread may itself be interrupted.
    """

    def __init__(self, delay_seconds: float) -> None:
        self.has_struck = False
        self._delay_seconds = delay_seconds
        self._not_begun = threading.Lock()
        self._not_begun.acquire()
        signal.signal(signal.SIGINT, self._handle)
        threading.Thread(target=self._send, daemon=True).start()

    def begin(self) -> None:
        """Start the delay."""
        self._not_begun.release()

    def _send(self) -> None:
        with self._not_begun:
            time.sleep(self._delay_seconds)
            os.kill(os.getpid(), signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.has_struck = True
        raise KeyboardInterrupt
