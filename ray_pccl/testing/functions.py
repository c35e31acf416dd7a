"""Sending functions to peer processes, local ones and lambdas included.

A function that its module has under its name travels as that name, as in `pickle`: the peer imports the module, from
the same ``sys.path``. One that has no such name (a lambda, a function inside a test) travels as its code, with its
defaults and the variables that it closes over; the module's global names are those of the module as the peer imports
it, so what a test changed in them is not seen there. A local function that calls itself can't travel.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import io
import marshal
import pickle
import sys
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

_MAIN_AT_THE_PEER = "__ray_pccl_main__"


def dumps(thing: object) -> bytes:
    """Pickles `thing`, with all the functions in it."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(thing)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """What `dumps` was given, in another process of the same user: the data is trusted."""
    return pickle.loads(data)  # noqa: S301


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, ModuleType):
            return importlib.import_module, (thing.__name__,)
        if not isinstance(thing, FunctionType) or _has_a_name(thing):
            return NotImplemented
        module = sys.modules.get(thing.__module__)
        file = getattr(module, "__file__", None) if _needs_globals(thing) else None
        closure = tuple(cell.cell_contents for cell in thing.__closure__ or ())
        code = marshal.dumps(thing.__code__)
        defaults = (thing.__defaults__, thing.__kwdefaults__)
        return _rebuild, (code, thing.__module__, file, defaults, closure)


def _has_a_name(function: FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function and function.__module__ != "__main__"


def _needs_globals(function: FunctionType) -> bool:
    names = _names(function.__code__)
    return any(name in function.__globals__ for name in names if not name.startswith("@"))


def _names(code: CodeType) -> set[str]:
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, nested))


def _rebuild(
    code_bytes: bytes,
    module: str,
    file: str | None,
    defaults: tuple[tuple[Any, ...] | None, dict[str, Any] | None],
    closure: tuple[Any, ...],
) -> FunctionType:
    code: CodeType = marshal.loads(code_bytes)  # noqa: S302
    names: dict[str, Any] = {"__builtins__": builtins, "__name__": module}
    if file is not None:
        names = _module(module, file).__dict__
    if "@pytest_ar" in _names(code):
        # pytest has rewritten the asserts of this code: they speak through these two names.
        names |= {"@py_builtins": builtins, "@pytest_ar": importlib.import_module("_pytest.assertion.rewrite")}
    function = FunctionType(code, names, code.co_name, defaults[0], tuple(map(CellType, closure)))
    function.__kwdefaults__ = defaults[1]
    return function


def _module(name: str, file: str) -> ModuleType:
    """The module, by its name if it can be found by it, else from its file."""
    if name == "__main__":
        name = _MAIN_AT_THE_PEER
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
