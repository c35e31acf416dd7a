"""Whole hosts of our own on one machine, with an sshd each: what a cluster launcher needs to believe in machines.

A host has a network, processes, a home, `/tmp`, `/run` and `/dev/shm` of its own, and shares all other files with this
machine, so the same interpreter is there. No process of a host sees one of another host or of this machine: `ray stop`,
which ends every Ray that it finds, finds those of its host alone. All hosts hang on one switch, from which `cut` takes
one off. Needs root, and the programs in `NEEDED`; where they are not, `NotPermitted` says so.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_pccl.testing.namespaces import NotPermitted, namespaces, run
from ray_pccl.testing.namespaces import inside as inside_network
from ray_pccl.testing.waiting import eventually

NEEDED = ("ip", "unshare", "nsenter", "setpriv", "mount", "ssh-keygen", "ssh", "sshd")
DEVICE = "eth0"
PROCESSES = r"""
for each in /proc/[0-9]*; do test $each = /proc/$$ || tr '\0' ' ' 2>/dev/null <$each/cmdline && echo; done; true
"""
"""A shell's way to tell the command lines of all processes but its own."""
START_TIMEOUT_S = 20.0
END_TIMEOUT_S = 10.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SWITCH = "switch"


@dataclass(frozen=True)
class Host:
    """One of the hosts."""

    name: str
    address: str
    home: Path
    """Its root's home directory, on this machine and on the host."""
    pid: int
    """Its first process, as this machine counts; when that ends, all of the host's processes do."""

    def inside(self, *command: str) -> list[str]:
        """The command, to be run on the host."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--uts", "--ipc", f"--wd={self.home}"]
        return [*enter, "--", "env", "-i", *_environment(self.home), *command]

    def processes(self) -> list[str]:
        """The command lines of all that runs on the host."""
        done = subprocess.run(self.inside("sh", "-c", PROCESSES), capture_output=True, text=True, check=True)  # noqa: S603
        return [line.strip() for line in done.stdout.splitlines() if line.strip()]


@dataclass(frozen=True)
class Lan:
    """Hosts on a switch."""

    hosts: tuple[Host, ...]
    key: Path
    """The private SSH key that opens all of them, for root."""
    switch: str
    """The network namespace of the switch."""

    def cut(self, host: Host) -> None:
        """Pulls the host's cable: nothing gets through, and nobody is told."""
        run("ip", "-n", self.switch, "link", "set", host.name, "down")

    def heal(self, host: Host) -> None:
        """Puts it back."""
        run("ip", "-n", self.switch, "link", "set", host.name, "up")


def missing() -> str:
    """Why hosts can't be made here; empty if they can."""
    absent = [program for program in NEEDED if not _program(program)]
    if os.geteuid() != 0:
        return "it takes root to make hosts"
    return f"the programs {', '.join(absent)} are not installed" if absent else ""


@contextlib.contextmanager
def lan(*names: str, shared: Sequence[Path] = ()) -> Iterator[Lan]:
    """Hosts with these names, up and reachable over SSH; afterwards they are gone, with all that ran on them.

    Args:
        names: At most 15 characters each.
        shared: Directories that must be seen on the hosts although they are in `/tmp`. Those of this interpreter and
            of this package always are.
    """
    if why := missing():
        raise NotPermitted(why)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rpccl-lan-")))
        made = stack.enter_context(namespaces(_SWITCH, *names))
        addresses = {name: f"10.199.79.{number}" for number, name in enumerate(names, start=1)}
        _wire(made[0], dict(zip(names, made[1:], strict=True)), addresses)
        key = _key(directory / "key")
        etc_hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
        (directory / "hosts").write_text(f"127.0.0.1 localhost\n{etc_hosts}")
        (directory / "resolv.conf").write_text("")  # no name is looked up outside
        places = _places([directory, *shared])
        hosts = [
            stack.enter_context(_host(name, namespace, addresses[name], directory, places))
            for name, namespace in zip(names, made[1:], strict=True)
        ]
        yield Lan(tuple(hosts), key, made[0])


def _wire(switch: str, hosts: Mapping[str, str], addresses: Mapping[str, str]) -> None:
    """A cable from every host to the switch."""
    run("ip", "-n", switch, "link", "add", "name", "bridge", "type", "bridge")
    run("ip", "-n", switch, "link", "set", "bridge", "up")
    for name, namespace in hosts.items():
        run("ip", "-n", switch, "link", "add", "name", name, "type", "veth", "peer", "name", DEVICE, "netns", namespace)
        run("ip", "-n", switch, "link", "set", name, "master", "bridge", "up")
        run("ip", "-n", namespace, "address", "add", f"{addresses[name]}/24", "dev", DEVICE)
        run("ip", "-n", namespace, "link", "set", DEVICE, "up")
        # Leads nowhere. But programs tell their own address by the way to the Internet.
        run("ip", "-n", namespace, "route", "add", "default", "dev", DEVICE)


@contextlib.contextmanager
def _host(name: str, network: str, address: str, directory: Path, places: Sequence[Path]) -> Iterator[Host]:
    own = directory / name
    home = own / "home"
    home.mkdir(parents=True)
    users = Path("/etc/passwd").read_text().splitlines()
    others = [user for user in users if not user.startswith("root:")]
    (own / "passwd").write_text("\n".join([f"root:x:0:0:root:{home}:/bin/bash", *others]) + "\n")
    (own / "sshd_config").write_text(_sshd_config(directory, own, address))
    _key(own / "host_key")
    (own / "boot").write_text(_boot(name, directory, own, places))
    log = (own / "log").open("w")
    # Each link of this chain ends with the one before, down to the host's first process; with it the kernel ends all.
    chain = [
        "env",
        "-i",
        *_environment(home),
        "setpriv",
        "--pdeathsig",
        "KILL",
        *inside_network(network, "unshare", "--kill-child", "--fork"),
    ]
    chain += ["--mount", "--pid", "--uts", "--ipc", "--mount-proc", "bash", str(own / "boot")]
    process = subprocess.Popen(chain, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603
    try:
        pid_file = own / "sshd.pid"
        eventually(
            lambda: pid_file.exists() or process.poll() is not None,
            START_TIMEOUT_S,
            lambda: f"sshd of {name} is up: {(own / 'log').read_text()}",
        )
        if process.poll() is not None:
            raise NotPermitted(f"the host {name} did not start: {(own / 'log').read_text().strip()}")
        first = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
        yield Host(name, address, home, int(first))
    finally:
        process.kill()
        process.wait(END_TIMEOUT_S)
        log.close()


def _boot(name: str, directory: Path, own: Path, places: Sequence[Path]) -> str:
    """What a host's first process runs: it gives the host files of its own, and an sshd.

    Bash stays the first process, since somebody has to bury the orphans, as Ray's daemons are.
    """
    aside = [(place, f"/run/place{number}") for number, place in enumerate(places)]
    lines = ["set -e", f"hostname {name}", "mount -t tmpfs tmpfs /run", "mkdir /run/sshd"]
    lines += [f"mkdir {away} && mount --bind {shlex.quote(str(place))} {away}" for place, away in aside]
    lines += ["mount -t tmpfs tmpfs /tmp", "chmod 1777 /tmp", "mount -t tmpfs tmpfs /dev/shm"]
    for place, away in aside:
        lines += [f"mkdir -p {shlex.quote(str(place))} && mount --bind {away} {shlex.quote(str(place))}"]
    for source, target in ((own / "passwd", "passwd"), (directory / "hosts", "hosts")):
        lines += [f"mount --bind {source} /etc/{target}"]
    lines += [f"test ! -e /etc/resolv.conf || mount --bind {directory / 'resolv.conf'} /etc/resolv.conf"]
    lines += [f"{_program('sshd')} -D -e -f {own / 'sshd_config'} &", "wait"]
    return "\n".join(lines) + "\n"


def _environment(home: Path) -> list[str]:
    return [f"HOME={home}", f"PATH={_PATH}", "LANG=C.UTF-8"]


def _sshd_config(directory: Path, own: Path, address: str) -> str:
    settings = {
        "ListenAddress": address,
        "HostKey": own / "host_key",
        "PidFile": own / "sshd.pid",
        "AuthorizedKeysFile": directory / "key.pub",
        "StrictModes": "no",
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "UsePAM": "no",
        "UseDNS": "no",
        "PrintMotd": "no",
        "MaxStartups": "100",
    }
    return "".join(f"{name} {value}\n" for name, value in settings.items())


def _key(path: Path) -> Path:
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path))
    return path


def _places(wanted: Sequence[Path]) -> list[Path]:
    """Which directories in `/tmp` must stay to be seen when a host gets a `/tmp` of its own."""
    package = Path(__file__).resolve().parents[2]
    python = [Path(place) for place in (sys.prefix, sys.base_prefix, *sys.path) if place]
    known = {place.resolve() for place in [*wanted, package, *python]}
    below = sorted(place for place in known if place.is_relative_to("/tmp") and place.is_dir())  # noqa: S108
    # What is in another one of them comes along with it.
    return [place for place in below if not any(place != other and place.is_relative_to(other) for other in below)]


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=_PATH)
