"""A hook of mkdocs: a public name that stands as code in a page or a docstring links to its place in the reference.

`PeerLostError`, ``ray_pccl.empty``, ``Communicator.topology()`` and ``comm.topology()`` all do. What stands in a
heading, in a link or in a block of code is left alone.
"""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache
from typing import Any

import ray_pccl
from ray_pccl.peer.collectives import Collectives

HOLDERS = {
    "comm": "Communicator",
    "group": "Group",
    "state": "SharedState",
    "info": "ReduceInfo",
    "faults": "Faults",
}
"""What the variables of our examples hold."""
_UNTOUCHED = re.compile(r"(<(?P<tag>a|b|pre|h[1-6]|autoref)\b.*?</(?P=tag)>)", re.DOTALL)
_CODE = re.compile(r"<code>(?P<name>[A-Za-z_][\w.]*)(?P<call>\(\))?</code>")


@cache
def homes() -> dict[str, str]:
    """Where each public name is defined: what the reference knows it by."""
    home_of = ray_pccl._HOME_OF
    names = {name: f"ray_pccl.{home_of.get(name, 'errors')}.{name}" for name in ray_pccl.__all__}
    names |= {field.name: f"{names['Settings']}.{field.name}" for field in fields(ray_pccl.Settings)}
    elsewhere = {
        "Faults": "ray_pccl.testing.faults.Faults",
        "MasterThread": "master_actor.thread.MasterThread",
        "master_actor.serve": "master_actor.thread.serve",
    }
    return names | elsewhere


@cache
def methods() -> dict[str, str]:
    """What a communicator can, under its bare name."""
    home, inherited = homes()["Communicator"], f"{Collectives.__module__}.{Collectives.__name__}"
    found = {name: f"{home}.{name}" for name in vars(ray_pccl.Communicator) if not name.startswith("_")}
    return found | {name: f"{inherited}.{name}" for name in vars(Collectives) if not name.startswith("_")}


def identifier_of(name: str, *, called: bool = False) -> str | None:
    """What the reference calls this name, if it may know it."""
    known = homes()
    if name in known:
        return known[name]
    if called or "_" in name:  # others, such as `send`, may be arguments
        bare = name.removeprefix("comm.").removeprefix("Communicator.")
        if bare in methods():
            return methods()[bare]
    first, _, rest = name.removeprefix("ray_pccl.").partition(".")
    first = HOLDERS.get(first, first)
    if first not in known:
        return None
    return f"{known[first]}.{rest}" if rest else known[first]


def linked(html: str) -> str:
    """The page, with links for the names; those that lead nowhere are dropped again later (``optional``)."""

    def link(match: re.Match[str]) -> str:
        identifier = identifier_of(match["name"], called=bool(match["call"]))
        if identifier is None:
            return match[0]
        return f'<autoref identifier="{identifier}" optional>{match[0]}</autoref>'

    parts = _UNTOUCHED.split(html)
    # The pattern has two groups: what stands between, what is untouched, and the name of its tag.
    for index in range(0, len(parts), 3):
        parts[index] = _CODE.sub(link, parts[index])
    return "".join(part for index, part in enumerate(parts) if index % 3 != 2)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs with each page, before references are resolved."""
    return linked(html)
