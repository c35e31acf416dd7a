"""The examples that run in Ray actors, in their short forms, with their final numbers checked."""

from __future__ import annotations

import ast
import re

import pytest

from tests.examples.scripts import EXAMPLES, run_example

README = EXAMPLES.parent / "README.md"


def _numbers(pattern: str, output: str) -> list[float]:
    """The numbers of the one line that fits the pattern."""
    (found,) = re.findall(pattern, output)
    return [float(number) for number in ([found] if isinstance(found, str) else found)]


def test_the_quickstart_is_the_one_of_the_readme() -> None:
    # Which is run, with what it prints, by the tests of the README.
    [shown] = re.findall(r"## From the driver, in 20 lines\n\n```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    text = (EXAMPLES / "quickstart.py").read_text()
    assert ast.unparse(ast.Module(ast.parse(text).body[1:], [])) == ast.unparse(ast.parse(shown))
    assert text.endswith(shown)


def test_the_list_of_examples_names_every_one_with_its_command() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for script in EXAMPLES.glob("*.py"):
        description = ast.get_docstring(ast.parse(script.read_text()))
        assert description, script
        if '__name__ == "__main__"' in script.read_text() or script.name == "quickstart.py":
            command = f"python examples/{script.name}"
            assert f"`{command}`" in listed, f"{script.name} is not listed"
            assert command in description, f"{script.name} does not say how it is run"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(150)
def test_every_collective_leaves_every_actor_with_what_is_due() -> None:
    lines = run_example("actors.py").splitlines()
    assert "all_reduce SUM               [10. 10.]" in lines
    assert "all_to_all                   [10. 20. 30. 40.]" in lines
    assert "8 all_reduce_async           [ 0. 10. 20. 30. 40. 50. 60. 70.]" in lines
    assert any("a mistake, told to all" in line and "count=2" in line and "count=3" in line for line in lines)
    assert "a death, retried:            [6.0, 6.0], of number 0, number 1, number 2" in lines
    assert lines[-1] == "18 kinds of calls, and all 4 ranks were left with what is due"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(150)
def test_weights_reach_eight_servers_while_they_serve_and_one_of_them_dies() -> None:
    output = run_example("broadcast_weights.py", "--quick")
    versions = re.findall(r"version (\d): 4 MiB to (\d) servers in (\d+) ms(; one was killed)?", output)
    assert [(version, servers, bool(killed)) for version, servers, _, killed in versions] == [
        ("1", "8", False),
        ("2", "8", False),
        ("3", "7", True),
        ("4", "7", False),
        ("5", "7", False),
    ]
    predictions, servers, version = _numbers(
        r"(\d+) predictions meanwhile, each with one version; (\d) servers hold version (\d)", output
    )
    assert predictions >= 40 and (servers, version) == (7, 5)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(150)
def test_a_program_for_rays_module_gives_the_same_numbers_and_survives_a_death() -> None:
    output = run_example("migrating.py", "--quick")
    modules = re.findall(r"^([\w.]+): allreduce SUM \[10, 10\], .*: right on all ranks$", output, flags=re.MULTILINE)
    assert modules[-1] == "ray_pccl.util.collective"
    times = [float(ms) for ms in re.findall(r"rank \d: +([\d.]+) ms  PeerLostRuntimeError: .*rank 3 of 4", output)]
    assert len(times) == 3 and max(times) < 5000
    assert "the three make their group anew, and go on: allreduce SUM [6.0, 6.0]" in output
    pytest.importorskip("torch", reason="without torch Ray's own module has no gloo to run on")
    assert modules == ["ray.util.collective", "ray_pccl.util.collective"]
