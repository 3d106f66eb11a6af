"""CPU and memory limits of the control group that this process runs in (versions 1 and 2)."""

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

# Version 1 writes "no limit" as the largest multiple of a page below 2**63.
NO_LIMIT_BYTES = 2**60


def cpu_limit_cores(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Returns the tightest CPU quota of this process' groups in cores, or None without one."""
    found = [
        limit
        for group in _groups(root, membership, "cpu")
        if (limit := _cpu_limit_of(group)) is not None
    ]
    return min(found, default=None)


def memory_limit_bytes(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Returns the tightest memory limit of this process' groups in bytes, or None without one."""
    found = [
        limit
        for group in _groups(root, membership, "memory")
        for file in ("memory.max", "memory.limit_in_bytes")
        if (limit := parse_memory_limit(_text(group / file))) is not None
    ]
    return min(found, default=None)


def memory_available_bytes(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Returns what this process' groups may still take in bytes, or None without a limit.

    File pages count as free, since the kernel drops them for whoever needs memory; those of tmpfs
    do not.
    """
    found = []
    for group in _groups(root, membership, "memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = parse_memory_limit(_text(group / limit_file))
            used = _text(group / used_file).strip()
            if limit is not None and used:
                pages = parse_file_pages(_text(group / "memory.stat"))
                found.append(max(limit - int(used) + pages, 0))
    return min(found, default=None)


def parse_file_pages(text: str) -> int:
    """Reads the bytes of a file system's pages from `memory.stat`, of the group and those below."""
    pairs = [line.split() for line in text.splitlines()]
    values = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    names = ("active_file", "inactive_file")
    # Version 1 has its own figures and, with this prefix, those of the groups below as well.
    return sum(values.get(f"total_{name}", values.get(name, 0)) for name in names)


def parse_cpu_max(text: str) -> float | None:
    """Reads version 2's `cpu.max`, "quota period" in microseconds, as cores.

    Args:
        text: For example "150000 100000" (1.5 cores) or "max 100000" (no limit).
    """
    words = text.split()
    if not words or words[0] == "max":
        return None
    period = float(words[1]) if len(words) > 1 else 100_000.0
    return float(words[0]) / period


def parse_cfs_quota(quota: str, period: str) -> float | None:
    """Reads version 1's quota and period, both in microseconds, as cores; -1 is no limit."""
    if not quota.strip() or not period.strip() or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def parse_memory_limit(text: str) -> int | None:
    """Reads a memory limit in bytes; "max" and version 1's huge number are no limit."""
    word = text.strip()
    if not word or word == "max":
        return None
    limit = int(word)
    return None if limit >= NO_LIMIT_BYTES else limit


def parse_membership(text: str, controller: str) -> list[str]:
    """Returns the groups of a process that hold a controller, from `/proc/<pid>/cgroup`.

    Args:
        text: Lines "id:controllers:/path"; version 2 has id 0 and no controllers.
        controller: "cpu" or "memory".
    """
    groups = []
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers or controller in controllers.split(","):
            groups.append(path)
    return groups


def usable_cores(affinity_cores: int, quota_cores: float | None) -> float:
    """Returns how many cores' worth of time the process may use."""
    return affinity_cores if quota_cores is None else min(float(affinity_cores), quota_cores)


def _groups(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    # A limit of any ancestor binds. Inside a container the path of the host may not be mounted;
    # then the mount's own root is the group.
    mounts = [root, root / "unified", root / controller, root / f"{controller},{controller}acct"]
    paths = parse_membership(_text(membership), controller) or ["/"]
    seen: set[Path] = set()
    for mount in mounts:
        for path in paths:
            group = mount / path.lstrip("/")
            for candidate in (group, *group.parents):
                if candidate.is_relative_to(mount) and candidate not in seen:
                    seen.add(candidate)
                    yield candidate


def _cpu_limit_of(group: Path) -> float | None:
    unified = parse_cpu_max(_text(group / "cpu.max"))
    if unified is not None:
        return unified
    quota = _text(group / "cpu.cfs_quota_us")
    return parse_cfs_quota(quota, _text(group / "cpu.cfs_period_us"))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
