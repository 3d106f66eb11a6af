"""How long a process has been there."""

import subprocess
import sys
import time

import psutil

from outlast.records.process import age_seconds


def test_age_counts_from_the_start_of_the_process():
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    after = time.clock_gettime(time.CLOCK_BOOTTIME)
    try:
        age = age_seconds(psutil.Process(process.pid))
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        # The kernel counts in hundredths.
        assert now - after - 0.02 <= age <= now - before + 0.02
    finally:
        process.communicate(b"\n")
