"""Two hosts on this machine: network namespaces with a cable between them that can be cut.

Processes on a host are also in a PID namespace of its own, so that nobody takes the other host's for local
ones. `one` can be reached from the test, `two` from `one` alone. A cut cable loses packets and tells nobody:
each end sends to a MAC address that the other has not.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from tests.system.server import BATON, END_S, Process

NOBODY = "02:00:00:00:00:99"


def ip(*args: str) -> None:
    """Run ip(8)."""
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


def why_not() -> str:
    """Say why there can be no namespaces here; nothing when there can be."""
    name = f"bt{os.getpid()}x"
    try:
        ip("netns", "add", name)
    except FileNotFoundError:
        return "ip(8) is not installed"
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip()}"
    try:
        ip("-n", name, "link", "add", "name", "bt0", "type", "veth", "peer", "name", "bt1")
        command = ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--mount-proc", "true"]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        return f"no veth pairs, or no unshare(1): {getattr(error, 'stderr', error)}"
    finally:
        ip("netns", "del", name)
    return ""


class HostProcess(Process):
    """A `baton` command on one of the hosts."""

    def __init__(self, host: str, temp_dir: Path, log: Path, *args: str) -> None:
        self._command = ["ip", "netns", "exec", host, "unshare", "--pid", "--fork", "--kill-child"]
        super().__init__(temp_dir, log, *args)

    def command(self, *args: str) -> list[str]:
        """How it is started."""
        return [*self._command, "--mount-proc", *super().command(*args)]

    def end(self) -> None:
        """Ask it to end, and check that it does in time and with success: unshare passes no signals on."""
        [inner] = psutil.Process(self.pid).children()
        assert str(BATON) in inner.cmdline()
        inner.terminate()
        assert self.popen.wait(2 * END_S) == 0, self.log()


class TwoHosts:
    """The namespaces. Addresses: of `one` on the way to the test and to `two`, of `two` to `one`."""

    def __init__(self) -> None:
        number = os.getpid() % 16384
        self.one, self.two = f"bt{os.getpid()}a", f"bt{os.getpid()}b"
        base, rest = f"10.{200 + number // 4096}.{number % 4096 // 16}.", number % 16 * 8
        self.test, self.one_to_test = f"{base}{rest + 1}", f"{base}{rest + 2}"
        self.one_to_two, self.two_to_one = f"{base}{128 + rest + 1}", f"{base}{128 + rest + 2}"
        self._near = f"bt{os.getpid()}"

    def set_up(self) -> None:
        """Make hosts and cables."""
        for name in (self.one, self.two):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", self._near, "type", "veth", "peer", "name", "test", "netns", self.one)
        ip("-n", self.one, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", self.two)
        ip("addr", "add", f"{self.test}/30", "dev", self._near)
        ip("link", "set", self._near, "up")
        for name, device, address in (
            (self.one, "test", self.one_to_test),
            (self.one, "cable", self.one_to_two),
            (self.two, "cable", self.two_to_one),
        ):
            ip("-n", name, "addr", "add", f"{address}/30", "dev", device)
            ip("-n", name, "link", "set", device, "up")

    def cut(self) -> None:
        """From now on no packet arrives, either way."""
        for name, address in ((self.one, self.two_to_one), (self.two, self.one_to_two)):
            ip("-n", name, "neigh", "replace", address, "lladdr", NOBODY, "dev", "cable", "nud", "permanent")

    def mend(self) -> None:
        """All is as before."""
        for name, address in ((self.one, self.two_to_one), (self.two, self.one_to_two)):
            ip("-n", name, "neigh", "del", address, "dev", "cable")

    def close(self) -> None:
        """Remove everything. A host that processes are still leaving keeps its cables for a moment."""
        for args in (
            ("link", "del", self._near),
            ("-n", self.one, "link", "del", "cable"),
            ("netns", "del", self.one),
            ("netns", "del", self.two),
        ):
            with suppress(subprocess.CalledProcessError):
                ip(*args)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts for a while."""
    with ExitStack() as stack:
        hosts = TwoHosts()
        stack.callback(hosts.close)
        hosts.set_up()
        yield hosts
