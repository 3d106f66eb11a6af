"""Every recorded figure is honest and plausible, and names lead to the right device."""

import pytest

from outlast.errors import HardwareError
from outlast.hardware import (
    Device,
    Figure,
    Quantity,
    Unavailable,
    device,
    device_reported_as,
    devices,
    link,
    links,
    node,
    nodes,
)
from outlast.hardware.catalogue import Link, parse_facts
from outlast.hardware.figure import KINDS, UNITS, unit_of

FACTS = [*devices(), *links(), *nodes()]
GIB = 2**30


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.key)
def test_every_figure_has_a_unit_a_kind_and_a_source(fact):
    quantities = {name: value for name, value in vars(fact).items() if isinstance(value, Quantity)}
    assert quantities
    for name, quantity in quantities.items():
        if isinstance(quantity, Unavailable):
            assert len(quantity.reason) > 20, name
            continue
        assert quantity.unit == unit_of(name)
        assert quantity.unit in UNITS.values()
        assert quantity.kind in KINDS
        assert len(quantity.source) > 10, name
        assert quantity.value > 0


def test_every_promised_device_link_and_node_is_there():
    assert {d.key for d in devices()} >= {
        "a100-sxm-80", "h100-sxm", "h100-96gb-hbm2e", "h200-sxm", "b200-sxm", "gb200",
        "mi250x", "mi300x", "epyc-9654", "xeon-8480plus",
    }  # fmt: skip
    assert {"nvlink4", "pcie5-x16", "infiniband-ndr", "ethernet-10g"} <= {x.key for x in links()}
    assert {"dgx-h100", "mi300x-8x", "cpu-machine"} <= {n.key for n in nodes()}


def ordered(fact: Device | Link, *names: str) -> None:
    values = [q.value for n in names if isinstance(q := getattr(fact, n), Figure)]
    assert values == sorted(values), (fact.key, names, values)


@pytest.mark.parametrize("known", devices(), ids=lambda known: known.key)
def test_devices_obey_physics(known):
    ordered(known, "fp32_peak_flop_per_s", "tf32_peak_flop_per_s", "bf16_peak_flop_per_s")
    ordered(known, "bf16_matmul_flop_per_s", "bf16_peak_flop_per_s", "fp8_peak_flop_per_s")
    ordered(known, "fp8_matmul_flop_per_s", "fp8_peak_flop_per_s")
    ordered(known, "bf16_matmul_flop_per_s", "fp8_matmul_flop_per_s")
    ordered(known, "memory_achieved_bytes_per_s", "memory_peak_bytes_per_s")
    ordered(known, "fabric_bytes_per_s", "scale_up_bytes_per_s", "memory_peak_bytes_per_s")
    ordered(known, "pairwise_bytes_per_s", "scale_up_bytes_per_s")
    ordered(known, "idle_watts", "blocked_watts", "power_limit_watts")


@pytest.mark.parametrize("known", links(), ids=lambda known: known.key)
def test_links_obey_physics(known):
    ordered(known, "allreduce_bytes_per_s", "peak_bytes_per_s")
    ordered(known, "pairwise_allreduce_bytes_per_s", "pairwise_bytes_per_s", "peak_bytes_per_s")


@pytest.mark.parametrize("known", nodes(), ids=lambda known: known.key)
def test_nodes_refer_to_known_devices_and_links_and_agree_with_them(known):
    if known.device is None:
        assert known.device_count == 0
        return
    part = device(known.device)
    assert part.scale_up_bytes_per_s.value == link(known.scale_up).peak_bytes_per_s.value
    if known.network is not None:
        per_device = known.network_bytes_per_s.value / known.device_count
        assert (
            per_device
            == part.fabric_bytes_per_s.value
            == link(known.network).peak_bytes_per_s.value
        )
    if isinstance(known.power_limit_watts, Figure):
        assert known.power_limit_watts.value > known.device_count * part.power_limit_watts.value


@pytest.mark.parametrize(
    ("name", "memory_bytes", "key"),
    [
        ("NVIDIA H200", 143_771 * 2**20, "h200-sxm"),
        ("NVIDIA H200", None, "h200-sxm"),
        ("NVIDIA H100 80GB HBM3", 81_559 * 2**20, "h100-sxm"),
        ("nvidia h100 80gb hbm3", None, "h100-sxm"),
        ("NVIDIA H100", 95_830 * 2**20, "h100-96gb-hbm2e"),
        ("NVIDIA A100-SXM4-80GB", 81_920 * 2**20, "a100-sxm-80"),
        ("AMD Instinct MI300X", 192 * GIB, "mi300x"),
        ("AMD Instinct MI250X", 64 * GIB, "mi250x"),
        ("NVIDIA B200", 183_359 * 2**20, "b200-sxm"),
        ("AMD EPYC 9654 96-Core Processor", None, "epyc-9654"),
    ],
)
def test_reported_names_lead_to_the_device(name, memory_bytes, key):
    found = device_reported_as(name, memory_bytes)
    assert isinstance(found, Device)
    assert found.key == key


@pytest.mark.parametrize(
    ("name", "memory_bytes", "reason"),
    [
        ("NVIDIA H100", None, "give memory_bytes"),
        ("NVIDIA H100", 81_559 * 2**20, "is not the"),
        ("NVIDIA H100 PCIe", 81_559 * 2**20, "no facts"),
        ("NVIDIA H200 NVL", 143_771 * 2**20, "no facts"),
        ("NVIDIA A100-SXM4-80GB", 40 * GIB, "is not the"),
        ("NVIDIA H200 MIG 1g.18gb", 18 * GIB, "MIG slice"),
        ("GeForce", None, "no facts"),
    ],
)
def test_a_doubtful_name_is_not_guessed(name, memory_bytes, reason):
    found = device_reported_as(name, memory_bytes)
    assert isinstance(found, Unavailable)
    assert reason in found.reason


def test_the_two_h100_differ():
    sxm, hbm2e = device("h100-sxm"), device("h100-96gb-hbm2e")
    assert sxm.power_limit_watts.value == 700
    assert hbm2e.power_limit_watts.value == 500
    assert isinstance(hbm2e.bf16_peak_flop_per_s, Unavailable)
    with pytest.raises(HardwareError, match="not published"):
        _ = hbm2e.bf16_peak_flop_per_s.value


@pytest.mark.parametrize(
    ("look_up", "wrong", "hint"),
    [
        (device, "h200", "did you mean h200-sxm"),
        (link, "nvlink-4", "did you mean nvlink4"),
        (node, "dgx_h100", "did you mean dgx-h100"),
        (device, "zzz", "known are a100-sxm-80"),
    ],
)
def test_unknown_names_get_a_hint(look_up, wrong, hint):
    with pytest.raises(HardwareError, match=hint):
        look_up(wrong)


def test_unavailable_is_neither_a_number_nor_a_truth_value():
    nothing = Unavailable("no sensor", "buy one")
    with pytest.raises(TypeError):
        _ = nothing * 2
    with pytest.raises(TypeError):
        _ = 1.0 + nothing
    with pytest.raises(TypeError, match="isinstance"):
        bool(nothing)
    with pytest.raises(TypeError):
        float(nothing)
    assert str(nothing) == "unavailable: no sensor (buy one)"


@pytest.mark.parametrize(
    ("figure", "message"),
    [
        ('speed = { value = 1, kind = "measured", source = "s" }', "unknown figures: speed"),
        ('peak_bytes_per_s = { value = 1, kind = "guess", source = "s" }', "is none of"),
        ('peak_bytes_per_s = { value = 1, kind = "measured", source = "t" }', "not in .sources"),
    ],
)
def test_a_wrong_fact_file_is_refused(figure, message):
    text = f'[sources]\ns = "somewhere"\n[x]\nname = "X"\nscope = "host"\n[x.figures]\n{figure}\n'
    with pytest.raises(HardwareError, match=message):
        parse_facts(text, Link)


def test_a_name_without_a_unit_is_refused():
    assert unit_of("bf16_peak_flop_per_s") == "FLOP/s"
    assert unit_of("peak_bytes_per_s") == "B/s"
    assert unit_of("memory_bytes") == "B"
    with pytest.raises(HardwareError, match="does not end with a unit"):
        unit_of("time")
