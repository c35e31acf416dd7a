"""Which names of ours a piece of code, or a sentence, uses that do not exist."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

import master_actor
import ray_pccl
from ray_pccl.testing import Faults, PeerGroup

OURS = ("ray_pccl", "master_actor")
HOLDERS: dict[str, type] = {
    "comm": ray_pccl.Communicator,
    "communicator": ray_pccl.Communicator,
    "group": ray_pccl.Group,
    "state": ray_pccl.SharedState,
    "handle": ray_pccl.Handle,
    "info": ray_pccl.ReduceInfo,
    "faults": Faults,
    "peers": PeerGroup,
}
"""What a variable of this name holds wherever it is written in the documentation, unless the code makes it itself."""
MISSING = object()


@cache
def attributes(cls: type) -> frozenset[str]:
    """What an instance has: of its class, and what its methods set."""
    found = set(dir(cls))
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in OURS:
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.add(node.target.id)
    return frozenset(found)


def look_up(base: Any, name: str) -> Any:
    """An attribute of a module or a class, `MISSING` if there is none; None where nothing is known of its type."""
    if inspect.ismodule(base):
        try:
            return getattr(base, name)
        except AttributeError:
            try:
                return importlib.import_module(f"{base.__name__}.{name}")
            except ImportError:
                return MISSING
    if inspect.isclass(base) and base.__module__.partition(".")[0] in OURS:
        return inspect.getattr_static(base, name, None) if name in attributes(base) else MISSING
    return None


class Reader:
    """Goes through one piece of code, with what is known from those before it on the same page."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def unknown(self, code: str) -> list[str]:
        """What the code names of ours that is not there; a keyword is written ``function(keyword=)``."""
        tree = ast.parse(code)
        made = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        made -= {"comm", "communicator"}
        for name, cls in HOLDERS.items():
            self.known.setdefault(name, cls)
        for name in made:
            self.known.pop(name, None)
        return [*self._imports(tree), *self._uses(tree)]

    def _imports(self, tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] in OURS:
                        module = importlib.import_module(alias.name)
                        top = importlib.import_module(alias.name.partition(".")[0])
                        self.known[alias.asname or top.__name__] = module if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    found = look_up(module, alias.name)
                    if found is MISSING:
                        yield f"{node.module}.{alias.name}"
                    self.known[alias.asname or alias.name] = found

    def _uses(self, tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and self._resolve(node) is MISSING:
                yield ast.unparse(node)
            if isinstance(node, ast.Call):
                function = self._resolve(node.func)
                for keyword in node.keywords:
                    if keyword.arg is not None and not _takes(function, keyword.arg):
                        yield f"{ast.unparse(node.func)}({keyword.arg}=)"

    def _resolve(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._resolve(node.value)
            return look_up(base, node.attr) if base is not None and base is not MISSING else None
        return None


def _takes(function: Any, keyword: str) -> bool:
    if isinstance(function, classmethod | staticmethod):
        function = function.__func__
    ours = getattr(function, "__module__", "") or ""
    if not callable(function) or ours.partition(".")[0] not in OURS:
        return True
    parameters = inspect.signature(function).parameters.values()
    return any(each.name == keyword or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def unknown_in_prose(words: str) -> list[str]:
    """The same for something that stands as code in a sentence, if it is a name or a call."""
    try:
        tree = ast.parse(words.replace("(...)", "()"), mode="eval")
    except SyntaxError:
        return []
    root = tree.body
    while isinstance(root, ast.Attribute | ast.Call):
        root = root.value if isinstance(root, ast.Attribute) else root.func
    if not isinstance(root, ast.Name):
        return []
    if root.id.endswith("Error") and not hasattr(ray_pccl, root.id) and not hasattr(builtins, root.id):
        return [] if root.id in ELSEWHERE else [root.id]
    reader = Reader()
    public = {name: getattr(ray_pccl, name) for name in ray_pccl.__all__ if name != "barrier"}
    reader.known = {**HOLDERS, **public, "ray_pccl": ray_pccl, "master_actor": master_actor}
    return [*reader._uses(tree)]


ELSEWHERE = {"ActorDiedError", "PeerProcessEndedError", "ActorLostError"}
"""Errors of Ray's, and of modules that have a page of their own."""
