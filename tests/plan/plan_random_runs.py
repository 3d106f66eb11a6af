"""Random jobs on random clusters with random mechanisms, as the planner's laws are asked of them.

Sizes are drawn from where real ones lie and well beyond: one device to 100,000, models of a few
thousand parameters to a hundred trillion, clusters where nothing fails or everything all the time.
"""

from __future__ import annotations

import math

from hypothesis import strategies as st

from outlast.plan.api import Training
from outlast.plan.cluster import Cluster, FailureCause, Power, Prices, Storage
from outlast.plan.configuration import Configuration, Recovery, Settings
from outlast.plan.transformer import Transformer

FEW = st.sampled_from([1, 2, 4, 8])


def between(low: float, high: float) -> st.SearchStrategy[float]:
    """Log-uniform."""
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@st.composite
def transformers(draw: st.DrawFn) -> Transformer:
    """Dense ones and mixtures whose sizes any division by 1, 2, 4 or 8 suits."""
    kv_heads, queries = draw(st.sampled_from([8, 16, 64])), draw(st.sampled_from([1, 2, 8]))
    width = 8 * draw(st.integers(1, 5000))
    mixture = draw(st.booleans())
    return Transformer(
        layers=64 * draw(st.integers(1, 4)),
        hidden=64 * draw(st.integers(1, 1000)),
        heads=kv_heads * queries,
        kv_heads=kv_heads,
        head_width=draw(st.sampled_from([16, 64, 128])),
        intermediate=0 if mixture else width,
        gated=draw(st.booleans()),
        vocabulary=64 * draw(st.integers(1, 8000)),
        tied=draw(st.booleans()),
        experts=64 if mixture else 0,
        experts_per_token=draw(st.integers(1, 8)) if mixture else 0,
        expert_intermediate=width if mixture else 0,
        shared_intermediate=draw(st.sampled_from([0, width])) if mixture else 0,
    )


@st.composite
def causes(draw: st.DrawFn) -> tuple[FailureCause, ...]:
    """None, one or several; a node fails once in ten thousand years or every hour."""
    rate = st.one_of(st.just(0.0), between(1e-7, 24.0))
    found = (
        FailureCause(
            name="crash", per_node_day=draw(rate), detection_seconds=draw(between(1, 1e4))
        ),
        FailureCause(name="node", per_node_day=draw(rate), repair_hours=draw(between(0.01, 1e3))),
        FailureCause(
            name="rack",
            per_node_day=draw(rate),
            nodes_hit=draw(st.integers(2, 16)),
            repair_hours=draw(between(0.01, 100.0)),
        ),
        FailureCause(name="silent", per_node_day=draw(rate) / 100.0, silent=True),
    )
    return tuple(draw(st.sets(st.sampled_from(found), max_size=4)))


@st.composite
def clusters(draw: st.DrawFn, devices: int) -> Cluster:
    """At least so many devices of a part of one's own."""
    per_node = draw(st.sampled_from([1, 4, 8]))
    per_node = min(per_node, devices)
    matmul = {name: draw(between(1e12, 5e15)) for name in ("bf16", "fp8")}
    fast = draw(between(1e8, 2e12))
    idle = draw(st.floats(0.0, 300.0))
    blocked = idle + draw(st.floats(0.0, 300.0))
    rate = between(1e6, 1e13)
    return Cluster(
        name="drawn",
        device="own",
        nodes=-(-devices // per_node),
        devices_per_node=per_node,
        fast_domain=per_node,
        peak_flop_per_s={name: 1.3 * value for name, value in matmul.items()},
        matmul_flop_per_s=matmul,
        memory_bytes=draw(between(1e9, 1e12)),
        memory_bytes_per_s=draw(between(1e11, 2e13)),
        fast_bytes_per_s=fast,
        fabric_bytes_per_s=fast * draw(between(1e-3, 1.0)),
        fabric_latency_seconds=draw(st.sampled_from([0.0, 5e-6, 1e-3])),
        spares=draw(st.integers(0, 50)),
        power=Power(
            limit_watts=blocked + draw(st.floats(1.0, 1000.0)),
            blocked_watts=blocked,
            idle_watts=idle,
            node_watts=draw(st.floats(0.0, 3000.0)),
            pue=draw(st.floats(1.0, 2.0)),
        ),
        prices=Prices(per_device_hour=2.0, grams_per_kwh=300.0),
        storage=Storage(
            memory_bytes_per_s=draw(rate),
            peer_bytes_per_s=draw(rate),
            local_bytes_per_s=draw(rate),
            shared_bytes_per_s=draw(rate),
        ),
        failures=draw(causes()),
    )


@st.composite
def mechanisms(draw: st.DrawFn, data: int, whole: bool) -> Settings:
    """Any that go with a layout."""
    coded = whole and data > 1 and draw(st.booleans())
    modes = ["off", "restart"] if coded or not whole else ["off", "restart", "live"]
    form = draw(st.sampled_from(["dense", "low_rank"]))
    tiers = st.sampled_from([("shared",), ("memory", "shared"), ("peer", "local", "shared")])
    return Settings(
        checkpoint_seconds=draw(st.sampled_from([0.0, 60.0, 36_000.0])),
        tiers=tuple(sorted(draw(tiers), key=("memory", "peer", "local", "shared").index)),
        guard=draw(st.sampled_from(["off", "light", "linear", "full"])),
        coding_copies=draw(st.integers(2, min(data, 4))) if coded else 1,
        tensorize_form=form,
        tensorize_rank=0.0 if form == "dense" else draw(st.floats(0.01, 0.45)),
        recovery=Recovery(mode=draw(st.sampled_from(modes))),
    )


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Training, Cluster]:
    """A legal run and a cluster with room for it."""
    tensor, pipeline, context = draw(FEW), draw(FEW), draw(st.sampled_from([1, 2]))
    data = draw(st.sampled_from([1, 2, 8, 64, 1536]))
    interleaved = pipeline > 1 and draw(st.booleans())
    sharding = draw(st.sampled_from(["none", "optimizer", "gradients", "parameters"]))
    micro_batch, batches = draw(FEW), 8 * draw(st.integers(1, 16))
    model = draw(transformers())
    run = Configuration(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        stages_per_rank=2 if interleaved else 1,
        schedule="interleaved" if interleaved else draw(st.sampled_from(["1f1b", "zero_bubble"])),
        expert=math.gcd(data, 8) if model.experts and draw(st.booleans()) else 1,
        sharding=sharding,
        sharding_ranks=math.gcd(data, 8) if draw(st.booleans()) else 0,
        sequence=64 * draw(st.integers(1, 2000)),
        micro_batch=micro_batch,
        batch=data * micro_batch * batches,
        recompute=draw(st.sampled_from(["none", "attention", "full"])),
        precision=draw(st.sampled_from(["bf16", "fp8"])),
    )
    whole = sharding == "none" and tensor * pipeline * context == 1
    training = Training(
        model=model,
        run=run,
        tokens=draw(between(1e6, 1e15)),
        settings=draw(mechanisms(data, whole)),
        unique_tokens=draw(st.sampled_from([math.inf, 1e6, 1e12])),
        framework="any",
        commits_without=draw(st.booleans()),
    )
    return training, draw(clusters(run.devices))
