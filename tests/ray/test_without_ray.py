import pytest

import ray_pccl
from ray_pccl import UsageError


@pytest.mark.parametrize("call", [ray_pccl.start_master, ray_pccl.stop_master, ray_pccl.Communicator("g").connect])
def test_without_ray_and_without_an_endpoint_the_error_says_what_to_do(call: object) -> None:
    with pytest.raises(UsageError, match=r"call ray\.init\(\) first, or pass master=<endpoint>"):
        call()  # type: ignore[operator]


def test_looking_for_the_master_without_ray_starts_no_ray() -> None:
    import ray

    from ray_pccl.driver.master import finder

    with pytest.raises(UsageError, match="shut down"):
        finder(None)()
    assert not ray.is_initialized()
