"""The settings of a training loop that is not Outlast's own: a script's, or another framework's.

The model, its data and the steps are the script's business. What is left are the sections of a job
file on what Outlast does beside them, with the same keys and meanings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.job.checkpoint import CheckpointSection
from outlast.job.recover import RecoverSection
from outlast.job.section import Section
from outlast.job.sections import EnergySection, GuardSection, LogSection, RunSection
from outlast.job.template import to_toml, toml_value

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

_ONLY_OF_THE_TRAINER = {
    "run.deterministic": "the script calls torch.use_deterministic_algorithms itself",
    "checkpoint.keep_best": "the validation loss is the script's own",
    "checkpoint.replay": "the optimizer's steps are the script's own",
    "checkpoint.turns": "the saves of `outlast train` alone take turns",
    "checkpoint.turn_seconds": "the saves of `outlast train` alone take turns",
    "checkpoint.turn_order": "the saves of `outlast train` alone take turns",
    "checkpoint.turn_load": "the saves of `outlast train` alone take turns",
    "checkpoint.turn_ask_slurm": "the saves of `outlast train` alone take turns",
    "checkpoint.transfer_plan": "only `outlast train` follows a plan of transfers",
    "checkpoint.back_off": "only `outlast train` looks at other transfers",
    "recover.groups": "live groups are those of `outlast train`",
    "recover.lighthouse": "live groups are those of `outlast train`",
    "recover.heartbeat_seconds": "live groups are those of `outlast train`",
    "recover.fixed_order": "live groups are those of `outlast train`",
    "recover.hang_seconds": "phases of a step are known in `outlast train` alone",
    "energy.loss_target": "the validation loss is the script's own",
    "energy.prometheus_port": "only `outlast train` serves metrics",
}
"""Settings that such a loop cannot follow -> why not."""


class LoopJob(Section):
    """What Outlast does beside a training loop that is not its own."""

    run: RunSection = RunSection()
    checkpoint: CheckpointSection = CheckpointSection()
    guard: GuardSection = GuardSection()
    recover: RecoverSection = RecoverSection()
    energy: EnergySection = EnergySection()
    log: LogSection = LogSection()


def loop_template(job: LoopJob) -> str:
    """`job` as commented TOML, without the settings that such a loop cannot follow."""
    return to_toml(job, left_out=_ONLY_OF_THE_TRAINER)


def decided_by_the_script(sections: Sequence[str]) -> str:
    """Why sections of a whole job are none of a `LoopJob`."""
    named = [f"[{section}]" for section in sections]
    if len(named) == 1:
        return (
            f"{named[0]} is a section of `outlast train`; here it is the script that decides what "
            f"it says: remove {named[0]}"
        )
    return (
        f"{', '.join(named[:-1])} and {named[-1]} are sections of `outlast train`; here it is the "
        "script that decides what they say: remove them, or write a file for loops with "
        "`outlast init --loop loop.toml`"
    )


def settings_of_others(job: LoopJob, unsure: Set[str] = frozenset()) -> list[str]:
    """One sentence for each setting that only `outlast train` could follow.

    Args:
        job: The settings.
        unsure: Sections of which nothing is said.
    """
    problems = []
    for name, reason in _ONLY_OF_THE_TRAINER.items():
        section, key = name.split(".")
        value = getattr(getattr(job, section), key)
        default = type(getattr(job, section)).model_fields[key].default
        if section not in unsure and value != default:
            problems.append(f"{name} = {toml_value(value)} has no effect here: {reason}; remove it")
    if "recover" not in unsure and job.recover.mode == "live":
        problems.append(
            'recover.mode = "live" needs a loop that `outlast train` or outlast.recover.live runs; '
            'set "restart" or "off"'
        )
    return problems
