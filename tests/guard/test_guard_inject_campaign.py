"""Rates and tables from injections and findings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.guard.findings import Finding
from outlast.guard.inject import Injection, Rate, campaign


def injection(step, site="linear.output", module="a", changed=True, fault=0, occurrence=0):
    return Injection(
        fault=fault,
        step=step,
        attempt=0,
        site=site,
        module=module,
        occurrence=occurrence,
        index=0,
        elements=1,
        bits=(3,),
        before=1.0,
        after=2.0,
        changed=changed,
        relative=0.1,
    )


def finding(step, operation="linear.forward", module="a", outcome="corrected"):
    return Finding(step, module, operation, "cpu", 0, 1, 9.0, outcome)


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    [
        (0, 10, 0.0, 0.308498),  # 1 - 0.025^(1/10)
        (5, 10, 0.187086, 0.812914),
        (10, 10, 0.691502, 1.0),
        (1, 20, 0.001265, 0.248733),
        (0, 0, 0.0, 1.0),
    ],
)
def test_clopper_pearson_intervals_are_the_known_ones(count, total, low, high):
    assert Rate(count, total).interval() == pytest.approx((low, high), abs=1e-6)


def test_no_false_alarm_in_three_million_is_less_than_one_in_a_million():
    assert Rate(0, 3_000_000).at_most() < 1e-6
    assert Rate(0, 2_900_000).at_most() > 1e-6


@given(st.integers(0, 50), st.integers(0, 50))
def test_an_interval_holds_the_share_and_mirrors(count, rest):
    rate, mirror = Rate(count, count + rest), Rate(rest, count + rest)
    low, high = rate.interval()
    assert low <= (0.5 if rate.share is None else rate.share) <= high
    assert mirror.interval() == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_harmful_events_are_detected_corrected_or_missed_and_the_rest_is_masked():
    found = campaign(
        [injection(step) for step in range(6)],
        # Step 1 is masked but found, step 2 is found and stays wrong.
        [finding(0), finding(1), finding(2), finding(2, outcome="persistent")],
        harmful_steps={0, 2, 3, 4},
    )
    row = found.rows[0]
    assert (row.site, row.injected) == ("linear.output", 6)
    assert row.masked == Rate(2, 6)
    assert row.harmful == Rate(4, 6)
    assert row.detected == Rate(2, 4)
    assert row.corrected == Rate(1, 4)
    assert row.missed == Rate(2, 4)
    assert row.detected_of_all == Rate(3, 6)
    assert found.rows[-1].site == "all"
    assert found.rows[-1].injected == 6


def test_an_injection_that_changed_nothing_is_masked_whatever_came_of_its_step():
    found = campaign([injection(0, changed=False)], [], {0})
    assert found.rows[0].masked == Rate(1, 1)
    assert found.rows[0].missed == Rate(0, 0)


def test_strikes_of_one_fault_in_one_step_are_one_event():
    strikes = [injection(0, occurrence=n) for n in range(3)]
    found = campaign(strikes, [finding(0, outcome="persistent")], {0})
    assert found.rows[0].injected == 1


def test_only_checks_of_the_site_and_its_module_count_as_detection():
    harmful = {0}
    for other in (finding(0, module="b"), finding(0, operation="norm.forward"), finding(1)):
        assert campaign([injection(0)], [other], harmful).rows[0].missed == Rate(1, 1)
    at_rest = [injection(0, site="weight")]
    assert campaign(at_rest, [finding(0, "weight")], harmful).rows[0].missed == Rate(0, 1)


def test_a_finding_without_an_injection_is_a_false_alarm():
    found = campaign([injection(0)], [finding(0), finding(3), finding(5)], {0}, checks=1000)
    assert found.false_alarms == Rate(2, 1000)


def test_latency_is_counted_within_the_patience():
    module = "layers.0.weight.exp_avg"
    strikes = [injection(step, site="optimizer.state", module=module) for step in (0, 10)]
    findings = [
        finding(2, "rest", "optimizer"),
        finding(10, "optimizer.moments", "layers.0.weight"),
        finding(11, "optimizer.moments", "layers.0.weigh"),
    ]
    found = campaign(strikes, findings, {0, 10}, patience=3)
    assert found.rows[0].detected == Rate(2, 2)
    assert found.rows[0].mean_latency_steps == 1.0
    assert found.rows[0].longest_latency_steps == 2
    assert found.false_alarms.count == 0


def test_the_table_names_every_site_with_its_intervals():
    strikes = [injection(0), injection(1, site="linear.dw", fault=1)]
    text = campaign(strikes, [finding(0)], {0, 1}, checks=100).table()
    lines = text.splitlines()
    assert lines[0].split()[:5] == ["site", "injected", "masked", "harmful", "detected"]
    assert [line.split()[0] for line in lines[1:4]] == ["linear.output", "linear.dw", "all"]
    assert "1 (100 %, 2.5 to 100)" in lines[1]
    assert "false alarms: 0 in 100 checks, at most 0.03 per check at 95 %" in lines[-1]
