"""The errors of `ray_pccl`, each as one that is a `RuntimeError`, too.

`ray.util.collective` reports what goes wrong between processes as `RuntimeError`, and programs that were written for it
catch that. So each error that leaves `ray_pccl.util.collective` is both: `PeerLostError` is raised as
`PeerLostRuntimeError`, which either ``except`` catches. They have the same attributes, and pickle.
"""

from __future__ import annotations

from ray_pccl import errors
from ray_pccl.errors import PCCLError


def _with_runtime_error(cls: type[PCCLError]) -> type[PCCLError]:
    # Not the same name: `errors.error_named` finds classes by it.
    name = cls.__name__.removesuffix("Error") + "RuntimeError"
    return type(name, (cls, RuntimeError), {"__module__": __name__, "__doc__": cls.__doc__})


_BOTH: dict[type[PCCLError], type[PCCLError]] = {
    cls: _with_runtime_error(cls)
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, PCCLError)
}
globals().update({cls.__name__: cls for cls in _BOTH.values()})  # so that they pickle


def as_runtime_error(error: PCCLError) -> PCCLError:
    """The same error as one that is a `RuntimeError`."""
    if isinstance(error, RuntimeError):
        return error
    known = next(cls for cls in type(error).__mro__ if cls in _BOTH)
    return _BOTH[known](str(error), **error.details)
