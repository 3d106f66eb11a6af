"""Burst-buffer directives of a job file, carried out by a real Slurm's Lua plugin."""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from local_slurm import LocalSlurm, missing

from outlast.cluster.chain_files import ChainFiles, ChainPlan
from outlast.cluster.staging import job_directives
from outlast.cluster.submission import batch_script
from outlast.job import load_job

pytestmark = pytest.mark.slurm

PLUGINS = ("/usr/lib/x86_64-linux-gnu/slurm-wlm", "/usr/lib64/slurm", "/usr/lib/slurm")
# A site that understands two directives: a folder for the job out of a pool, and copies into it. Of
# a capacity, Slurm's Lua plugin wants to know the pool, so DataWarp's own line would be refused.
PLUGIN = """\
local root = "@ROOT@/bb/"
local function place(job) return root .. job end
function slurm_bb_job_process(script, uid, gid)
    for line in io.lines(script) do
        if line:match("^#BB jobdw") then
            return slurm.SUCCESS
        end
    end
    return slurm.ERROR, "no folder is asked for"
end
function slurm_bb_pools()
    return slurm.SUCCESS, '{"pools":[{"id":"disks","quantity":99000000000,"granularity":1}]}'
end
function slurm_bb_setup(job, uid, gid, pool, size, script)
    os.execute("mkdir -p " .. place(job) .. " && chmod 755 " .. place(job))
    return slurm.SUCCESS
end
function slurm_bb_data_in(job, script, uid, gid)
    for line in io.lines(script) do
        local from, to = line:match("^#BB copy source=(%S+) destination=(%S+)")
        if from then
            to = to:gsub("%$BB_JOB", place(job))
            os.execute("cp " .. from .. " " .. to)
        end
    end
    return slurm.SUCCESS
end
function slurm_bb_paths(job, script, file, uid, gid)
    local out = io.open(file, "w")
    out:write("BB_JOB=" .. place(job) .. "\\n")
    out:close()
    return slurm.SUCCESS
end
function slurm_bb_real_size(job, uid, gid) return slurm.SUCCESS end
function slurm_bb_pre_run(job, script, uid, gid) return slurm.SUCCESS end
function slurm_bb_post_run(job, script, uid, gid) return slurm.SUCCESS end
function slurm_bb_data_out(job, script, uid, gid) return slurm.SUCCESS end
function slurm_bb_job_teardown(job, script, hurry, uid, gid)
    os.execute("rm -rf " .. place(job))
    return slurm.SUCCESS
end
function slurm_bb_get_status(uid, gid, ...) return slurm.SUCCESS, "well" end
"""


LINES = [
    "#BB jobdw pool=disks capacity={gigabytes}GB",
    "#BB copy source={source} destination=$BB_JOB/{name}",
]


class BufferedSlurm(LocalSlurm):
    """A Slurm with a burst buffer."""

    def start_controller(self) -> None:
        with self.conf.open("a") as conf:
            conf.write("BurstBufferType=burst_buffer/lua\n")
        (self.root / "burst_buffer.conf").write_text("Directive=BB\n")
        (self.root / "burst_buffer.lua").write_text(PLUGIN.replace("@ROOT@", str(self.root)))
        (self.root / "bb").mkdir()
        super().start_controller()


@pytest.fixture(scope="module")
def slurm() -> Iterator[LocalSlurm]:
    reason = missing()
    if reason is None and not any(Path(each, "burst_buffer_lua.so").exists() for each in PLUGINS):
        reason = "this Slurm has no burst_buffer/lua plugin"
    if reason is not None:
        pytest.skip(reason)
    root = Path(tempfile.mkdtemp(prefix="slurm-bb-", dir="/tmp"))
    with BufferedSlurm(root, nodes=2) as running:
        yield running


def submitted(slurm: LocalSlurm, script: Path) -> subprocess.CompletedProcess[str]:
    """Slurm refuses burst buffers of root."""
    return subprocess.run(
        ["runuser", "-u", "nobody", "--", "sbatch", "--parsable", str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env=slurm.environment,
        cwd=script.parent,
    )


@pytest.fixture
def folder(slurm: LocalSlurm) -> Path:
    """Where everybody may read and write."""
    made = Path(tempfile.mkdtemp(dir=slurm.root))
    made.chmod(0o777)
    return made


def script_of(folder: Path, directives: list[str], *program: str) -> Path:
    """A batch script with directives, of which the last line is replaced by a program."""
    plan = ChainPlan("c", "buffered", "dependent", (1,), 1, 120.0, str(folder), "python")
    lines = batch_script(ChainFiles(folder), replace(plan, directives=tuple(directives)), 1)
    text = re.sub("^exec .*", lambda _: f"exec {shlex.join(program)}", lines, flags=re.MULTILINE)
    script = folder / "job.sh"
    script.write_text(re.sub("(?<=--output=).*", str(folder / "log"), text))
    return script


def test_the_site_copies_the_tokens_before_the_job_starts(slurm: LocalSlurm, folder: Path) -> None:
    content = bytes(range(256)) * 1000
    (folder / "train.bin").write_bytes(content)
    (folder / "train.json").write_text("{}")
    job = load_job(
        None,
        [
            "data.source=tokens",
            f'data.train=["{folder}/train.bin"]',
            "staging.burst_buffer=lines",
            f"staging.burst_buffer_lines={LINES}",
            'staging.directory="$BB_JOB"',
        ],
    )
    done = folder / "done"
    check = f'cmp "$BB_JOB/train.bin" train.bin && ls "$BB_JOB" > {done}.new && '
    script = script_of(folder, job_directives(job), "sh", "-c", f"{check} mv {done}.new {done}")
    sent = submitted(slurm, script)
    assert sent.returncode == 0, sent.stderr
    wait_for(done, slurm, folder)
    assert done.read_text().split() == ["train.bin", "train.json"]


def test_a_plugin_that_refuses_is_heard(slurm: LocalSlurm, folder: Path) -> None:
    sent = submitted(slurm, script_of(folder, ["#BB persistent name=x"], "true"))
    assert sent.returncode != 0
    assert "urst buffer" in sent.stderr or "no folder is asked for" in sent.stderr


def wait_for(file: Path, slurm: LocalSlurm, folder: Path) -> None:
    deadline = time.monotonic() + 60.0
    while not file.exists():
        log = (folder / "log").read_text() if (folder / "log").exists() else ""
        assert time.monotonic() < deadline, f"{slurm.run('squeue', '-o', '%i %T %r')}\n{log}"
        time.sleep(0.2)
