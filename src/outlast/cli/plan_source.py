"""From what a user asked to what the planner reads: training, cluster, and what was assumed.

Nothing is guessed in silence: what neither source nor options say stands in `Planned.assumed`.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from outlast.cli.console import count_words, share_words
from outlast.errors import PlanError

if TYPE_CHECKING:
    from outlast.cli.options import PlanOptions
    from outlast.job import Job
    from outlast.plan.api import Training
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration, Mechanisms, Settings
    from outlast.plan.model import Context
    from outlast.plan.prediction import Estimate
    from outlast.plan.space import Axes
    from outlast.plan.transformer import Transformer

COMMANDS = (
    "rank",
    "explain",
    "pareto",
    "check",
    "compare",
    "calibrate",
    "emit",
    "targets",
    "simulate",
    "clusters",
    "models",
)
"""Commands of ``outlast plan``, for the word that a source may be a slip of."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run to plan.

    Attributes:
        asked: As the user said it.
        training: What is trained, and how; a search varies the division of the work.
        cluster: On what.
        context: Both with the calibration.
        own: The division of the work that the source states; None where it states none.
        own_problem: Why the one that it states is not possible; empty where it is.
        job: The job, where the source is one.
        assumed: What nobody said, a phrase each.
        load_of_others: Share of the shared file system's bandwidth that other jobs ask for.
        target: What all that is found can be written for; empty where it is the framework itself,
            or nothing is written.
    """

    asked: PlanOptions
    training: Training
    cluster: Cluster
    context: Context
    own: Configuration | None
    own_problem: str
    job: Job | None
    assumed: tuple[str, ...]
    load_of_others: float = 0.0
    target: str = ""

    @property
    def axes(self) -> Axes:
        """Axes of the search; an axis that the user fixed has one value."""
        from outlast.plan.space import Axes

        asked = self.asked
        fixed: dict[str, Any] = {}
        if asked.micro_batch is not None:
            fixed["micro_batch"] = (asked.micro_batch,)
        if asked.precision is not None:
            fixed["precision"] = (asked.precision,)
        elif self.training.run.precision not in ("bf16", "fp8"):
            fixed["precision"] = (self.training.run.precision,)
        return Axes(**fixed)

    @property
    def mechanisms(self) -> Mechanisms:
        """Their settings: those asked for, else the job's own."""
        from outlast.plan.configuration import Mechanisms, Recovery

        asked, own = self.asked, self.training.settings
        return Mechanisms(
            checkpoint_seconds=tuple(asked.checkpoint_seconds or (own.checkpoint_seconds,)),
            tiers=tuple(tuple(name.split("+")) for name in asked.tier or ()) or (own.tiers,),
            guard=tuple(asked.guard or (own.guard,)),
            audit=(own.audit,),
            coding_copies=tuple(asked.copies or (own.coding_copies,)),
            tensorize=tuple(_form(name) for name in asked.tensorize or ())
            or ((own.tensorize_form, own.tensorize_rank),),
            clock_mhz=(own.clock_mhz,),
            recovery=tuple(Recovery.of(name) for name in asked.recover or ()) or (own.recovery,),
        )


def planned(asked: PlanOptions) -> Planned:
    """Read a source, a cluster and a calibration.

    Raises:
        PlanError: One of them cannot be read or says something that is not possible.
        JobError: The job is wrong.
    """
    from outlast.cli.plan_calibrate import calibration_for, place_of
    from outlast.plan.api import context_of
    from outlast.plan.constraints import framework_named
    from outlast.plan.energy import with_region

    _check(asked)
    job = _job(asked)
    if job is None:
        # Of two things that are wrong, the source is the first that was given.
        model_of_source(asked.source)
    load = load_of_others(asked, job)
    ranks = job.launch.nproc if job is not None and job.launch.nproc > 1 else 0
    found = place_of(asked.cluster, ranks)
    prices = found.prices
    if asked.price is not None:
        if not 0.0 <= asked.price < float("inf"):
            raise PlanError(f"--price = {asked.price:g}: give a number of at least 0")
        prices = replace(prices, per_device_hour=asked.price)
    if asked.region is not None:
        prices = with_region(prices, asked.region)
    cluster = shared_with(replace(found, prices=prices), load)
    assumed: list[str] = []
    if job is not None:
        training, own, problem = _of_job(job, asked, cluster)
    else:
        training = training_of_model(asked, cluster, assumed)
        own, problem = None, ""
    framework_named(training.framework)
    training = (
        training
        if asked.unique_tokens is None
        else replace(training, unique_tokens=count_of(asked.unique_tokens, "--unique-tokens"))
    )
    guesses: dict[str, str] = {}
    for key, source in cluster.sources.items():
        if source.text.startswith("assumed: "):
            subject = "failures" if key.startswith("failures.") else f"{key} = {source.value:g}"
            guesses.setdefault(subject, source.text.removeprefix("assumed: "))
    assumed += [f"{subject}: {text}" for subject, text in guesses.items()]
    context = context_of(
        training,
        cluster,
        calibration=calibration_for(asked.cluster, asked.calibration),
        deadline_seconds=_deadline_seconds(asked.deadline),
    )
    return Planned(
        asked=asked,
        training=training,
        cluster=cluster,
        context=context,
        own=own,
        own_problem=problem,
        job=job,
        assumed=tuple(assumed),
        load_of_others=load,
    )


def _check(asked: PlanOptions) -> None:
    from outlast.plan.configuration import Precision
    from outlast.plan.objectives import FIGURES

    if not asked.source:
        raise PlanError("SOURCE is empty: name a job, a config.json or a model")
    for name in ("batch", "sequence", "micro_batch"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise PlanError(f"--{name.replace('_', '-')} = {value}: give at least 1")
    if asked.precision is not None and asked.precision not in get_args(Precision):
        known = ", ".join(get_args(Precision))
        raise PlanError(f"--precision = {asked.precision!r} is none of {known}")
    if asked.by not in FIGURES:
        raise PlanError(f"--by = {asked.by!r} is none of {', '.join(FIGURES)}")
    near = difflib.get_close_matches(asked.source, COMMANDS, n=1, cutoff=0.75)
    if near and not Path(asked.source).exists():
        raise PlanError(
            f"{asked.source!r} is no file and no model: did you mean `outlast plan {near[0]}`?"
        )


def _job(asked: PlanOptions) -> Job | None:
    if not asked.source.endswith(".toml"):
        if asked.overrides:
            raise PlanError(
                f"{asked.overrides[0]!r} replaces a setting of a job, and {asked.source} is none: "
                "leave it out, or use the options"
            )
        return None
    from outlast.job import load_job

    for name in ("batch", "sequence", "tokens", "precision"):
        if getattr(asked, name) is not None:
            setting = {
                "batch": "train.batch_size",
                "sequence": "data.sequence_length",
                "tokens": "train.steps",
                "precision": "train.precision",
            }[name]
            raise PlanError(f"--{name} is the job's to say: write {setting}=... after it")
    return load_job(Path(asked.source), asked.overrides)


def _of_job(
    job: Job, asked: PlanOptions, cluster: Cluster
) -> tuple[Training, Configuration | None, str]:
    """The training, and the job's own division of the work or why it is not possible."""
    from outlast.plan.api import training_of
    from outlast.plan.constraints import problems

    parallel = job.parallel
    fixed = parallel.pipeline * parallel.shard * parallel.tensor * max(parallel.replicate, 1)
    devices = fixed if parallel.replicate else cluster.devices
    framework = asked.framework or "outlast"
    try:
        training = replace(training_of(job, devices, cluster), framework=framework)
    except PlanError as error:
        # The search needs batch, sequence and precision alone.
        plain = job.model_copy(update={"parallel": type(parallel)()})
        return replace(training_of(plain, 1), framework=framework), None, str(error)
    run = training.run
    if asked.micro_batch is not None:
        run = replace(run, micro_batch=asked.micro_batch)
    wrong = problems(training.model, run, cluster, framework)
    return training, (None if wrong else run), "; ".join(wrong)


def _deadline_seconds(text: str | None) -> float | None:
    from outlast.plan.objectives import parse

    if text is None:
        return None
    limit = parse(text, datetime.now().astimezone(), "--deadline")
    if limit.figure != "hours":
        raise PlanError(f"--deadline = {text!r} is no time: give hours, days or a date")
    return limit.value * 3600.0


def _form(text: str) -> tuple[str, float]:
    form, _, rank = text.partition(":")
    try:
        return form, float(rank or 0.0)
    except ValueError:
        raise PlanError(
            f"--tensorize = {text!r}: give a form and the share of its rank, as low_rank:0.5"
        ) from None


_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


_BATCH_TOKENS = ((1e9, 2**19), (3e9, 2**20), (1e11, 2**22), (float("inf"), 2**24))
"""Tokens of a step by parameters: about as GPT-3's small models (2005.14165, table 2.1) and Llama 3
(2407.21783, table 4) were trained."""


_TOKENS_PER_PARAMETER = 20.0
"""Hoffmann et al. 2022 (2203.15556), table 3."""


_LONGEST_ASSUMED = 8192


def training_of_model(asked: PlanOptions, cluster: Cluster, assumed: list[str]) -> Training:
    """The training of a model that no job describes.

    Args:
        asked: What the user says of it.
        cluster: Decides the precision and what the batch is a multiple of.
        assumed: Gets a phrase for all that nobody said.

    Raises:
        PlanError: The source is no model, or a number is none.
    """
    from outlast.plan.api import Training
    from outlast.plan.configuration import Configuration
    from outlast.plan.huggingface import MODELS

    model = model_of_source(asked.source)
    # The model's longest sequence; 0 where its config says none.
    source = asked.source
    table: Any = MODELS[source.casefold()].config if source.casefold() in MODELS else {}
    path = Path(source)
    if path.exists():
        path = path / "config.json" if path.is_dir() else path
        table = json.loads(path.read_text(encoding="utf-8"))
        table = table.get("text_config") or table
    found = [table.get(name) for name in ("max_position_embeddings", "n_positions")]
    longest = max((length for length in found if isinstance(length, int)), default=0)
    sequence = asked.sequence
    if sequence is None:
        sequence = min(longest or _LONGEST_ASSUMED, _LONGEST_ASSUMED)
        assumed.append(f"sequences of {sequence:,} tokens (--sequence)")
    elif longest and sequence > longest:
        assumed.append(
            f"a model whose positions reach {sequence:,} tokens; those of its config end at "
            f"{longest:,}"
        )
    batch = asked.batch
    if batch is None:
        tokens = next(item for most, item in _BATCH_TOKENS if model.parameters < most)
        # A batch that the devices divide, or at least the part of their number that no TP takes.
        batch = max(tokens // sequence, 1)
        devices = cluster.devices
        odd = devices
        while odd % 2 == 0:
            odd //= 2
        unit = devices if devices <= batch else odd
        batch = -(-batch // unit) * unit
        assumed.append(
            f"a batch of {batch:,} samples, {count_words(batch * sequence)} tokens, about as "
            f"{'GPT-3' if model.parameters < _BATCH_TOKENS[0][0] else 'Llama 3'}'s (--batch)"
        )
    whole = _TOKENS_PER_PARAMETER * model.parameters
    if asked.tokens is None:
        assumed.append(
            f"{count_words(whole)} tokens, {_TOKENS_PER_PARAMETER:g} per parameter as Chinchilla "
            "(--tokens)"
        )
    precision: Any = asked.precision
    if precision is None:
        known = cluster.peak_flop_per_s
        precision = "bf16" if "bf16" in known else next(iter(known))
    run = Configuration(
        sequence=sequence, micro_batch=asked.micro_batch or 1, batch=batch, precision=precision
    )
    return Training(
        model=model,
        run=run,
        tokens=whole if asked.tokens is None else count_of(asked.tokens, "--tokens"),
        framework=asked.framework or "any",
    )


def model_of_source(source: str) -> Transformer:
    """The model of a config.json, its folder, or a published name.

    Raises:
        PlanError: It is none of these.
    """
    from outlast.plan import published, transformer_of

    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise PlanError(f"{source} is a folder without a config.json: name a file or a model")
    if path.exists() or source.endswith(".json") or "/" in source:
        return transformer_of(path)
    return published(source)


def count_of(text: str, option: str) -> float:
    """A number of tokens: 15T, 300B, 1e9.

    Raises:
        PlanError: It is no number above 0.
    """
    found = re.fullmatch(r"([\d_.,]+(?:e[+-]?\d+)?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    try:
        value = float(found[1].replace(",", "")) * _COUNTS[found[2].upper()] if found else 0.0
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise PlanError(f"{option} = {text}: give a number above 0, as 15T, 300B or 1e9")
    return value


_PATHS = {
    "model": ("directory",),
    "data": ("train", "validation", "tokenizer"),
    "checkpoint": ("turns", "fast", "mirror", "transfer_plan"),
    "recover": ("memory",),
    "energy": ("tariff", "sources"),
    "staging": ("directory",),
    "log": ("mlflow_uri",),
}
"""Settings of a job that name files or folders.

Left as they are: model.config, which is written anew; run.directory, since what is written is
another run; and slurm's, which are for a shell on other machines.
"""


_PREFIXED = {"sources": "file:", "mlflow_uri": "sqlite:///"}
"""Settings whose values name a file behind this alone."""


def with_whole_paths(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tables of a job whose relative paths begin where this command was started.

    Args:
        tables: By section.
    """
    found = {section: dict(values) for section, values in tables.items()}
    for section, names in _PATHS.items():
        values = found.get(section, {})
        for name in set(names) & set(values):
            values[name] = _whole_path(values[name], _PREFIXED.get(name, ""))
    return found


def _whole_path(value: Any, prefix: str) -> Any:
    if isinstance(value, list):
        return [_whole_path(item, prefix) for item in value]
    return prefix + whole_path(value[len(prefix) :]) if value.startswith(prefix) else value


def whole_path(text: str) -> str:
    """An absolute path, `~` being the home folder.

    URLs, the byte tokenizer, nothing, and what begins with a variable of the node stay as they are.

    Args:
        text: What a setting says.
    """
    said_otherwise = text in ("", "byte") or "://" in text or text.startswith("$")
    return text if said_otherwise else str(Path(text).expanduser().absolute())


_RATE = "storage.shared_bytes_per_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The shared file system of a run, and the others on it.

    Attributes:
        load_of_others: Share of its bandwidth that their requests ask for.
        slowdown: How many times as long a transfer takes, to it or from it.
        save_waste: Share of the nodes' time that saves take at most, as if training stood still
            meanwhile; None where checkpoints go to faster tiers as well.
    """

    load_of_others: float
    slowdown: float
    save_waste: float | None


def load_of_others(asked: PlanOptions, job: Job | None) -> float:
    """Share of the shared file system's bandwidth that others ask for.

    A job that takes turns at saving (``checkpoint.turns``) shares it with jobs whose saves keep it
    busy for at most ``checkpoint.turn_load`` of the time, its own among them: so much is taken as
    the others', which is a little too much.

    Raises:
        PlanError: The share that was given is not below 1.
    """
    given = asked.file_system_load
    if given is None:
        return job.checkpoint.turn_load if job is not None and job.checkpoint.turns else 0.0
    if not 0.0 <= given < 1.0:
        raise PlanError(
            f"--file-system-load = {given:g}: give a share of the bandwidth from 0 to below 1; at "
            "1 no transfer ends"
        )
    return given


def shared_with(cluster: Cluster, load: float) -> Cluster:
    """The cluster as one job sees it whose transfers share the file system with a load of others.

    Raises:
        ClusterError: The others leave nothing.
    """
    from outlast.cluster.cost import contended_seconds

    if not load:
        return cluster
    rate = cluster.storage.shared_bytes_per_s / contended_seconds(1.0, load)
    sources = dict(cluster.sources)
    if _RATE in sources:
        alone = sources[_RATE]
        text = f"{alone.text}; {load:.0%} of {alone.value:g} B/s is asked for by others"
        sources[_RATE] = replace(alone, value=rate, text=text)
    storage = replace(cluster.storage, shared_bytes_per_s=rate)
    return replace(cluster, storage=storage, sources=sources)


def sharing_of(load: float, found: Estimate, settings: Settings) -> Sharing | None:
    """Cost to a run of others on its file system, where it was predicted with them; else None."""
    from outlast.cluster.cost import contended_seconds, save_waste

    if not load:
        return None
    waste = None
    if settings.tiers == ("shared",):
        # The predicted save has the others in it.
        waste = save_waste(found.last_save_seconds, found.checkpoint_seconds)
    return Sharing(load_of_others=load, slowdown=contended_seconds(1.0, load), save_waste=waste)


def sharing_words(found: Sharing) -> str:
    """The same in a line."""
    text = (
        f"others ask for {found.load_of_others:.0%} of its bandwidth: saves and restores take "
        f"{found.slowdown:.3g} times as long"
    )
    if found.save_waste is None:
        return text
    return f"{text}; saves take at most {share_words(found.save_waste)} of the nodes' time"
