"""Plan clocks for a pipeline: how much energy can be saved at which step time.

Run it: python examples/energy_frontier.py [PROFILE.csv]
"""

import sys

from outlast.energy import EnergyPlanner, example, one_f_one_b, read_profile, save_picture


def main() -> None:
    # Measured time and energy of each stage at each clock; here GPT-3 175B on A100.
    profile = read_profile(sys.argv[1]) if sys.argv[1:] else example.profile("a100")
    stages = 1 + max(key.stage for key in profile.curves)
    schedule = one_f_one_b(stages, microbatches=12)
    planner = EnergyPlanner(profile)

    for switches in ("none", "per_stage", "free"):
        plan = planner.plan(schedule, deadline="+5%", switches=switches)
        print(
            f"{switches}: saves {plan.saving:.1%} in {plan.seconds:.2f} s with {plan.switches} "
            f"changes of clock, at most {plan.gap:.2%} above the best possible"
        )

    frontier = planner.frontier(schedule, points=8)
    straggler = frontier.with_straggler(frontier.plans[0].seconds * 1.1)
    print(f"while another pipeline is 10 % slower: saves {straggler.saving:.1%}")

    save_picture(frontier, "frontier.svg", title=f"GPT-3 175B on {profile.device}")
    frontier.plans[3].save("plan.json")
    print("wrote frontier.svg and plan.json")


if __name__ == "__main__":
    main()
