import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

LEAVES_A_PROCESS = """
import subprocess, sys

def leave(comm):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid

def test_untidy(peer_group):
    peer_group(1)[0].run(leave)
"""

TIDY = """
def test_tidy(peer_group, faults):
    peers = peer_group(2)
    faults.kill(peers[0])
    faults.stop(peers[1])
    faults.kill_master(restart=False)
"""


def test_importing_the_plugin_imports_neither_ray_nor_torch_nor_numpy() -> None:
    program = "import sys, ray_pccl.testing.plugin; print({'ray', 'torch', 'numpy'} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"


def test_the_plugin_is_found_by_pytest_without_being_named(pytester: pytest.Pytester) -> None:
    listing = pytester.runpytest_subprocess("--fixtures")

    listing.stdout.fnmatch_lines(["peer_group*", "faults*", "ray_local*module scope*", "ray_cluster*"])


def test_a_process_that_a_test_leaves_behind_is_ended_and_the_test_fails(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import ray_pccl.testing.ownership as o; o.Ownership.wait_until_gone.__defaults__ = (0.5,)")
    pytester.makepyfile(LEAVES_A_PROCESS)

    run = pytester.runpytest_subprocess()

    run.assert_outcomes(passed=1, errors=1)
    run.stdout.fnmatch_lines(["*processes are left behind*time.sleep*"])


def test_a_communicator_that_a_test_does_not_close_fails_it(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import ray_pccl.testing.master as m; m.SENTINEL_TIMEOUT_S = 0.5")
    pytester.makepyfile(
        """
        from ray_pccl import Communicator
        kept = []

        def test_untidy(master):
            kept.append(Communicator(master=master))
            kept[0].connect(10)

        def test_tidy(master):
            with Communicator(master=master) as comm:
                assert comm.world_size == 1
        """
    )

    run = pytester.runpytest_subprocess()

    run.assert_outcomes(passed=2, errors=1)
    run.stdout.fnmatch_lines(["*a communicator of the test process was not closed*"])


def test_a_test_that_kills_and_freezes_everything_leaves_nothing_behind(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TIDY)

    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_the_settings_of_the_master_are_those_of_the_overridden_fixture(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from ray_pccl import Settings

        @pytest.fixture
        def master_settings():
            return Settings(heartbeat_timeout_s=0.625)

        def test_settings(peer_group):
            [peer] = peer_group(1)
            assert peer.run(lambda comm: comm._connection.membership.settings.heartbeat_timeout_s) == 0.625
        """
    )

    pytester.runpytest_subprocess().assert_outcomes(passed=1)
