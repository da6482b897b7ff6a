"""What can go wrong on this machine, with a number, a way out and an exit status.

The message says what happened and why; `hint` says what to do next. Class docstrings are the user's message
when none is given. Refuses to describe faults of peers: those are `protocol.errors`.
"""

from typing import ClassVar

EXIT_OWN = 125
"""Exit status of gpunode's own failures, as docker has it; a job's own status passes through unchanged."""


class NodeError(Exception):
    """Something went wrong on this machine."""

    code: ClassVar[int] = 2000
    exit_status: ClassVar[int] = EXIT_OWN

    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(message or (self.__doc__ or "").strip())
        self.hint = hint


class SwarmError(NodeError):
    """The peer could not be reached."""

    code: ClassVar[int] = 2100


class PeerRefused(SwarmError):
    """The peer answered, and said no."""

    code: ClassVar[int] = 2101


class TunnelError(NodeError):
    """The tunnel failed."""

    code: ClassVar[int] = 2200


class TunnelClosed(TunnelError):
    """The tunnel was closed."""

    code: ClassVar[int] = 2201


class JobError(NodeError):
    """The job could not be run."""

    code: ClassVar[int] = 2300


class StagingError(JobError):
    """The job's files could not be read or written."""

    code: ClassVar[int] = 2301


class DiskFull(JobError):
    """There is no room left on the disk."""

    code: ClassVar[int] = 2302


class NotFound(JobError):
    """There is no such thing here."""

    code: ClassVar[int] = 2303


class NoMatch(JobError):
    """No offer matches the requirement."""

    code: ClassVar[int] = 2304


class SandboxError(NodeError):
    """The sandbox could not be started."""

    code: ClassVar[int] = 2400


class TierUnavailable(SandboxError):
    """This machine cannot run that isolation tier."""

    code: ClassVar[int] = 2401


class StoreError(NodeError):
    """The database could not be read or written."""

    code: ClassVar[int] = 2500


class KeyFileError(StoreError):
    """The key file is missing, readable by others, or on a network file system."""

    code: ClassVar[int] = 2501


class DeviceError(NodeError):
    """The device could not be used."""

    code: ClassVar[int] = 2600


class DeviceBusy(DeviceError):
    """The device is in use, or another daemon holds it."""

    code: ClassVar[int] = 2601


class ConfigError(NodeError):
    """The configuration is wrong."""

    code: ClassVar[int] = 2700


class LedgerError(NodeError):
    """The books do not allow that."""

    code: ClassVar[int] = 2800


class CreditExceeded(LedgerError):
    """There is not enough credit left."""

    code: ClassVar[int] = 2801


class RpcError(NodeError):
    """The daemon could not be asked."""

    code: ClassVar[int] = 2900


class DaemonUnreachable(RpcError):
    """No daemon answers at the socket."""

    code: ClassVar[int] = 2901


class Forbidden(RpcError):
    """The caller may not do that."""

    code: ClassVar[int] = 2902


class BadArgument(RpcError):
    """An argument is wrong."""

    code: ClassVar[int] = 2903
