"""Combinations of settings that cannot work, found before any process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.job.section import toml_value
from outlast.job.sections import CHOSEN

if TYPE_CHECKING:
    from collections.abc import Iterator, Set

    from outlast.job.sections import CheckpointSection, Job, RecoverSection


def impossible_combinations(job: Job, unsure: Set[str] = frozenset()) -> list[str]:
    """One sentence for each combination of settings in `job` that cannot work.

    Nothing is said about the sections in `unsure`, whose settings are not known to be what the
    user meant.
    """
    checks = (
        (_model, {"model"}),
        (_data, {"data"}),
        (_parallel, {"parallel", "train"}),
        (_checkpoint, {"checkpoint", "staging"}),
        (_guard, {"guard"}),
        (_coding, {"coding", "parallel"}),
        (_coded_guard, {"coding", "guard"}),
        (_energy, {"energy"}),
        (_tensorize, {"tensorize", "parallel", "train"}),
        (_adapt_rank, {"tensorize", "parallel", "recover", "coding", "checkpoint"}),
        (_recover, {"recover", "train"}),
        (_tiers, {"checkpoint", "recover"}),
        (_slurm, {"slurm"}),
        (_staging, {"staging", "data"}),
        (_factor_rules, {"tensorize", "optimizer"}),
    )
    return [
        problem for check, sections in checks if not sections & unsure for problem in check(job)
    ]


def _said(job: Job, *names: str) -> str:
    """Settings with their values, e.g. ``parallel.tensor = 2 and parallel.pipeline = 4``."""
    found = []
    for name in names:
        section, key = name.split(".")
        value = getattr(getattr(job, section), key)
        if isinstance(value, bool):
            shown = "true" if value else "false"
        elif isinstance(value, float):
            shown = f"{value:g}"
        else:
            shown = f'"{value}"' if isinstance(value, str) else str(value)
        found.append(f"{name} = {shown}")
    return " and ".join(found)


def _model(job: Job) -> Iterator[str]:
    model = job.model
    if job.slurm.command:
        # A program of one's own decides what it trains.
        return
    given = [f"model.{name}" for name in ("config", "directory", "module") if getattr(model, name)]
    given += ["[model.settings]"] if model.settings else []
    if len(given) != 1:
        yield (
            f"model: {' and '.join(given) or 'nothing'} is given, but exactly one of config, "
            "directory, module or [model.settings] must say what the model is"
        )
    if model.arguments and not model.module:
        yield "model.arguments is given, but it is only used with model.module; remove it"
    if model.settings and "model_type" not in model.settings:
        yield 'model.settings has no model_type; add e.g. model_type = "llama"'
    if model.initialize == "pretrained" and not model.directory:
        yield 'model.initialize = "pretrained" needs model.directory, where the weights are'


def _data(job: Job) -> Iterator[str]:
    data, source = job.data, _said(job, "data.source")
    if data.source == "stdlib" and (data.train or data.validation):
        yield (
            f"{source} reads no files, but data.train or data.validation names some; "
            'use data.source = "text"'
        )
    if data.source in ("text", "tokens") and not data.train:
        yield f"{source} needs data.train, the files to train on"
    for key, files in (("train", data.train), ("validation", data.validation)):
        if data.source == "tokens" and len(files) > 1:
            yield f"data.{key} names {len(files)} files, but {source} takes one"
    if data.token_dtype and data.source != "tokens":
        yield 'data.token_dtype is given, but it only serves data.source = "tokens"; remove it'


def _recover(job: Job) -> Iterator[str]:
    if job.recover.fixed_order and job.recover.mode != "live":
        yield (
            f"recover.fixed_order = true is for live groups, but {_said(job, 'recover.mode')}; "
            'leave it out, or set recover.mode = "live"'
        )
    if job.recover.fixed_order and job.train.compile:
        yield (
            "recover.fixed_order = true and train.compile = true do not go together: kernels are "
            "compiled for the shapes that a process has seen before; set one of them to false"
        )


def contradictory_tiers(checkpoint: CheckpointSection, recover: RecoverSection) -> Iterator[str]:
    """One sentence for each setting that contradicts ``checkpoint.tiers``."""
    tiers = checkpoint.tiers
    if tiers == "auto":
        return
    said = f"checkpoint.tiers = {toml_value(tiers)}"
    if "memory" in tiers and recover.mode != "restart":
        kept = [tier for tier in ("memory", "peer") if tier in tiers]
        yield (
            f'{said} contradicts recover.mode = "{recover.mode}", which keeps nothing in the '
            f'nodes\' memory; set recover.mode = "restart", or leave {" and ".join(kept)} out'
        )
    if "peer" not in tiers and recover.parity in (1, 2):
        yield (
            f"{said} contradicts recover.parity = {recover.parity}, which makes good a lost node; "
            'add "peer" to the tiers, or leave recover.parity out'
        )
    if "peer" in tiers and recover.parity == 0:
        yield (
            f"{said} contradicts recover.parity = 0, with which a lost node is not made good; "
            'leave recover.parity out, or "peer"'
        )
    if "disk" in tiers and not checkpoint.fast:
        yield f"{said} needs checkpoint.fast, the directory of the tier disk on each node"
    if "disk" not in tiers and checkpoint.fast:
        yield (
            f"{said} contradicts checkpoint.fast = {toml_value(checkpoint.fast)}, the directory of "
            'the tier disk; add "disk" to the tiers, or leave checkpoint.fast out'
        )


def _tiers(job: Job) -> Iterator[str]:
    yield from contradictory_tiers(job.checkpoint, job.recover)


def _parallel(job: Job) -> Iterator[str]:
    parallel, train = job.parallel, job.train
    if parallel.tensor > 1 and parallel.pipeline > 1:
        both = _said(job, "parallel.tensor", "parallel.pipeline")
        yield f"{both} cannot be combined yet; set one of them to 1"
    if parallel.shard > 1 and parallel.pipeline > 1:
        both = _said(job, "parallel.shard", "parallel.pipeline")
        yield f"{both} cannot be combined yet; set one of them to 1, or use parallel.replicate"
    if parallel.tensor > 1 and parallel.replicate > 1 and parallel.shard == 1:
        both = _said(job, "parallel.tensor", "parallel.replicate")
        yield f"{both} cannot be combined; use parallel.shard in place of replicate"
    if parallel.pipeline > 1 and train.compile:
        yield "train.compile = true cannot be combined with parallel.pipeline > 1; set it to false"
    batch_size = _said(job, "train.batch_size")
    if train.micro_batch_size > train.batch_size:
        yield f"{_said(job, 'train.micro_batch_size')} exceeds {batch_size}"
    degrees = max(parallel.replicate, 1) * parallel.shard
    if degrees > train.batch_size:
        yield (
            f"{batch_size} gives no sample to some of the {degrees} data-parallel processes "
            "(parallel.replicate x parallel.shard); raise it"
        )


def _checkpoint(job: Job) -> Iterator[str]:
    settings = job.checkpoint
    limits = {
        "drain_megabytes_per_s": (settings.fast, settings.drain_megabytes_per_s),
        "mirror_megabytes_per_s": (settings.mirror, settings.mirror_megabytes_per_s),
    }
    if settings.back_off and not (settings.fast or settings.mirror):
        yield (
            "checkpoint.back_off = true has no copies to slow down; give checkpoint.fast or "
            "checkpoint.mirror, or leave it out"
        )
    for name, (place, limit) in limits.items():
        if settings.back_off and place and not limit:
            yield (
                f"checkpoint.back_off = true needs checkpoint.{name}, about what a process gets "
                "there when it is alone"
            )
    if settings.back_off and settings.transfer_plan:
        yield (
            "checkpoint.back_off = true cannot be combined with checkpoint.transfer_plan, which "
            "says itself how much bandwidth there is; leave one of them out"
        )
    if settings.transfer_plan and not (settings.fast or settings.mirror or job.staging.directory):
        yield (
            f"{_said(job, 'checkpoint.transfer_plan')} has no copies to plan; give "
            "checkpoint.fast, checkpoint.mirror or staging.directory, or leave it out"
        )


def _guard(job: Job) -> Iterator[str]:
    if job.guard.policy == "off" and job.guard.modules:
        yield (
            'guard.modules names modules, but guard.policy = "off" checks nothing; set it to '
            '"light" to check these modules only'
        )
    split = [name for name in ("tensor", "pipeline") if getattr(job.parallel, name) > 1]
    if job.guard.persistent == "drop" and split:
        yield (
            f'guard.persistent = "drop" cannot be combined with parallel.{split[0]} > 1, where '
            'several processes make one gradient; set it to "raise"'
        )


def _coding(job: Job) -> Iterator[str]:
    coding, parallel, scheme = job.coding, job.parallel, _said(job, "coding.scheme")
    if coding.protocol != "all_reduce" and coding.scheme in {"off", "coverage"}:
        yield (
            f"{_said(job, 'coding.protocol')} carries the messages of fixed codes, and {scheme} "
            'has none; take e.g. coding.scheme = "fractional_repetition", or coding.protocol = '
            '"all_reduce"'
        )
    if coding.scheme == "off":
        return
    split = [name for name in ("tensor", "pipeline") if getattr(parallel, name) > 1]
    if split:
        yield (f"{scheme} cannot be combined with parallel.{split[0]} > 1 yet; use parallel.shard")
    if parallel.shard > 1 and coding.scheme != "coverage":
        shard = _said(job, "parallel.shard")
        yield f'{scheme} cannot be combined with {shard}; use "coverage", which can'
    deadline = _said(job, "coding.deadline_seconds")
    if coding.deadline_seconds and coding.lost != "commit":
        yield (
            f'{deadline} needs coding.lost = "commit", which leaves out what is not finished by '
            "then"
        )
    if coding.deadline_seconds and coding.scheme != "coverage" and not coding.largest_error:
        yield f"{deadline} needs coding.largest_error > 0 with {scheme}"
    if coding.largest_error and coding.scheme == "coverage":
        yield (
            f"{_said(job, 'coding.largest_error')} serves fixed codes only; with "
            'coding.scheme = "coverage" set coding.lost = "commit" and coding.deadline_seconds'
        )


def _coded_guard(job: Job) -> Iterator[str]:
    if job.coding.scheme != "off" and job.guard.persistent == "drop":
        yield (
            f'guard.persistent = "drop" cannot be combined with {_said(job, "coding.scheme")}, '
            'which sums gradients by itself; set it to "raise"'
        )


def _energy(job: Job) -> Iterator[str]:
    for name in ("tariff", "region", "loss_target", "prometheus_port"):
        if not job.energy.measure and getattr(job.energy, name):
            yield (
                f"{_said(job, f'energy.{name}')} needs energy, but energy.measure = false "
                "measures none; set it to true or remove the other"
            )


def _slurm(job: Job) -> Iterator[str]:
    slurm, chain = job.slurm, _said(job, "slurm.chain")
    if slurm.chain == "dependent":
        return
    if slurm.wall_time == CHOSEN:
        yield (
            f'slurm.wall_time = "{CHOSEN}" chooses whenever a link is submitted, and {chain} '
            'submits all at once; use "dependent", or give a time'
        )
    if slurm.filler_nodes:
        yield (
            f"{_said(job, 'slurm.filler_nodes')} cannot be combined with {chain}; use "
            '"dependent", or leave fillers out'
        )
    if not slurm.links:
        yield f"{chain} needs slurm.links, the number of jobs that are submitted at once"
    if slurm.chain == "array" and len(set(slurm.nodes)) > 1:
        yield (
            f"{_said(job, 'slurm.nodes')} cannot be combined with {chain}, whose places are all "
            'alike; use "presubmitted" or "dependent"'
        )


def _staging(job: Job) -> Iterator[str]:
    staging, data = job.staging, job.data
    remote = [name for name in (*data.train, *data.validation) if "://" in name]
    if remote and data.source != "tokens":
        yield (
            f'{remote[0]} is a URL, which only data.source = "tokens" can read; copy the text to '
            "a file system first"
        )
    elif remote and not staging.directory:
        yield f"{remote[0]} is a URL and needs staging.directory, where each node keeps a copy"
    if not staging.wait and staging.required:
        yield (
            "staging.wait = false reads tokens in place where there is no copy yet, which "
            "staging.required = true forbids; set one of them to its default"
        )
    buffer = _said(job, "staging.burst_buffer")
    if staging.burst_buffer != "off" and not staging.directory:
        yield (
            f"{buffer} needs staging.directory, where the site's copies appear, e.g. "
            "$DW_JOB_STRIPED"
        )
    if staging.burst_buffer != "off" and data.source != "tokens":
        yield (
            f"{buffer} copies files of tokens before the job starts, which "
            f'{_said(job, "data.source")} does not name; use "tokens"'
        )
    if (staging.burst_buffer == "lines") != bool(staging.burst_buffer_lines):
        yield (
            'staging.burst_buffer = "lines" and staging.burst_buffer_lines need each other; give '
            "both or neither"
        )


TWO_FACTORS = ("low_rank", "cola", "lax")
NO_MATRICES = ("cola", "lax")
SPLITTABLE = ("low_rank", "cola")


def _tensorize(job: Job) -> Iterator[str]:
    settings, form = job.tensorize, _said(job, "tensorize.form")
    from_dense = 'tensorize.initialize = "from_dense"'
    if settings.form == "off":
        return
    if job.parallel.tensor > 1 and settings.form not in SPLITTABLE:
        yield (
            f"{form} cannot be combined with {_said(job, 'parallel.tensor')}, which splits "
            f"{' and '.join(SPLITTABLE)} alone; use parallel.shard"
        )
    if settings.initialize == "from_dense" and settings.form in NO_MATRICES:
        yield (
            f'{from_dense} cannot be combined with {form}, which is no matrix; use "scratch", '
            'or form = "low_rank"'
        )
    if settings.initialize == "from_dense" and job.model.initialize == "scratch":
        yield (
            f"{from_dense} would approximate random weights, since "
            'model.initialize = "scratch"; use "scratch" for both'
        )
    if settings.initialize != "from_dense" and str(settings.rank).startswith("error="):
        yield (
            f"{_said(job, 'tensorize.rank')} is a share of the model's own weights and needs "
            f"{from_dense}"
        )
    crossing = {
        "parallel.pipeline": job.parallel.pipeline > 1,
        "train.activation_checkpointing": job.train.activation_checkpointing,
        "train.compile": job.train.compile,
    }
    if settings.form == "lax" and any(crossing.values()):
        name = next(name for name, used in crossing.items() if used)
        yield (
            f"{form} hands features from layer to layer and cannot be combined with {name} yet; "
            f'use "cola", or leave {name} out'
        )
    if settings.cores and settings.form not in ("tt", "ttm"):
        yield f"{_said(job, 'tensorize.cores')} does not apply to {form}; remove it"


_ADAPTABLE = ("low_rank", "cola", "sltrain", "btt", "tt", "ttm", "tucker")
"""Forms whose ranks can change during a run."""


def _adapt_rank(job: Job) -> Iterator[str]:
    settings = job.tensorize
    if not settings.adapt_rank:
        return
    if settings.form not in _ADAPTABLE:
        yield (
            f'tensorize.adapt_rank = true changes ranks, and tensorize.form = "{settings.form}" '
            f"has none that can change alone; use one of {', '.join(_ADAPTABLE)}"
        )
    refused = {
        f"parallel.pipeline = {job.parallel.pipeline}": job.parallel.pipeline > 1,
        f"parallel.tensor = {job.parallel.tensor}": job.parallel.tensor > 1,
        'recover.mode = "live"': job.recover.mode == "live",
        f'coding.scheme = "{job.coding.scheme}"': job.coding.scheme != "off",
        f'checkpoint.replay = "{job.checkpoint.replay}"': job.checkpoint.replay != "off",
        "tensorize.mup = true": settings.mup,
    }
    for name in (name for name, used in refused.items() if used):
        yield (
            f"tensorize.adapt_rank = true cannot be combined with {name}, which relies on factors "
            f"that keep their shapes; set {name.partition(' =')[0]} back, or adapt_rank to false"
        )
    if 0 < settings.largest_rank < settings.smallest_rank:
        yield (
            f"tensorize.largest_rank = {settings.largest_rank} is below tensorize.smallest_rank = "
            f"{settings.smallest_rank}"
        )


def _factor_rules(job: Job) -> Iterator[str]:
    settings = job.tensorize
    if settings.form == "off":
        return
    if settings.spectral_limit and settings.form not in TWO_FACTORS:
        yield (
            f"{_said(job, 'tensorize.spectral_limit')} bounds two factors, and "
            f"{_said(job, 'tensorize.form')} has others; set it to 0"
        )
    if settings.mup and settings.initialize == "from_dense":
        yield (
            "tensorize.mup = true draws factors anew and cannot be combined with "
            'tensorize.initialize = "from_dense"; set one of them back'
        )
    if settings.mup and job.optimizer.name == "muon" and settings.form in TWO_FACTORS:
        yield (
            "tensorize.mup = true scales AdamW's rates and cannot be combined with "
            'optimizer.name = "muon", which scales updates itself; use "adamw"'
        )
