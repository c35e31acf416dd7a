from __future__ import annotations

import inspect
import pickle

import pytest

from ray_pccl import errors
from ray_pccl.errors import PCCLError, error_named

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, PCCLError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_pickles_with_its_text_its_class_and_its_attributes(cls: type[PCCLError]) -> None:
    error = cls("peer a of group 'g' was lost", reason="its process is exiting", peers=("a",), calls={"a": "b"})
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error) == "peer a of group 'g' was lost"
    assert (copy.reason, copy.peers, copy.calls) == ("its process is exiting", ("a",), {"a": "b"})
    assert pickle.loads(pickle.dumps(copy)).details == error.details


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_says_what_it_is_for(cls: type[PCCLError]) -> None:
    assert cls.__doc__


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("SettingsError", ValueError),
        ("RendezvousTimeoutError", TimeoutError),
        ("TooFewPeersError", TimeoutError),
        ("OperationTimeoutError", TimeoutError),
        ("StoreTimeoutError", TimeoutError),
        ("MasterUnreachableError", ConnectionError),
    ],
)
def test_an_error_is_caught_as_the_builtin_that_it_is(name: str, builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="the text"):
        raise getattr(errors, name)("the text", reason="r")


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_is_found_by_its_name(cls: type[PCCLError]) -> None:
    error = error_named(cls.__name__, "the text", {"reason": "r"})
    assert type(error) is cls
    assert (str(error), error.reason) == ("the text", "r")


@pytest.mark.parametrize("name", ["OfANewerVersionError", "ValueError", "object", ""])
def test_an_error_that_only_the_other_side_knows_becomes_the_base(name: str) -> None:
    error = error_named(name, "the text", {"reason": "r"})
    assert type(error) is PCCLError
    assert (str(error), error.details) == ("the text", {"reason": "r"})


def test_an_error_defined_elsewhere_in_the_package_is_found_too() -> None:
    from ray_pccl.peer.ledger import FrozenError

    assert type(error_named("FrozenError", "the text", {})) is FrozenError
