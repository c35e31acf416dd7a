"""A YAML file by its fields, with the lines on which they stand; and what is wrong with one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml  # type: ignore[import-untyped]

Path = tuple[str | int, ...]
_NAMES = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, where, and what to do about it."""

    where: str
    """The field, such as ``provider.head_ip``; empty for the file as a whole."""
    line: int
    """Where it stands, or would stand; 0 for the file as a whole."""
    what: str
    cure: str
    fatal: bool = True
    """Whether there is no use in starting the cluster. If not, it is advice."""

    def __str__(self) -> str:
        place = f"line {self.line}, " if self.line else ""
        return f"{place}{self.where or 'the file'} {self.what}: {self.cure}"


class UnreadableError(Exception):
    """The text is no YAML that could describe a cluster."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Document:
    """What a YAML text holds."""

    def __init__(self, text: str) -> None:
        """Reads the text.

        Raises:
            UnreadableError: It is no YAML, or no mapping of fields.
        """
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            said = getattr(error, "problem", None) or str(error).splitlines()[0]
            line = mark.line + 1 if mark is not None else 0
            problem = Problem("", line, f"is no YAML ({said})", "correct that line, mostly its indentation or quotes")
            raise UnreadableError(problem) from None
        except (ValueError, KeyError, RecursionError) as error:  # such as a date in the 13th month
            said = str(error).splitlines()[0]
            raise UnreadableError(
                Problem("", 0, f"holds what YAML can't read ({said})", "put it into quotes")
            ) from None
        if not isinstance(data, dict):
            cure = "begin with one of examples/cluster, and change the lines marked there"
            raise UnreadableError(Problem("", 1, f"holds {_kind(data)}, not the fields of a cluster", cure))
        _require_plain(node, ())
        self.data: dict[str, Any] = data
        self._root = node

    def get(self, *path: str | int) -> Any:
        """The value of a field, or None."""
        value: Any = self.data
        for step in path:
            if isinstance(step, str) and isinstance(value, Mapping):
                value = value.get(step)
            elif isinstance(step, int) and isinstance(value, list) and step < len(value):
                value = value[step]
            else:
                return None
        return value

    def line(self, *path: str | int) -> int:
        """The line on which a field stands; for one that is missing, that of the nearest one around it."""
        node, line = self._root, 1
        for step in path:
            found = None
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    if key.value == step:
                        found, line = value, key.start_mark.line + 1
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                found = node.value[step]
                line = found.start_mark.line + 1
            if found is None:
                break
            node = found
        return line

    def problem(self, path: Path, what: str, cure: str, *, fatal: bool = True) -> Problem:
        """A problem with a field, with its line."""
        return Problem(name_of(path), self.line(*path), what, cure, fatal)

    def twice(self) -> Iterator[Problem]:
        """Fields that stand there twice: the second one would silently count."""
        yield from self._twice(self._root, ())

    def _twice(self, node: Any, path: Path) -> Iterator[Problem]:
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                here, line = (*path, key.value), key.start_mark.line + 1
                if key.value in seen and key.value != "<<":
                    what = f"stands there twice, on line {seen[key.value]} already"
                    yield Problem(name_of(here), line, what, "keep one of the two")
                seen[key.value] = line
                yield from self._twice(value, here)
        elif isinstance(node, yaml.SequenceNode):
            for place, value in enumerate(node.value):
                yield from self._twice(value, (*path, place))


def _require_plain(node: Any, above: tuple[int, ...]) -> None:
    """That all fields have names, and nothing contains itself: neither is for a cluster, and Ray would not say it."""
    line = node.start_mark.line + 1
    if id(node) in above:
        raise UnreadableError(Problem("", line, "has a part that contains itself", "write it out, without the alias"))
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _require_plain(value, above)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag not in _NAMES:
                said = getattr(key, "value", "") if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
                what = f"has a field without a name: {said or 'nothing'} is no text"
                raise UnreadableError(Problem("", key.start_mark.line + 1, what, "put it into quotes"))
            _require_plain(value, above)


def name_of(path: Path) -> str:
    """A field as one writes it, such as ``spec.workerGroupSpecs[0].groupName``."""
    name = ""
    for step in path:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else step
    return name


def _kind(data: Any) -> str:
    return {type(None): "nothing", list: "a list", str: "a text"}.get(type(data), f"a {type(data).__name__}")
