"""Will it fit, how long, how many kWh, what do failures cost, what should I change?

Run it: python examples/plan_before_you_run.py [CONFIG.JSON] [CLUSTER]
"""

import sys
from dataclasses import replace
from pathlib import Path

from outlast.hardware import Unavailable
from outlast.plan import Configuration, Training, predict, published, search, transformer_of
from outlast.plan.pareto import page


def main() -> None:
    # Any Hugging Face config; here Llama 3 8B on eight nodes with eight H100 each.
    model = transformer_of(Path(sys.argv[1])) if sys.argv[1:] else published("llama-3-8b")
    cluster = sys.argv[2] if sys.argv[2:] else "h100x64"
    mine = Configuration(
        data=64, sequence=8192, micro_batch=1, batch=512, sharding="parameters", recompute="full"
    )
    training = Training(model=model, run=mine, tokens=300e9)

    estimate = predict(training, cluster)
    step, days = estimate.step_seconds.figure, estimate.finish_seconds.scaled(1 / 86400)
    print(f"a step takes {step.middle:.2f} s ({step.low:.2f} to {step.high:.2f}), most of it:")
    for term in sorted(estimate.step_seconds.terms, key=lambda each: -each.value)[:4]:
        print(f"  {term.value:6.2f} s  {term.name}: {term.formula}")
    print(f"memory: {estimate.headroom_bytes / 2**30:.0f} GiB stay free on the fullest device")
    print(f"finished in {days.middle:.1f} days ({days.low:.1f} to {days.high:.1f})")
    print(f"progress: {estimate.ettr.figure.middle:.1%} of the wall time, the rest:")
    for term in sorted(estimate.ettr.terms, key=lambda each: each.value)[:3]:
        print(f"  {-term.value:6.2%}  {term.name}")
    if not isinstance(estimate.run_joules, Unavailable):
        print(f"energy: {estimate.run_joules.middle / 3.6e9:.1f} MWh")
    for doubt in step.extrapolated:
        print(f"beyond what was calibrated: {doubt}")

    front = search(training, cluster)
    best = min(range(len(front.objectives)), key=lambda row: front.objectives.hours[row])
    chosen = front.candidate(best).configuration
    faster = predict(replace(training, run=chosen), cluster)
    saved = 1 - faster.finish_seconds.middle / estimate.finish_seconds.middle
    print(f"of {front.searched:,} ways the fastest saves {saved:.0%} of the time: {chosen}")
    Path("pareto.html").write_text(page(front, title=f"{model.name} on {cluster}"))
    print("wrote pareto.html")


if __name__ == "__main__":
    main()
