import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from ray_pccl.testing.functions import dumps, loads

FACTOR = 3


def triple(number: int) -> int:
    return FACTOR * number


def test_a_function_of_a_module_travels_as_its_name() -> None:
    assert loads(dumps(triple)) is triple


def test_a_local_function_travels_with_its_closure_its_defaults_and_its_globals() -> None:
    offset = 10

    def scale(number: int, by: int = 2, *, sign: int = -1) -> int:
        return sign * (by * number + offset + FACTOR)

    arrived = loads(dumps(scale))

    assert arrived is not scale
    assert arrived(5) == scale(5) == -23
    assert arrived(5, 1, sign=1) == 18


def test_a_local_function_may_close_over_other_functions_and_modules() -> None:
    module: ModuleType = textwrap

    def inner(text: str) -> str:
        return module.dedent(text)

    arrived = loads(dumps(lambda text: inner(text) + "!"))

    assert arrived("  word") == "word!"


def test_an_assertion_that_pytest_has_rewritten_still_explains_itself_elsewhere() -> None:
    def check(number: int) -> None:
        assert number == 4

    arrived = loads(dumps(check))
    arrived(4)

    with pytest.raises(AssertionError, match="assert 5 == 4"):
        arrived(5)


def test_a_function_of_the_main_script_travels_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import subprocess, sys
            from ray_pccl.testing.functions import dumps
            BASE = 40
            def add(number):
                return BASE + number
            if __name__ == "__main__":
                program = "import sys; from ray_pccl.testing.functions import loads; "
                program += "print(loads(sys.stdin.buffer.read())(2))"
                subprocess.run([sys.executable, "-c", program], input=dumps(add), check=True)
            """
        )
    )

    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)

    assert done.stdout == "42\n"
