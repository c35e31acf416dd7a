"""Where states differ that should have the same tensors."""

from __future__ import annotations

from ray_pccl.state.mismatch import mismatch, packed, unpacked

USUAL = [("a", "float32", (2, 3), False), ("b", "int64", (), False)]


def test_a_description_survives_its_journey() -> None:
    assert [tuple(each) for each in unpacked(packed(USUAL))] == USUAL


def test_the_first_tensor_that_differs_is_named_with_who_has_what() -> None:
    other = [USUAL[0], ("b", "int32", (), False)]
    error = mismatch({"p0": USUAL, "p1": other, "p2": USUAL})
    assert error.tensor == "b" and error.peers == ("p0", "p1", "p2")
    assert "int64[] at p0, p2" in str(error) and "int32[] at p1" in str(error)


def test_a_tensor_that_is_missing_or_has_another_flag_is_named() -> None:
    assert "no such tensor at p1" in str(mismatch({"p0": USUAL, "p1": USUAL[:1]}))
    flagged = [("a", "float32", (2, 3), True), USUAL[1]]
    error = mismatch({"p0": USUAL, "p1": flagged})
    assert error.tensor == "a" and "allow_content_inequality at p1" in str(error)
