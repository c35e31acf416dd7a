"""What goes wrong on the command line and nowhere else."""

from __future__ import annotations

from ray_pccl.errors import PCCLError


class NoClusterError(PCCLError):
    """No Ray cluster answers at the address."""


class NotFoundError(PCCLError):
    """There is no such peer or group, or more than one that is meant; ``candidates`` names those there are."""

    candidates: tuple[str, ...]


class NotInTimeError(PCCLError, TimeoutError):
    """What a command was told to wait for did not come in time."""


class WrongResultError(PCCLError):
    """A collective came back with other numbers than it should have."""
