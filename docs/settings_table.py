"""The table of settings in the tuning guide, made from docstrings: ``python docs/settings_table.py`` writes it."""

from __future__ import annotations

import ast
import inspect
import itertools
from dataclasses import fields
from pathlib import Path

from ray_pccl import settings
from ray_pccl.settings import PREFIX, Settings

PAGE = Path(__file__).parent / "guides" / "tuning.md"
BEGIN, END = "<!-- settings: made by docs/settings_table.py -->", "<!-- end of settings -->"


def meanings() -> dict[str, str]:
    """What stands below each setting."""
    tree = ast.parse(inspect.getsource(settings))
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings"]
    found = {}
    for node, following in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            assert isinstance(following.value, ast.Constant)
            found[node.target.id] = " ".join(str(following.value.value).replace("``", "`").split())
    return found


def table() -> str:
    """A line for each setting."""
    said = meanings()
    lines = ["| setting | default | range | whose | meaning |", "|---|---|---|---|---|"]
    for spec in fields(Settings):
        number = bool(spec.metadata)
        default = f"{spec.default:g}" if number else str(spec.default)
        allowed = f"{spec.metadata['low']:g} to {spec.metadata['high']:g}" if number else "True, False"
        whose = "master's" if spec.metadata.get("shared") else "peer's"
        lines.append(f"| `{spec.name}` | {default} | {allowed} | {whose} | {said[spec.name]} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page, with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    variable = f"{PREFIX}HEARTBEAT_TIMEOUT_S"
    assert variable in page, f"the page has to say that heartbeat_timeout_s is {variable}"
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
