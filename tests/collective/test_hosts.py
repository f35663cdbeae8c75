"""Ranks on two simulated hosts: network namespaces of one machine, with a virtual cable and a pid namespace each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 120


@dataclass(frozen=True)
class Host:
    """A network namespace with one end of the cable."""

    name: str
    interface: str
    address: str
    names: Path  # mounted as /etc/hosts: without it, programs would query a name server that they cannot reach

    def start(self, store_address: str, world: int, ranks: list[int]) -> subprocess.Popen[str]:
        """Start some of the ranks of a group in a new pid namespace. They end with the returned process."""
        program = [sys.executable, "-m", "tests.collective.host_program", store_address, str(world), *map(str, ranks)]
        namespaces = ["ip", "netns", "exec", self.name, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return subprocess.Popen(
            [*namespaces, "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(self.names), *program],
            cwd=ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": self.interface, "SYMM_OVERLAP_CHECK": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for tool, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            pytest.skip(f"the command {tool} ({package}) is not installed")
    here = os.getpid()  # in names, so that two concurrent test runs share none
    names = tmp_path / "hosts"
    a, b = (Host(f"symm{here}{x}", f"symm{here}{x}"[-15:], f"10.213.97.{n}", names) for n, x in enumerate("ab", 1))
    names.write_text(
        "".join(
            f"{address} {name}\n"
            for address, name in [("127.0.0.1", "localhost"), *((host.address, host.name) for host in (a, b))]
        )
    )
    with ExitStack() as undo:
        try:
            run("unshare", "--pid", "--fork", "--mount-proc", "true")
            for host in (a, b):
                run("ip", "netns", "add", host.name)
                undo.callback(run, "ip", "netns", "del", host.name)  # this deletes the cable too
            run("ip", "link", "add", a.interface, "netns", a.name, "type", "veth", "peer", b.interface, "netns", b.name)
            for host in (a, b):
                inside = ("ip", "-n", host.name)
                run(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
                run(*inside, "link", "set", host.interface, "up")
                run(*inside, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no namespaces here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield a, b


@pytest.mark.slow
def test_ranks_on_two_hosts_choose_c10d_and_get_exact_results(hosts: tuple[Host, Host]) -> None:
    ranks, world = ([0, 2], [1]), 3
    with ExitStack() as stop:
        programs = [host.start(hosts[0].address, world, some) for host, some in zip(hosts, ranks, strict=True)]
        for program in programs:
            stop.callback(end, program)
        outputs = [program.communicate(timeout=TIMEOUT)[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0], "\n".join(outputs)
    lines = "".join(outputs).splitlines()
    for rank in range(world):
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
            paths = {line.split(" by ")[1] for line in lines if line.startswith(f"rank {rank}: {op} by ")}
            assert paths == {"c10d, because the ranks are on several hosts, or cannot map each other's memory"}
        assert any(line.startswith(f"rank {rank}: refused: the path 'pipelined' is forced") for line in lines)


def end(program: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        program.kill()
    program.wait()
