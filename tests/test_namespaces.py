"""Two hosts, each a network namespace with an address of its own: a link that is cut or slow, a node that stands still.

Making them needs root, on Linux with ip and tc.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_restarts import ends_as_the_plain_loop, start, steps_of, wait_until

pytestmark = pytest.mark.full
TIMEOUT = 6.0  # run.timeout
ADDRESS, PORT = "10.211.77.1", 29501


def _ip(*arguments: str) -> int:
    return subprocess.run(["ip", *arguments], capture_output=True).returncode


@dataclass(frozen=True, slots=True)
class Hosts:
    """Two namespaces; node N has the interface ``cableN``, and the address 10.211.77.N+1."""

    names: tuple[str, str]

    def within(self, node: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[node]]

    def link(self, state: str) -> None:
        assert _ip("-n", self.names[1], "link", "set", "cable1", state) == 0

    def slow_down(self) -> None:
        """To 4 Mbit/s, both ways."""
        for node in (0, 1):
            slow = ("root", "tbf", "rate", "4mbit", "burst", "16kbit", "latency", "400ms")
            subprocess.run([*self.within(node), "tc", "qdisc", "add", "dev", f"cable{node}", *slow], check=True)


@contextmanager
def _two_hosts() -> Iterator[Hosts]:
    hosts = Hosts((f"pt{os.getpid()}a", f"pt{os.getpid()}b"))
    try:
        made = [_ip("netns", "add", name) for name in hosts.names]
        first, second = hosts.names
        made.append(
            _ip("-n", first, "link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", second)
        )
        for node, name in enumerate(hosts.names):
            made.append(_ip("-n", name, "addr", "add", f"10.211.77.{node + 1}/24", "dev", f"cable{node}"))
            made += [_ip("-n", name, "link", "set", device, "up") for device in (f"cable{node}", "lo")]
        if any(made):
            pytest.skip("needs the right to make network namespaces (ip netns, veth)")
        yield hosts
    finally:
        for name in hosts.names:
            _ip("netns", "del", name)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs ip and tc (iproute2)")
    with _two_hosts() as found:
        yield found


@contextmanager
def job(hosts: Hosts, folder: Path, *more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """A launcher on each host; none is left behind."""
    nodes = [
        start(
            *(folder, "2", node, PORT, f"run.timeout={TIMEOUT}", *more),
            within=hosts.within(node),
            address=ADDRESS,
            GLOO_SOCKET_IFNAME=f"cable{node}",
        )
        for node in (0, 1)
    ]
    try:
        yield nodes
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.communicate()


def goes_on(hosts: Hosts, folder: Path) -> None:
    """Both nodes are there again: the run ends as if nothing had been."""
    with job(hosts, folder, "run.resume=auto") as nodes:
        for node in nodes:
            _, err = node.communicate(timeout=120)
            assert node.returncode == 0, err
    ends_as_the_plain_loop(folder, num_nodes=2)


def says_of(node: int) -> str:
    """The beginning of the last line on the other node."""
    return f"rank {1 - node}: no answer within run.timeout from node {node}"


def test_a_link_that_is_cut_ends_both_nodes(hosts: Hosts, tmp_path: Path) -> None:
    with job(hosts, tmp_path) as nodes:
        wait_until(lambda: len(steps_of(tmp_path)) >= 4)
        hosts.link("down")
        began = time.monotonic()
        for number, node in enumerate(nodes):
            _, err = node.communicate(timeout=60)
            assert (node.returncode, err.splitlines()[-1].partition(" (step ")[0]) == (1, says_of(1 - number))
        assert time.monotonic() - began < TIMEOUT + 12
    hosts.link("up")
    goes_on(hosts, tmp_path)


def test_a_node_that_stands_still_is_named(hosts: Hosts, tmp_path: Path) -> None:
    with job(hosts, tmp_path) as nodes:
        wait_until(lambda: len(steps_of(tmp_path)) >= 4)
        os.killpg(nodes[1].pid, signal.SIGSTOP)
        for process in _ranks_of(nodes[1]):
            os.kill(process, signal.SIGSTOP)
        began = time.monotonic()
        _, err = nodes[0].communicate(timeout=60)
        assert time.monotonic() - began < TIMEOUT + 12
        assert err.splitlines()[-1].startswith(says_of(1))
        for process in _ranks_of(nodes[1]):
            os.kill(process, signal.SIGKILL)
    goes_on(hosts, tmp_path)


def test_a_slow_link_is_waited_for(hosts: Hosts, tmp_path: Path) -> None:
    hosts.slow_down()
    goes_on(hosts, tmp_path)


def _ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(launcher.pid).children(recursive=True)]
