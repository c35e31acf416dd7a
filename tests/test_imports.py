"""What an import costs: the control plane needs neither Ray nor numpy, and `import ray_pccl` loads nothing."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import subprocess
import sys

import pytest

import master_actor.core
import ray_pccl
import ray_pccl.control
import ray_pccl.peer
import ray_pccl.ring
import ray_pccl.state
import ray_pccl.topology

HEAVY = ["ray", "numpy", "torch", "cupy", "aiohttp"]
PACKAGES = [ray_pccl.control, ray_pccl.peer, master_actor.core]
WITH_NUMPY = {"ray_pccl.peer.operations", "ray_pccl.peer.requests"}
"""What `connect()` loads: it works on tensors."""
LIGHT = [
    *(f"{package.__name__}.{module.name}" for package in PACKAGES for module in pkgutil.iter_modules(package.__path__)),
    *(package.__name__ for package in PACKAGES),
    "ray_pccl.errors",
    "ray_pccl.settings",
    "ray_pccl.types",
    "master_actor",
    "master_actor.dashboard.access",
    "master_actor.dashboard.feed",
    "master_actor.dashboard.page",
    "master_actor.journal",
    "master_actor.server",
    "master_actor.thread",
]


def _loaded_by(statement: str) -> list[str]:
    """The modules that a fresh interpreter has after the statement."""
    script = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _heavy(modules: list[str]) -> list[str]:
    return [name for name in HEAVY if name in modules]


def test_the_control_plane_imports_neither_ray_nor_numpy_nor_torch() -> None:
    assert _heavy(_loaded_by("".join(f"import {name}\n" for name in LIGHT if name not in WITH_NUMPY))) == []


def test_the_data_plane_imports_neither_ray_nor_torch() -> None:
    ring = [f"ray_pccl.ring.{module.name}" for module in pkgutil.iter_modules(ray_pccl.ring.__path__)]
    assert len(ring) > 10
    assert _heavy(_loaded_by("".join(f"import {name}\n" for name in [*ring, *sorted(WITH_NUMPY)]))) == ["numpy"]


def test_the_shared_state_imports_neither_ray_nor_torch() -> None:
    state = [f"ray_pccl.state.{module.name}" for module in pkgutil.iter_modules(ray_pccl.state.__path__)]
    assert len(state) > 8
    assert _heavy(_loaded_by("".join(f"import {name}\n" for name in state))) == ["numpy"]


def test_the_topology_imports_neither_ray_nor_torch_nor_matplotlib() -> None:
    modules = [module.name for module in pkgutil.iter_modules(ray_pccl.topology.__path__) if module.name != "__main__"]
    assert len(modules) > 10
    loaded = _loaded_by("".join(f"import ray_pccl.topology.{name}\n" for name in modules))
    assert _heavy(loaded) == ["numpy"]
    assert "matplotlib" not in loaded
    assert _heavy(_loaded_by("import ray_pccl.topology.types")) == []


def test_the_pytest_plugin_imports_neither_ray_nor_numpy_nor_torch() -> None:
    if importlib.util.find_spec("ray_pccl.testing.plugin") is None:
        pytest.skip("there is no plugin yet")
    assert _heavy(_loaded_by("import ray_pccl.testing.plugin")) == []


def test_importing_ray_pccl_loads_none_of_its_modules() -> None:
    modules = [name for name in _loaded_by("import ray_pccl") if name.split(".")[0] in ("ray_pccl", "master_actor")]
    assert modules == ["ray_pccl"]


def test_the_names_that_need_no_ray_load_none() -> None:
    names = ["Communicator", "Endpoint", "Settings", "Store", "PCCLError", "Attribute", "Member", "MembershipEvent"]
    assert _heavy(_loaded_by("import ray_pccl\n" + "\n".join(f"ray_pccl.{name}" for name in names))) == []


@pytest.mark.parametrize("name", [name for name in ray_pccl.__all__ if name not in ("start_master", "stop_master")])
def test_every_public_name_resolves_to_what_it_says(name: str) -> None:
    value = getattr(ray_pccl, name)
    assert getattr(value, "__name__", name) == name


def test_the_names_of_the_driver_resolve() -> None:
    modules = _loaded_by("import ray_pccl\nassert callable(ray_pccl.start_master) and callable(ray_pccl.stop_master)")
    assert "ray_pccl.driver.master" in modules


def test_dir_lists_every_public_name() -> None:
    assert set(ray_pccl.__all__) <= set(dir(ray_pccl))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ray_pccl.no_such_name


def test_every_error_class_is_public() -> None:
    from ray_pccl import errors

    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and not name.startswith("_")}
    assert {name for name in classes if issubclass(getattr(errors, name), errors.PCCLError)} <= set(ray_pccl.__all__)
