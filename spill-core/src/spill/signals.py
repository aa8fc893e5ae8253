"""Stop requests: handlers that only set a flag, a `tick` that raises, and a watchdog that bounds the wait. Light."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from spill.errors import HeldError, Stopped

# SIGHUP: the terminal was closed.
EXIT_CODES = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGINT: 130}
GRACE_SECONDS = 15.0
SAVING_SECONDS = 300.0  # as long as a store is given to answer


class StopRequest:
    """Whether somebody asked this process to stop. Installed first thing; asked at every tick."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.saves = ""  # what is being saved, and what a kill now would lose; said when a stop is asked for meanwhile
        self._fenced = ""
        self._ticked: float | None = None
        # The two longest times from one tick to the next. The smaller is what a stop may have to wait for: a single one
        # may come from loading, or from a process that was put to sleep.
        self._gaps = [0.0, 0.0]
        self._held = 0
        self._bell = -1  # where the handler wakes the watchdog
        self._at_once = False

    def install(self) -> None:
        """Set the handlers, except for a SIGHUP that `nohup` had ignored. The watchdog starts now, since a handler may
        interrupt whatever starts a thread."""
        ears, self._bell = os.pipe()
        threading.Thread(target=self._watch, args=(ears,), name="watchdog", daemon=True).start()
        for number in EXIT_CODES:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def leave_at_once(self) -> None:
        """From now on a signal ends the process where it is: a prompt holds no state, and may wait for days."""
        self._at_once = True

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.asked] if self.asked else 0

    def fence(self, message: str) -> None:
        """Somebody else took the state over: the next tick raises HeldError. Called from another thread."""
        self._fenced = message

    def tick(self) -> None:
        """Raises Stopped once a stop was asked for, except while something is being saved.

        Raises:
            HeldError: the state was taken over; nothing can be saved any more.
            Stopped: a signal asked for a stop.
        """
        self._measure()
        if self._fenced:
            raise HeldError(self._fenced)
        if self.asked and not self._held:
            raise Stopped(f"stopped by {self.asked.name}", self.exit_code)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within it `tick` does not raise, so that a commit is finished once it is begun."""
        self._measure()
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self._ticked = time.monotonic()
            self.saves = ""

    def _measure(self) -> None:
        now = time.monotonic()
        if self._ticked is not None:
            self._gaps = sorted((*self._gaps, now - self._ticked))[1:]
        self._ticked = now

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._at_once:
            _leave("stopped; there was nothing to save", EXIT_CODES[signal.Signals(number)])
        if self.asked:
            if number == signal.SIGINT:
                _leave("stopped at once; the last commit stands", EXIT_CODES[signal.SIGINT])
            return
        self.asked = signal.Signals(number)
        os.write(self._bell, b"!")

    def _watch(self, ears: int) -> None:
        os.read(ears, 1)
        saves = self.saves
        if self._held and saves and self.asked:
            _tell(f"stopping by {self.asked.name}: {saves}")
        time.sleep(max(GRACE_SECONDS, self._gaps[0]))
        if self._held:
            # A slow store is still taking the commit: cutting it short would lose what it is there to keep.
            time.sleep(SAVING_SECONDS)
            _leave("the store took too long; the last commit stands", self.exit_code)
        _leave("no place to stop was reached in time; the last commit stands", self.exit_code)


def _tell(text: str) -> None:
    # Not through sys.stderr: it refuses to be entered again by a handler that interrupted a write.
    os.write(2, f"{chr(10) if os.isatty(2) else ''}spill: {text}\n".encode())


def _leave(text: str, code: int) -> None:
    _tell(text)
    os._exit(code)
