"""Combinations that cannot work: each is refused in a sentence, its nearest neighbour is not."""

from __future__ import annotations

import pytest

from outlast.errors import JobError
from outlast.job import Job, job_from_text, load_job, load_loop_job, tiers_of

SETTINGS = '[model.settings]\nmodel_type = "llama"\n'


def check(*settings: str, model: str = SETTINGS) -> list[str]:
    """The problems of a job with these `section.key = value` settings."""
    try:
        job = job_from_text("\n".join(settings) + "\n" + model)
    except JobError as error:
        return error.problems
    assert isinstance(job, Job)
    return []


def test_model_must_be_given() -> None:
    (problem,) = check(model="")
    assert problem.startswith("model: nothing is given, but exactly one of")
    assert check() == []


@pytest.mark.parametrize("key", ["config", "directory", "module"])
def test_model_must_be_given_once(key: str) -> None:
    value = "package.module:function"
    (problem,) = check(f'model.{key} = "{value}"', 'model.settings.model_type = "x"', model="")
    assert problem.startswith(f"model: model.{key} and [model.settings] is given, but exactly one")
    assert check(f'model.{key} = "{value}"', model="") == []


def test_arguments_need_a_module() -> None:
    assert check("model.arguments.width = 3", 'model.config = "c.json"', model="") == [
        "model.arguments is given, but it is only used with model.module; remove it"
    ]
    assert check("model.arguments.width = 3", 'model.module = "a:b"', model="") == []


def test_settings_need_a_model_type() -> None:
    assert check(model="[model.settings]\nhidden_size = 3") == [
        'model.settings has no model_type; add e.g. model_type = "llama"'
    ]
    assert check(model='[model.settings]\nmodel_type = "gpt2"\nhidden_size = 3') == []


def test_pretrained_weights_need_a_directory() -> None:
    pretrained = 'model.initialize = "pretrained"'
    assert check(pretrained, 'model.config = "c.json"', model="") == [
        'model.initialize = "pretrained" needs model.directory, where the weights are'
    ]
    assert check(pretrained, 'model.directory = "llama"', model="") == []


@pytest.mark.parametrize("key", ["train", "validation"])
def test_stdlib_reads_no_files(key: str) -> None:
    (problem,) = check(f'data.{key} = ["a.txt"]')
    assert problem.startswith('data.source = "stdlib" reads no files, but')
    files = {"train": 'data.train = ["b.txt"]', key: f'data.{key} = ["a.txt"]'}
    assert check('data.source = "text"', *files.values()) == []


@pytest.mark.parametrize("source", ["text", "tokens"])
def test_files_need_names(source: str) -> None:
    assert check(f'data.source = "{source}"') == [
        f'data.source = "{source}" needs data.train, the files to train on'
    ]
    assert check(f'data.source = "{source}"', 'data.train = ["a"]') == []


@pytest.mark.parametrize("key", ["train", "validation"])
def test_tokens_are_one_file(key: str) -> None:
    files = {"train": ["a.bin"], "validation": ["b.bin"]} | {key: ["a.bin", "c.bin"]}
    settings = [f"data.{name} = {names}" for name, names in files.items()]
    assert check('data.source = "tokens"', *settings) == [
        f'data.{key} names 2 files, but data.source = "tokens" takes one'
    ]
    assert check('data.source = "text"', *settings) == []
    one_each = ['data.train = ["a.bin"]', 'data.validation = ["b.bin"]']
    assert check('data.source = "tokens"', *one_each) == []


def test_token_dtype_only_serves_tokens() -> None:
    dtype, files = 'data.token_dtype = "uint16"', 'data.train = ["a"]'
    assert check('data.source = "text"', dtype, files) == [
        'data.token_dtype is given, but it only serves data.source = "tokens"; remove it'
    ]
    assert check('data.source = "tokens"', dtype, files) == []


def test_a_warmup_that_does_not_fit_is_no_reason_to_refuse() -> None:
    assert check("train.steps = 10", "schedule.warmup_steps = 10") == []
    decay = ["train.steps = 10", "schedule.decay_fraction = 0.5", 'schedule.name = "wsd"']
    assert check(*decay, "schedule.warmup_steps = 6") == []


def test_tensor_and_pipeline_exclude_each_other() -> None:
    (problem,) = check("parallel.tensor = 2", "parallel.pipeline = 3")
    assert problem.startswith("parallel.tensor = 2 and parallel.pipeline = 3 cannot be combined")
    assert check("parallel.tensor = 2") == check("parallel.pipeline = 3") == []


def test_shard_and_pipeline_exclude_each_other() -> None:
    (problem,) = check("parallel.shard = 2", "parallel.pipeline = 3")
    assert problem.startswith("parallel.shard = 2 and parallel.pipeline = 3 cannot be combined")
    assert check("parallel.replicate = 2", "parallel.pipeline = 3") == []


def test_tensor_and_replicate_need_shards() -> None:
    (problem,) = check("parallel.tensor = 2", "parallel.replicate = 3")
    assert problem == (
        "parallel.tensor = 2 and parallel.replicate = 3 cannot be combined; use parallel.shard in "
        "place of replicate"
    )
    assert check("parallel.tensor = 2", "parallel.shard = 3") == []
    assert check("parallel.tensor = 2", "parallel.shard = 3", "parallel.replicate = 2") == []


def test_pipeline_is_not_compiled() -> None:
    assert check("parallel.pipeline = 2", "train.compile = true") == [
        "train.compile = true cannot be combined with parallel.pipeline > 1; set it to false"
    ]
    assert check("parallel.pipeline = 2") == check("train.compile = true") == []


def test_micro_batch_is_not_larger_than_the_batch() -> None:
    assert check("train.batch_size = 8", "train.micro_batch_size = 9") == [
        "train.micro_batch_size = 9 exceeds train.batch_size = 8"
    ]
    assert check("train.batch_size = 8", "train.micro_batch_size = 8") == []


def test_every_process_gets_a_sample() -> None:
    (problem,) = check("train.batch_size = 8", "parallel.replicate = 3", "parallel.shard = 3")
    assert problem.startswith("train.batch_size = 8 gives no sample to some of the 9 data-parallel")
    assert check("train.batch_size = 9", "parallel.replicate = 3", "parallel.shard = 3") == []


FIXED_CODES = ("fractional_repetition", "cyclic_repetition", "cyclic_mds", "graph")


def coded(scheme: str) -> str:
    return f'coding.scheme = "{scheme}"'


@pytest.mark.parametrize("scheme", ["coverage", *FIXED_CODES])
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_coded_replicas_are_not_split(scheme: str, axis: str) -> None:
    (problem,) = check(coded(scheme), f"parallel.{axis} = 2")
    assert problem == (
        f'coding.scheme = "{scheme}" cannot be combined with parallel.{axis} > 1 yet; use '
        "parallel.shard"
    )
    assert check(coded("off"), f"parallel.{axis} = 2") == []


@pytest.mark.parametrize("scheme", FIXED_CODES)
def test_only_coverage_shards_its_replicas(scheme: str) -> None:
    (problem,) = check(coded(scheme), "parallel.shard = 2")
    assert problem == (
        f'coding.scheme = "{scheme}" cannot be combined with parallel.shard = 2; use "coverage", '
        "which can"
    )
    assert check(coded(scheme), "parallel.replicate = 4") == []
    assert check(coded("coverage"), "parallel.shard = 2") == []


def test_a_coding_deadline_needs_leave_to_go_on_without() -> None:
    late = (coded("coverage"), "coding.deadline_seconds = 2.5")
    (problem,) = check(*late)
    assert problem == (
        'coding.deadline_seconds = 2.5 needs coding.lost = "commit", which leaves out what is not '
        "finished by then"
    )
    assert check(*late, 'coding.lost = "commit"') == []
    # What is off needs nothing.
    assert check("coding.deadline_seconds = 2.5") == []


def test_a_fixed_codes_deadline_needs_an_error_that_is_good_enough() -> None:
    late = (coded("graph"), "coding.deadline_seconds = 2", 'coding.lost = "commit"')
    assert check(*late) == [
        'coding.deadline_seconds = 2 needs coding.largest_error > 0 with coding.scheme = "graph"'
    ]
    assert check(*late, "coding.largest_error = 0.05") == []


def test_coverage_has_a_deadline_in_place_of_an_error() -> None:
    (problem,) = check(coded("coverage"), "coding.largest_error = 0.05")
    assert problem == (
        "coding.largest_error = 0.05 serves fixed codes only; with coding.scheme = "
        '"coverage" set coding.lost = "commit" and coding.deadline_seconds'
    )
    assert check(coded("graph"), "coding.largest_error = 0.05") == []


@pytest.mark.parametrize("protocol", ["server", "gossip"])
@pytest.mark.parametrize("scheme", ["off", "coverage"])
def test_a_server_and_gossip_carry_messages_of_fixed_codes(protocol: str, scheme: str) -> None:
    way = f'coding.protocol = "{protocol}"'
    (problem,) = check(coded(scheme), way)
    assert problem == (
        f'coding.protocol = "{protocol}" carries the messages of fixed codes, and coding.scheme = '
        f'"{scheme}" has none; take e.g. coding.scheme = "fractional_repetition", or '
        'coding.protocol = "all_reduce"'
    )
    assert check(coded("graph"), way) == []
    (problem,) = check(coded("graph"), way, "parallel.shard = 2")
    assert problem.startswith('coding.scheme = "graph" cannot be combined with parallel.shard')


@pytest.mark.parametrize("scheme", ["coverage", *FIXED_CODES])
def test_the_guard_drops_no_gradient_out_of_a_code(scheme: str) -> None:
    drop = 'guard.persistent = "drop"'
    (problem,) = check(coded(scheme), drop)
    assert problem == (
        f'guard.persistent = "drop" cannot be combined with coding.scheme = "{scheme}", which sums '
        'gradients by itself; set it to "raise"'
    )
    assert check(drop) == check(coded(scheme)) == []


def test_several_impossible_combinations_are_listed_together() -> None:
    settings = ("parallel.tensor = 2", "parallel.pipeline = 2", "train.micro_batch_size = 99")
    assert len(check(*settings)) == 2


@pytest.mark.parametrize("chain", ["presubmitted", "array"])
def test_links_that_are_submitted_at_once_are_counted(chain: str) -> None:
    assert check(f'slurm.chain = "{chain}"') == [
        f'slurm.chain = "{chain}" needs slurm.links, the number of jobs that are submitted at once'
    ]
    assert check(f'slurm.chain = "{chain}"', "slurm.links = 3") == []


def test_fillers_need_a_chain_that_grows() -> None:
    (problem,) = check('slurm.chain = "array"', "slurm.links = 3", "slurm.filler_nodes = [2]")
    assert problem.startswith("slurm.filler_nodes = [2] cannot be combined with slurm.chain")
    assert check("slurm.filler_nodes = [2]") == []


def test_links_that_are_submitted_at_once_cannot_be_chosen_one_by_one() -> None:
    (problem,) = check('slurm.chain = "array"', "slurm.links = 3", 'slurm.wall_time = "auto"')
    assert problem.startswith('slurm.wall_time = "auto" chooses whenever a link is submitted')
    assert check('slurm.wall_time = "auto"') == []


def test_places_of_an_array_are_alike() -> None:
    array = ('slurm.chain = "array"', "slurm.links = 3")
    (problem,) = check(*array, "slurm.nodes = [4, 2]")
    assert problem.startswith('slurm.nodes = [4, 2] cannot be combined with slurm.chain = "array"')
    assert check(*array, "slurm.nodes = [4, 4]") == []


def test_a_wall_time_is_a_time() -> None:
    (problem,) = check('slurm.wall_time = "eight hours"')
    assert "it should be a time such as 8:00:00, 2-00:00:00, 90min or 8h" in problem
    for time in ("", "30", "8:00:00", "1-0", "2-00:00:00", "90min", "8h", "1.5d"):
        assert check(f'slurm.wall_time = "{time}"') == []


def test_a_url_needs_tokens_and_a_place_on_each_node() -> None:
    url = 'data.train = ["s3://bucket/train.bin"]'
    tokens, place = 'data.source = "tokens"', 'staging.directory = "/local"'
    assert check(tokens, url) == [
        "s3://bucket/train.bin is a URL and needs staging.directory, where each node keeps a copy"
    ]
    (problem,) = check('data.source = "text"', url, place)
    assert 's3://bucket/train.bin is a URL, which only data.source = "tokens" can read' in problem
    assert check(tokens, url, place) == []


def test_what_is_not_waited_for_is_not_required() -> None:
    place, unwaited = 'staging.directory = "/local"', "staging.wait = false"
    (problem,) = check(place, unwaited, "staging.required = true")
    assert problem.startswith("staging.wait = false reads tokens in place")
    assert check(place, unwaited) == []
    assert check(place, "staging.required = true") == []


ALL_TIERS = 'checkpoint.tiers = ["memory", "peer", "disk", "shared"]'


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (['checkpoint.tiers = ["memory", "shared"]', "recover.parity = 1"], 'add "peer"'),
        (
            ['checkpoint.tiers = ["memory", "peer", "shared"]', "recover.parity = 0"],
            "contradicts recover.parity = 0",
        ),
        ([ALL_TIERS], "needs checkpoint.fast"),
        (['checkpoint.tiers = ["shared"]', 'checkpoint.fast = "/local"'], 'add "disk"'),
        (
            ['checkpoint.tiers = ["memory", "shared"]', 'recover.mode = "off"'],
            'contradicts recover.mode = "off"',
        ),
        (['checkpoint.tiers = ["peer", "shared"]'], 'which needs "memory"'),
        (['checkpoint.tiers = ["shared", "memory"]'], "in this order"),
        (['checkpoint.tiers = ["memory"]'], 'ends in "shared"'),
        (["checkpoint.tiers = []"], 'ends in "shared"'),
    ],
)
def test_tiers_that_contradict_are_refused_in_every_loop(settings: list[str], words: str) -> None:
    for load in (load_job, load_loop_job):
        with pytest.raises(JobError) as refused:
            load(None, settings)
        [problem] = refused.value.problems
        assert words in problem
        assert problem.startswith("checkpoint.tiers = [")


def test_tiers_are_what_was_asked_for_or_follow_from_the_other_settings() -> None:
    def tiers(*settings: str) -> list[str]:
        job = load_job(None, list(settings))
        return tiers_of(job.checkpoint, job.recover)

    assert tiers() == ["memory", "peer", "shared"]
    assert tiers("recover.parity = 0") == ["memory", "shared"]
    assert tiers('recover.mode = "off"', 'checkpoint.fast = "/local"') == ["disk", "shared"]
    fast = 'checkpoint.fast = "/local"'
    assert tiers(ALL_TIERS, fast) == ["memory", "peer", "disk", "shared"]


def test_copies_back_off_below_a_limit() -> None:
    gentle, mirror = "checkpoint.back_off = true", 'checkpoint.mirror = "/safe"'
    limit = "checkpoint.mirror_megabytes_per_s = 100.0"
    assert "has no copies to slow down" in check(gentle)[0]
    (problem,) = check(gentle, mirror)
    assert problem.startswith("checkpoint.back_off = true needs checkpoint.mirror_megabytes_per_s")
    assert check(gentle, mirror, limit) == []
    plan = 'checkpoint.transfer_plan = "run.toml"'
    (problem,) = check(gentle, mirror, limit, plan)
    assert "cannot be combined with checkpoint.transfer_plan" in problem
    assert check(mirror, plan) == []
    assert "has no copies to plan" in check(plan)[0]
    assert check(plan, 'staging.directory = "/local"') == []


def test_a_burst_buffer_has_a_place_files_and_directives() -> None:
    files = ('data.source = "tokens"', 'data.train = ["a.bin"]')
    place, line = 'staging.directory = "/bb"', 'staging.burst_buffer_lines = ["#BB x"]'
    assert "needs staging.directory" in check(*files, 'staging.burst_buffer = "datawarp"')[0]
    assert check(*files, place, 'staging.burst_buffer = "datawarp"') == []
    assert "need each other" in check(*files, place, 'staging.burst_buffer = "lines"')[0]
    assert "need each other" in check(*files, place, line)[0]
    assert check(*files, place, line, 'staging.burst_buffer = "lines"') == []
    assert 'use "tokens"' in check(place, 'staging.burst_buffer = "rabbit"')[0]


@pytest.mark.parametrize("line", ["DW jobdw", "#SBATCH -N 9", "#!/bin/sh", "#BB a\\nrm -rf b"])
def test_what_is_no_directive_is_refused(line: str) -> None:
    (problem,) = check(f'staging.burst_buffer_lines = ["{line}"]')
    assert "one line that begins with the site's directive" in problem


def test_a_fixed_order_of_sums_is_for_live_groups_without_compiled_kernels() -> None:
    fixed = "recover.fixed_order = true"
    (problem,) = check(fixed)
    assert 'fixed_order = true is for live groups, but recover.mode = "restart"' in problem
    live = 'recover.mode = "live"'
    (problem,) = check(fixed, live, "train.compile = true")
    assert "recover.fixed_order = true and train.compile = true do not go together" in problem
    assert check(fixed, live) == []
    assert check(live, "train.compile = true") == []
