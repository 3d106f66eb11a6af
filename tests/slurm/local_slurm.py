"""A private Slurm on this machine: one controller and several virtual nodes on loopback.

Every daemon is started from one folder, listens on 127.0.0.1 only and is found again by its process
number, so that a second Slurm beside it is left alone. Needs root and the packages slurmctld,
slurmd, slurm-client and munge; no systemd, no cgroups, no accounting.

What it teaches (Slurm 22.05): munged must run as its own user with a key directory of mode 0700;
slurmd needs NoInAddrAny and slurmctld NoCtldInAddrAny to stay on loopback; several slurmd of one
host need a port and a spool directory each.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

DAEMONS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "squeue")
START_SECONDS = 40.0

CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/run/munge.sock
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,bf_resolution=1,bf_continue,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait={kill_wait}
MinJobAge={job_age}
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout={node_timeout}
MessageTimeout=20
AccountingStorageType=accounting_storage/none
NodeName=n[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 \
Port={first}-{last} CPUs={cpus} RealMemory=4000 State=UNKNOWN
PartitionName=batch Nodes=n[1-{nodes}] Default=YES OverSubscribe=EXCLUSIVE MaxTime=02:00:00 \
DefaultTime=00:05:00 State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=n[1-{nodes}] OverSubscribe=EXCLUSIVE MaxTime=UNLIMITED State=UP \
PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=n[1-2] OverSubscribe=EXCLUSIVE MaxTime=00:10:00 State=UP \
PriorityTier=1 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why no Slurm can be started here, or None."""
    absent = [name for name in DAEMONS if not shutil.which(name)]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)}); .ci/run installs it"
    return None if os.geteuid() == 0 else "the test's own Slurm must be started by root"


class LocalSlurm:
    """A Slurm of its own; a context that starts and stops it.

    Args:
        root: Folder of its files, which it makes and removes; short, for the munge socket's name.
        nodes: Number of virtual nodes, n1 to nN.
        cpus: Of every node; may be more than there are.
        node_timeout: Seconds until a silent node is down.
        job_age: Seconds that squeue remembers an ended job.
        kill_wait: Seconds between TERM and KILL.
    """

    def __init__(
        self,
        root: Path,
        nodes: int = 8,
        cpus: int = 2,
        *,
        node_timeout: int = 20,
        job_age: int = 600,
        kill_wait: int = 10,
    ) -> None:
        self.root = root
        self.nodes = nodes
        self._cpus = cpus
        self._times = {"node_timeout": node_timeout, "job_age": job_age, "kill_wait": kill_wait}

    @property
    def conf(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """What client commands need."""
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def __enter__(self) -> LocalSlurm:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, *command: str, check: bool = True) -> str:
        """Output of a client command."""
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=self.environment,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def start_controller(self) -> None:
        subprocess.run(["slurmctld", "-f", str(self.conf)], check=True, timeout=30)

    def stop_controller(self) -> None:
        """As on a restart of the machine that it runs on: jobs continue."""
        self._end(self.root / "run" / "slurmctld.pid", signal.SIGTERM)

    def start_node(self, name: str) -> None:
        subprocess.run(["slurmd", "-f", str(self.conf), "-N", name], check=True, timeout=30)

    def kill_slurmd(self, name: str) -> None:
        """``kill -9`` of a node's slurmd alone: what runs there is out of Slurm's reach."""
        self._end(self.root / "run" / f"slurmd.{name}.pid", signal.SIGKILL)

    def kill_node(self, name: str) -> None:
        """``kill -9`` of a node's slurmd and of all that runs under it, as if power were lost."""
        self.kill_slurmd(name)
        tasks = self.tasks_on(name)
        # First those that would tell the controller what became of the others.
        for each in [*{_parent(task) for task in tasks} & set(self._steps()), *tasks]:
            _kill(each)

    def signal_ranks(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the processes of ``outlast train`` on a node, and to no other."""
        for pid in self.tasks_on(name):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"train" in words and b"srun" not in words:
                os.kill(pid, number)

    def stop(self) -> None:
        """End everything that was started from `root`."""
        with contextlib.suppress(Exception):
            jobs = self.run("squeue", "-h", "-o", "%A", check=False).split()
            if jobs:
                self.run("scancel", *sorted(set(jobs)), check=False)
                self._wait(lambda: not self.run("squeue", "-h", check=False).strip(), 8.0)
        for pid in _ours(self.conf, "slurmstepd", "slurmd", "slurmctld"):
            _kill(pid)
        self._end(self.root / "run" / "munged.pid", signal.SIGTERM)
        shutil.rmtree(self.root, ignore_errors=True)

    def _start(self) -> None:
        for name in ("state", "log", "spool", "run"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        for path in (self.root, *self.root.iterdir()):
            path.chmod(0o755)
        port = _free_ports(self.nodes + 1)
        self.conf.write_text(
            CONFIG.format(
                root=self.root,
                port=port,
                first=port + 1,
                last=port + self.nodes,
                nodes=self.nodes,
                cpus=self._cpus,
                **self._times,
            )
        )
        self._start_munge()
        self.start_controller()
        for index in range(self.nodes):
            self.start_node(f"n{index + 1}")
        self._wait(
            lambda: (
                len(self.run("sinfo", "-hNt", "idle", "-p", "batch", "-o", "%N").split())
                >= self.nodes
            ),
            START_SECONDS,
        )

    def _start_munge(self) -> None:
        private = self.root / "munge"
        private.mkdir(exist_ok=True)
        key = private / "key"
        key.write_bytes(secrets.token_bytes(128))
        for path in (key, private, self.root / "run"):
            shutil.chown(path, "munge", "munge")
        key.chmod(0o400)
        private.chmod(0o700)
        munged = ["munged", "--force", f"--socket={self.root}/run/munge.sock"]
        munged += [f"--key-file={key}", f"--pid-file={self.root}/run/munged.pid"]
        munged += [f"--log-file={private}/log", f"--seed-file={private}/seed"]
        subprocess.run(
            ["runuser", "-u", "munge", "--", *munged], check=True, timeout=30, capture_output=True
        )

    def _steps(self) -> list[int]:
        return _ours(self.conf, "slurmstepd")

    def tasks_on(self, name: str) -> list[int]:
        """Processes that jobs run on a node."""
        wanted = {f"SLURMD_NODENAME={name}".encode(), f"SLURM_CONF={self.conf}".encode()}
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                        found.append(int(folder.name))
        return found

    @staticmethod
    def _end(pid_file: Path, number: signal.Signals) -> None:
        with contextlib.suppress(OSError, ValueError):
            pid = int(pid_file.read_text())
            os.kill(pid, number)
            deadline = time.monotonic() + 10.0
            while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
                time.sleep(0.05)

    @staticmethod
    def _wait(condition: object, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline, f"Slurm was not ready in {seconds} s"
            time.sleep(0.1)


def _ours(conf: Path, *names: str) -> list[int]:
    """Processes of these programs that were started with this configuration."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if (folder / "comm").read_text().strip() not in names:
                continue
            words = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            if str(conf).encode() in words:
                found.append(int(folder.name))
    return found


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on."""
    for first in range(17600 + os.getpid() % 97 * 20, 31000, 20):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports")
