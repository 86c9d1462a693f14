"""Two hosts with a slow network between them, on one machine: network namespaces, joined by a link of limited rate.

    with two_hosts(rate_mbit=1000) as hosts:
        run_on(hosts, ["-m", "knapformer", "simulate", ...], num_local=2, timeout_s=300)

Each host is a namespace with its own loopback, over which its ranks talk to each other. The link is a veth pair; a
token bucket (`tc tbf`) limits what each end sends. Where the kernel allows it, each rank has its own share of a core
(cgroups): otherwise an idle rank would leave its core to the others, which does not happen on a cluster.

Linux, root, and Debian's iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 10_000


@dataclass(frozen=True)
class Host:
    name: str  # of the namespace
    address: str
    interface: str


class CannotMakeHosts(Exception):
    """The reason why there are no namespaces here."""


@contextlib.contextmanager
def two_hosts(rate_mbit: float) -> Iterator[tuple[Host, Host]]:
    """rate_mbit: the limit of each direction of the link. Raises CannotMakeHosts."""
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            raise CannotMakeHosts(f"{program} is not installed (Debian: {package})")
    # Names of interfaces have at most 15 characters.
    hosts = tuple(Host(f"kf{os.getpid()}{side}", f"10.93.7.{i}", f"kf{side}") for i, side in ((1, "a"), (2, "b")))
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.name)
        first, second = hosts
        _run("ip", "link", "add", first.interface, "netns", first.name, "type", "veth",
             "peer", "name", second.interface, "netns", second.name)  # fmt: skip
        for host in hosts:
            _in(host, "ip", "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _in(host, "ip", "link", "set", interface, "up")
            _in(host, "tc", "qdisc", "add", "dev", host.interface, "root", "tbf", "rate", f"{rate_mbit}mbit",
                "burst", "64kb", "latency", "50ms")  # fmt: skip
        yield first, second
    finally:
        for host in hosts:  # the link goes with them
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise CannotMakeHosts(f"{' '.join(command[:3])}: {said[-1] if said else 'failed'}") from None


def _in(host: Host, *command: str) -> None:
    _run("ip", "netns", "exec", host.name, *command)


@contextlib.contextmanager
def cpu_shares(num_ranks: int) -> Iterator[Path | None]:
    """A folder with a CPU control group for each rank, named by its number, with nine tenths of its even share of the
    cores, or of one core if that is less. None where groups cannot be made."""
    folder = _CPU_GROUPS / f"knapformer{os.getpid()}"
    cores = len(os.sched_getaffinity(0))
    groups = [folder / str(rank) for rank in range(num_ranks)]
    try:
        folder.mkdir()
        for group in groups:
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(0.9 * min(1.0, cores / num_ranks) * _PERIOD_US)))
        made: Path | None = folder
    except OSError:
        made = None
    try:
        yield made
    finally:
        for group in (*groups, folder):
            for _ in range(50):  # until the kernel has let the last process go
                with contextlib.suppress(FileNotFoundError):
                    try:
                        group.rmdir()
                    except OSError:
                        time.sleep(0.1)
                        continue
                break


# Joins the rank's control group, then becomes the rank.
_RANK = """
import os, sys
groups, *command = sys.argv[1:]
if groups:
    with open(f"{groups}/{os.environ['RANK']}/cgroup.procs", "w") as procs:
        procs.write(str(os.getpid()))
os.execv(sys.executable, [sys.executable, *command])
"""


def run_on(
    hosts: Sequence[Host], arguments: Sequence[str], num_local: int, timeout_s: float, shares_cpu: bool = True
) -> bool:
    """Runs Python with these arguments on `num_local` ranks of each host, started by torchrun. Returns whether each had
    its own share of a core. Raises RuntimeError with the hosts' output where one fails or is not done in time."""
    with contextlib.ExitStack() as stack:
        groups = stack.enter_context(cpu_shares(num_local * len(hosts))) if shares_cpu else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rank = folder / "rank.py"
        rank.write_text(_RANK)
        launchers = []
        for i, host in enumerate(hosts):
            log = stack.enter_context((folder / host.name).open("w+"))
            command = [
                # Not `ip netns exec`, which mounts another /sys, without control groups.
                "nsenter", f"--net=/run/netns/{host.name}", sys.executable, "-m", "torch.distributed.run",
                "--nnodes", str(len(hosts)), "--node-rank", str(i), "--nproc-per-node", str(num_local),
                "--master-addr", hosts[0].address, "--master-port", "29511",
                str(rank), str(groups or ""), *arguments,
            ]  # fmt: skip
            env = {**os.environ, "GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip
            launchers.append((subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT), log))
        deadline = time.monotonic() + timeout_s
        try:
            while any(launcher.poll() is None for launcher, _ in launchers):
                failed = any(launcher.poll() not in (None, 0) for launcher, _ in launchers)
                if failed or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        finally:
            for launcher, _ in launchers:
                if launcher.poll() is None:
                    launcher.terminate()  # which takes its ranks with it
                launcher.wait()
        if any(launcher.returncode != 0 for launcher, _ in launchers):
            said = []
            for host, (_, log) in zip(hosts, launchers, strict=True):
                log.seek(0)
                said.append(f"{host.name}: {log.read()[-4000:]}")
            raise RuntimeError("\n".join(said))
        return groups is not None
