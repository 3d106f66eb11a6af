"""Cluster files, shorthands, this machine: figures with sources, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import PlanError
from outlast.hardware import (
    Figure,
    Gpu,
    Gpus,
    Node,
    Unavailable,
    device,
    devices,
    nodes,
    this_machine,
)
from outlast.plan.cluster import Cluster
from outlast.plan.cluster_file import cluster_of, here, read_cluster, shipped_clusters, this_cluster

H100 = '[cluster]\nnode = "dgx-h100"\nnodes = 8\n'


def test_a_catalogue_node_gives_every_figure_with_its_source() -> None:
    cluster = read_cluster(H100)
    assert (cluster.device, cluster.devices, cluster.fast_domain) == ("h100-sxm", 64, 8)
    assert cluster.peak_flop_per_s["bf16"] == 989e12
    assert cluster.matmul_flop_per_s["bf16"] == 794.5e12
    assert cluster.matmul_flop_per_s["fp16"] == cluster.matmul_flop_per_s["bf16"]
    assert cluster.fabric_bytes_per_s == 50e9
    assert cluster.sources["matmul_flop_per_s.bf16"].origin == "measured"
    assert cluster.sources["peak_flop_per_s.bf16"].origin == "datasheet"
    # What nobody checked keeps that word, and what nobody published says what it is taken from.
    assert cluster.sources["power.idle_watts"].origin == "unverified"
    assert cluster.sources["power.blocked_watts"].origin == "prior"
    assert cluster.sources["matmul_flop_per_s.fp32"].origin == "prior"
    assert cluster.power is not None
    assert cluster.power.node_watts == pytest.approx(0.76 * 10_200 - 8 * 700)


def test_every_number_of_every_shipped_cluster_has_a_source() -> None:
    assert set(shipped_clusters()) >= {"h100x64", "a100x512", "gb200-nvl72", "mi300x", "cpu"}
    for name in shipped_clusters():
        cluster = cluster_of(name)
        assert cluster.name == name
        for field in ("memory_bytes", "memory_bytes_per_s", "fast_bytes_per_s"):
            assert cluster.sources[field].value == getattr(cluster, field) > 0.0
            assert cluster.sources[field].text
            assert cluster.sources[field].unit in ("B", "B/s")
        for table in ("peak_flop_per_s", "matmul_flop_per_s"):
            for precision, value in getattr(cluster, table).items():
                assert cluster.sources[f"{table}.{precision}"].value == value
        for cause in cluster.failures:
            assert cluster.sources[f"failures.{cause.name}"].value == cause.per_node_day


def test_a_files_own_figures_win_and_are_said_to_be_its_own() -> None:
    cluster = read_cluster(
        H100
        + "fabric_bytes_per_s = 25e9\nspares = 2\n"
        + "[cluster.matmul_flop_per_s]\nbf16 = 700e12\n"
        + "[power]\npue = 1.2\n[prices]\nper_kwh = 0.1\ncurrency = 'EUR'\n"
        + "[storage]\nshared_bytes_per_s = 3e9\n"
        + "[sources]\nfabric_bytes_per_s = 'measured: nccl-tests'\n"
    )
    assert (cluster.fabric_bytes_per_s, cluster.matmul_flop_per_s["bf16"]) == (25e9, 700e12)
    assert cluster.sources["fabric_bytes_per_s"].origin == "measured"
    assert cluster.sources["matmul_flop_per_s.bf16"].origin == "given"
    assert cluster.power is not None
    assert cluster.power.pue == 1.2
    assert cluster.power.limit_watts == 700.0
    assert (cluster.prices.per_kwh, cluster.prices.currency) == (0.1, "EUR")
    assert cluster.prices.per_device_hour is None
    assert cluster.storage.shared_bytes_per_s == 3e9
    assert cluster.spares == 2


def test_racks_join_seventy_two_devices() -> None:
    cluster = cluster_of("gb200-nvl72")
    assert (cluster.devices_per_node, cluster.fast_domain, cluster.devices) == (4, 72, 576)
    assert cluster.sources["fabric_bytes_per_s"].origin == "unverified"
    one_rack = cluster_of("gb200x72")
    assert (one_rack.nodes, one_rack.fast_domain) == (18, 72)
    assert "fast link" in one_rack.sources["fabric_bytes_per_s"].text
    with pytest.raises(PlanError, match="fabric_bytes_per_s"):
        cluster_of("gb200x144")


def test_a_device_of_two_dies_is_two_devices() -> None:
    cluster = cluster_of("8xmi250x")
    whole = device("mi250x")
    assert cluster.devices == 8
    assert cluster.memory_bytes == whole.memory_bytes.value / 2
    assert cluster.peak_flop_per_s["bf16"] == whole.bf16_peak_flop_per_s.value / 2


@pytest.mark.parametrize(
    ("text", "key", "count"),
    [
        ("h100x64", "h100-sxm", 64),
        ("64xh100-sxm", "h100-sxm", 64),
        ("h200 x 16", "h200-sxm", 16),
        ("a100x8", "a100-sxm-80", 8),
        ("mi300xx8", "mi300x", 8),
        ("h100x1", "h100-sxm", 1),
        ("h100x3", "h100-sxm", 3),
        ("h100x100000", "h100-sxm", 100_000),
    ],
)
def test_shorthands(text: str, key: str, count: int) -> None:
    cluster = cluster_of(text)
    assert (cluster.device, cluster.devices) == (key, count)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h100x12", "give 8 or 16"),
        ("h1o0x8", "did you mean h100-sxm"),
        ("h100x0", "no device"),
        ("absent.toml", "cannot be read"),
        ("nonsense", "h100x64"),
        ("", "no cluster is named ''"),
    ],
)
def test_wrong_names_are_answered_with_right_ones(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        cluster_of(text)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("fabric_byte_per_s = 1e9\n", "did you mean cluster.fabric_bytes_per_s"),
        ("pue = 1.2\n", "did you mean power.pue"),
        ("[pover]\nidle_watts = 1.0\n", "did you mean power"),
        ("[power]\npeu = 1.2\n", "did you mean power.pue"),
        ("nodes = 9\n", "no TOML"),
        ("spares = -1\n", "spares = -1"),
        ("spares = 1.5\n", "spares = 1.5"),
        ("fabric_bytes_per_s = 0\n", "fabric_bytes_per_s = 0"),
        ("fabric_bytes_per_s = nan\n", "fabric_bytes_per_s = nan"),
        ("fabric_bytes_per_s = inf\n", "fabric_bytes_per_s = inf"),
        (f"fabric_bytes_per_s = 1{'0' * 400}\n", "give a number"),
        ("fabric_bytes_per_s = 'fast'\n", "fabric_bytes_per_s = 'fast'"),
        ("fabric_bytes_per_s = true\n", "fabric_bytes_per_s = True"),
        ("fabric_bytes_per_s = 500e9\n", "exceeds fast_bytes_per_s"),
        ("fast_bytes_per_s = 1e9\n", "exceeds fast_bytes_per_s"),
        ("memory_bytes = 192e9\n", "not that of h100-sxm"),
        ("memory_bytes = 0\n", "memory_bytes = 0"),
        ("devices = 60\n", "devices = 60 is not nodes = 8 x"),
        ("devices_per_node = 16\n", "holds 8"),
        ("fast_domain = 12\n", "fast_domain = 12"),
        ("device = 'a100-sxm-80'\n", "holds h100-sxm"),
        ("[cluster.matmul_flop_per_s]\nbf16 = 990e12\n", "exceeds peak_flop_per_s.bf16"),
        ("[cluster.peak_flop_per_s]\nbf16 = 1979e12\n", "without sparsity"),
        ("[cluster.peak_flop_per_s]\nbf16 = 989\n", "peak_flop_per_s.bf16 = 989 is not that"),
        ("[cluster.matmul_flop_per_s]\nbf16 = 7e12\n", "best dense product"),
        ("memory_bytes_per_s = 26.8e12\n", "memory_bytes_per_s = 2.68e.13 is not that of h100"),
        ("memory_bytes_per_s = 3.35e9\n", "memory_bytes_per_s = 3.35e.09 is not that of h100"),
        ("fast_bytes_per_s = 900e9\n", "in one direction"),
        ("fabric_bytes_per_s = 400e9\n", "are these bits"),
        ("fabric_latency_seconds = 5\n", "give seconds, e.g. 5e-6"),
        ("[power]\nlimit_watts = 7000.0\n", "power.limit_watts = 7000 is not that of h100-sxm"),
        ("[power]\nlimit_watts = 0.7\nidle_watts = 0.1\nblocked_watts = 0.2\n", "limit_watts"),
        ("[power]\nidle_watts = 0.0\n", "power.idle_watts = 0 is not that of h100-sxm"),
        ("[cluster.peak_flop_per_s]\nint8 = 1979e12\n", "no precision"),
        ("peak_flop_per_s = 1e15\n", "by precision"),
        ("[prices]\nper_kwh = -0.1\n", "per_kwh = -0.1"),
        ("[power]\npue = 0.5\n", "pue = 0.5"),
        ("[power]\npue = 120.0\n", "pue = 120: give a ratio"),
        ("[power]\nidle_watts = 900.0\n", "idle_watts = 900"),
        ("[failures]\nname = 'x'\n", r"\[\[failures\]\]"),
        ("[[failures]]\nname = 'x'\n", "no per_node_day"),
        ("[[failures]]\nname = 'x'\nper_node_day = 1\nrepair = 3\n", "failures.repair_hours"),
        ("[[failures]]\nname = 'x'\nper_node_day = 1e6\n", "x.per_node_day = 1e\\+06 is more than"),
        ("failure_rates = 'rsc1'\n", "rsc-1"),
        ("[sources]\nfabric = 'x'\n", "sources.fabric"),
    ],
)
def test_wrong_files_are_refused_in_a_sentence(more: str, said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        read_cluster(H100 + more)
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[power]\npue = 1.1\n", r"no \[cluster\]"),
        ("[cluster]\nnodes = 1\n", "neither node nor device"),
        ("[cluster]\nnode = 'cpu-machine'\n", "has no device"),
        ("[cluster]\nnode = 'dgx-h10'\n", "did you mean dgx-h100"),
        ("[cluster]\ndevice = 'h100'\ndevices_per_node = 8\n", "did you mean h100-sxm"),
        ("[cluster]\ndevice = 'h100-sxm'\n", "devices_per_node is not given"),
        ("[cluster]\ndevice = 'h100-96gb-hbm2e'\ndevices_per_node = 4\n", "peak_flop_per_s"),
        ("[cluster]\nnode = 'mi300x-8x'\nnodes = 2\n", "fabric_bytes_per_s is not known"),
        ("[cluster]\ndevice = 'epyc-9654'\ndevices_per_node = 1\n", "memory_bytes is not known"),
    ],
)
def test_what_nobody_knows_must_be_given(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        read_cluster(text)


def test_a_part_of_ones_own_needs_its_figures_and_no_catalogue() -> None:
    text = (
        "[cluster]\ndevice = 'ours'\ndevices_per_node = 4\nnodes = 2\nmemory_bytes = 64e9\n"
        "memory_bytes_per_s = 1e12\nfast_bytes_per_s = 100e9\nfabric_bytes_per_s = 10e9\n"
        "peak_flop_per_s = { bf16 = 200e12 }\n"
    )
    cluster = read_cluster(text)
    assert cluster.device == "ours"
    assert cluster.power is None
    assert not [field for field in cluster.sources if field.startswith("power")]
    # The share of the peak is that of parts that were measured, and says so.
    assert 0.5 < cluster.matmul_flop_per_s["bf16"] / 200e12 < 0.9
    assert cluster.sources["matmul_flop_per_s.bf16"].origin == "prior"


def test_a_part_of_ones_own_is_compared_with_no_catalogue() -> None:
    text = (
        "[cluster]\ndevice = 'ours'\ndevices_per_node = 4\nnodes = 2\nmemory_bytes = 64e9\n"
        "memory_bytes_per_s = 1e14\nfast_bytes_per_s = 1e13\nfabric_bytes_per_s = 1e12\n"
        "peak_flop_per_s = { bf16 = 1e18 }\n"
        "[power]\nlimit_watts = 9e3\nblocked_watts = 1.0\nidle_watts = 0.0\n"
    )
    assert read_cluster(text).peak_flop_per_s["bf16"] == 1e18
    with pytest.raises(PlanError, match=r"peak_flop_per_s\.bf16 = 1e\+18 is not that of b200-sxm"):
        read_cluster(text.replace("'ours'", "'b200-sxm'").replace("64e9", "192e9"))


def test_slower_parts_of_a_known_device_are_believed() -> None:
    cluster = read_cluster(
        H100
        + "fabric_bytes_per_s = 125e6\nfast_bytes_per_s = 50e9\nmemory_bytes_per_s = 2.9e12\n"
        + "fabric_latency_seconds = 0.1\n[cluster.matmul_flop_per_s]\nbf16 = 300e12\n"
        + "[power]\nlimit_watts = 350.0\nidle_watts = 120.0\nblocked_watts = 130.0\n"
    )
    assert cluster.fabric_bytes_per_s == 125e6
    assert cluster.power is not None
    assert cluster.power.limit_watts == 350.0


def test_a_fast_domain_ends_with_the_devices() -> None:
    assert read_cluster(H100 + "fast_domain = 4096\n").fast_domain == 64
    assert cluster_of("gb200x8").fast_domain == 8


@pytest.mark.parametrize("sold", [each for each in nodes() if each.device is not None])
def test_no_node_of_the_catalogue_contradicts_its_own_device(sold: Node) -> None:
    fabric = "" if isinstance(sold.network_bytes_per_s, Figure) else "fabric_bytes_per_s = 25e9\n"
    if sold.device == "h100-96gb-hbm2e":
        fabric += "peak_flop_per_s = { bf16 = 900e12 }\n"
    cluster = read_cluster(f"[cluster]\nnode = '{sold.key}'\nnodes = 2\n{fabric}")
    assert cluster.nodes == 2


def test_failures_that_nobody_gave_are_assumed_from_published_ones() -> None:
    h100, a100 = read_cluster(H100), cluster_of("a100x512")
    total = sum(cause.per_node_day for cause in h100.failures)
    assert total == pytest.approx(419 / (54 * 2048))
    assert [cause.name for cause in h100.failures if cause.silent] == ["silent corruption"]
    assert sum(cause.per_node_day for cause in a100.failures) == 6.5e-3
    for cluster in (h100, a100):
        for cause in cluster.failures:
            assert cluster.sources[f"failures.{cause.name}"].text.startswith("assumed")
    other = read_cluster(H100 + "failure_rates = 'rsc-2'\n")
    assert sum(cause.per_node_day for cause in other.failures) == 2.34e-3
    own = read_cluster(H100 + "[[failures]]\nname = 'fan'\nper_node_day = 0.01\n")
    assert [cause.name for cause in own.failures] == ["fan"]
    assert own.sources["failures.fan"].origin == "given"
    assert read_cluster(H100 + "failure_rates = 'none'\n").failures == ()


def test_files_are_read_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("\ufeff" + H100, encoding="utf-8")
    assert cluster_of(str(path)) == read_cluster(path)
    assert read_cluster(path).name == "mine"


def test_this_machine_is_known_or_the_sentence_says_how_to_measure_it() -> None:
    try:
        cluster = this_cluster()
    except PlanError as error:
        assert "outlast plan calibrate" in str(error)  # noqa: PT017
        return
    assert cluster.nodes == 1
    assert cluster.memory_bytes > 0.0


def test_a_machine_with_known_processors_shares_them_among_its_ranks() -> None:
    machine = replace(
        this_machine(),
        cpu_facts=device("xeon-8480plus"),
        usable_cores=28.0,
        gpus=Unavailable("no GPU"),
        memory_total_bytes=256 * 10**9,
        memory_limit_bytes=None,
    )
    one, two = (here(ranks, machine)["cluster"] for ranks in (1, 2))
    assert one["peak_flop_per_s"]["fp32"] == 5e12 / 2
    assert two["peak_flop_per_s"]["fp32"] == 5e12 / 4
    assert (one["memory_bytes"], two["memory_bytes"]) == (256e9, 128e9)


def test_a_machine_with_gpus_is_a_node_of_them() -> None:
    gpu = Gpu(
        index=0,
        name="NVIDIA H100 80GB HBM3",
        uuid="GPU-0",
        memory_bytes=85 * 10**9,
        mig_enabled=False,
        power_limit_watts=700.0,
        energy_counter=True,
        facts=device("h100-sxm"),
    )
    machine = replace(
        this_machine(), gpus=Gpus(driver_version="1", installed_count=4, visible=(gpu,) * 4)
    )
    assert here(0, machine)["cluster"]["devices_per_node"] == 4
    with pytest.raises(PlanError, match="4 are visible"):
        here(8, machine)
    unknown = replace(gpu, facts=Unavailable("no facts are recorded for it"))
    with pytest.raises(PlanError, match="outlast plan calibrate"):
        here(
            0,
            replace(machine, gpus=Gpus(driver_version="1", installed_count=1, visible=(unknown,))),
        )


def usable(cluster: Cluster) -> bool:
    """Whether every number can be computed with."""
    numbers = [
        cluster.memory_bytes,
        cluster.memory_bytes_per_s,
        cluster.fast_bytes_per_s,
        cluster.fabric_bytes_per_s,
        *cluster.peak_flop_per_s.values(),
        *cluster.matmul_flop_per_s.values(),
    ]
    return all(math.isfinite(number) and number > 0.0 for number in numbers)


@settings(max_examples=60, deadline=None)
@given(
    key=st.sampled_from([part.key for part in devices()]),
    nodes=st.integers(1, 20_000),
    per_node=st.sampled_from([1, 2, 4, 8, 16]),
    fabric=st.floats(-1e9, 1e12) | st.sampled_from([math.nan, math.inf]),
)
def test_any_file_gives_usable_numbers_or_one_sentence(
    key: str, nodes: int, per_node: int, fabric: float
) -> None:
    text = (
        f"[cluster]\ndevice = '{key}'\nnodes = {nodes}\ndevices_per_node = {per_node}\n"
        f"fabric_bytes_per_s = {fabric!r}\n"
    )
    try:
        cluster = read_cluster(text)
    except PlanError as error:
        assert str(error)  # noqa: PT017
    else:
        assert usable(cluster)
        assert cluster.devices == nodes * per_node
        matmul = device(key).bf16_matmul_flop_per_s
        if isinstance(matmul, Figure):
            assert cluster.matmul_flop_per_s["bf16"] <= matmul.value
