import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "testing.md"


def test_the_example_of_the_documentation_passes_as_it_stands(pytester: pytest.Pytester) -> None:
    first = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert first is not None
    pytester.makepyfile(first.group(1))

    pytester.runpytest_subprocess().assert_outcomes(passed=1)
