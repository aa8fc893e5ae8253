"""Every error spill raises on purpose, each with the exit code that the command line gives it."""

from collections.abc import Sequence


class SpillError(Exception):
    """Base of all. `message` is one line: what was asked, what was found, what to do next.

    `details` are further lines (one per bad row, one per changed key), printed below the message.
    """

    exit_code = 1

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.details = tuple(details)


class InputError(SpillError, ValueError):
    """The folder, a setting, or a file of it cannot be used as it is."""


class ModelError(SpillError):
    """The student cannot be found, fetched, read, or is of a kind that is not supported."""


class PluginError(SpillError):
    """A plugin is missing, broken, of a contract that is not spoken, or claims a name twice."""


class StoreError(SpillError, OSError):
    """A store refused or failed: no right, no room, no network. Never raised for plain absence."""


class StateError(SpillError):
    """The state cannot be used: damaged beyond the kept commits, of a newer format, or not a state."""


class PlanError(SpillError):
    """What is asked now differs from what the state was built with."""


class NumericsError(SpillError, ArithmeticError):
    """A loss or gradient is not finite, or a handover check found another function."""


class HeldError(SpillError):
    """Another run holds the state, or took it over while this one worked."""

    exit_code = 76


class Stopped(SpillError):
    """Raised by `tick` when a signal asked for a stop; the runner commits, then leaves with `exit_code`."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
