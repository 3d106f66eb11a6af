"""Conversion of a whole dense model: layers replaced, and fitted to the text that they read."""

from __future__ import annotations

import contextlib
import copy
import glob
import io
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from outlast.errors import TensorizeError
from outlast.tensorize.convert.distill import InputMoments, cosine, distill_model, start_from_dense
from outlast.tensorize.convert.svd import low_rank_for_inputs, output_change, to_blocks_for_inputs
from outlast.tensorize.export import TOKENIZER_FILES
from outlast.tensorize.hf import entry as entries
from outlast.tensorize.replace import tensorize
from outlast.tensorize.shapes import form_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from outlast.tensorize.policy import Rank
    from outlast.tensorize.table import Replacements


HELD_OUT = 5
"""One in so many sequences is held out."""

LONGEST_WINDOW = 512
"""Tokens in a sequence, where nobody says otherwise and the model takes as many."""

_BYTES_PER_TOKEN = 16

_BATCH = 4


@dataclass(frozen=True, eq=False)
class CalibrationText:
    """A text as sequences of token ids.

    Attributes:
        calibration: (sequences, window) to fit to.
        held_out: (sequences, window) from the text's end, to judge by.
        tokens_are_bytes: Whether there was no tokenizer.
    """

    calibration: Tensor
    held_out: Tensor
    tokens_are_bytes: bool


def read_text(
    file: Path, directory: Path, config: Any, *, tokens: int = 32768, window: int | None = None
) -> CalibrationText:
    """Read a file with the tokenizer of a model.

    Models without tokenizer files read bytes, as Outlast's trainer gives them by default.

    Args:
        file: The text; only as much of it as is needed is read.
        directory: The model's folder.
        config: The model's config.
        tokens: To calibrate with, at most; a quarter more is read to be held out.
        window: Tokens in a sequence; None: 512, or fewer where the model takes fewer.

    Raises:
        TensorizeError: The file cannot be read or is too short, or the tokenizer cannot be loaded
            or is not that of the model.
    """
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or LONGEST_WINDOW
    window = min(LONGEST_WINDOW, longest) if window is None else window
    if not 2 <= window <= longest or tokens < window:
        raise TensorizeError(
            f"window = {window} must be between 2 and the {longest} positions of the model, and "
            f"tokens = {tokens} at least as many"
        )
    calibrating = tokens // window
    wanted = (calibrating + max(1, calibrating // (HELD_OUT - 1))) * window
    try:
        with file.open("rb") as opened:
            raw = opened.read(wanted * _BYTES_PER_TOKEN)
    except OSError as error:
        raise TensorizeError(f"the text {file} cannot be read: {error.strerror}") from None
    ids, are_bytes = _encoded(raw, directory, config.vocab_size)
    count = min(len(ids), wanted) // window
    held = max(1, count // HELD_OUT)
    if count < 2:
        raise TensorizeError(
            f"the text {file} has {len(ids)} tokens, and 2 sequences of {window} are the least: "
            "give a longer text or a smaller window"
        )
    sequences = torch.tensor(ids[: count * window]).view(count, window)
    return CalibrationText(sequences[:-held], sequences[-held:], are_bytes)


def _encoded(raw: bytes, directory: Path, vocabulary: int) -> tuple[list[int], bool]:
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        if vocabulary < 256:
            raise TensorizeError(
                f"{directory} has no tokenizer files, and its vocabulary of {vocabulary} is too "
                "small to read bytes: put the tokenizer beside the model"
            )
        return list(raw), True
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        text = raw.decode("utf-8", errors="replace")
        ids = [int(id_) for id_ in tokenizer(text, add_special_tokens=False)["input_ids"]]
    except Exception as error:  # tokenizers raise errors of many kinds
        reason = " ".join(str(error).split())[:200]
        raise TensorizeError(f"the tokenizer of {directory} cannot be used: {reason}") from None
    if max(ids, default=0) >= vocabulary:
        raise TensorizeError(
            f"the tokenizer of {directory} gives the id {max(ids)}, and the model's vocabulary "
            f"has {vocabulary}: put the model's own tokenizer there"
        )
    return ids, False


def batches(sequences: Tensor, device: torch.device) -> Iterator[dict[str, Any]]:
    """Keywords of the model's forward, a few sequences at a time."""
    for part in torch.split(sequences, _BATCH):
        yield {"input_ids": part.to(device), "use_cache": False}


@torch.no_grad()
def perplexity(model: Any, sequences: Tensor, progress: Callable[[int, int], None]) -> float:
    """Perplexity over all tokens but the first of each sequence.

    Args:
        model: A causal language model.
        sequences: (sequences, window).
        progress: Called with sequences done and in all.

    Returns:
        e to the mean loss in nats per token.
    """
    total, done = 0.0, 0
    for batch in batches(sequences, model.device):
        ids = batch["input_ids"]
        scores = model(**batch).logits[:, :-1].float()
        loss = functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        total += float(loss)
        done += len(ids)
        progress(done, len(sequences))
    mean = total / (len(sequences) * (sequences.shape[1] - 1))
    return math.exp(mean) if mean < 700 else math.inf


Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is, and how much there is."""

_MOMENT_BYTES = 2 << 30
"""Second moments that are held at a time; with more, the text is read once more."""

NO_MATRICES = ("cola", "lax")
"""Forms with something between their factors."""

_FITTED = ("low_rank", "btt", "monarch", "cola")

_RATE = 1e-2


@dataclass(frozen=True)
class ConversionSettings:
    """Settings of a conversion; see `outlast.tensorize.replace.tensorize`.

    Attributes:
        form: The form.
        rank: See `outlast.tensorize.policy.Rank`.
        match: Patterns of names.
        exclude: Patterns of names that stay.
        activation: Of ``cola``.
        cores: Modes on each side.
        force: Also replace what gains nothing.
        distill_steps: Steps in which every layer learns to answer as the dense one does.
    """

    form: str = "low_rank"
    rank: Rank = 0.25
    match: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    activation: str = "silu"
    cores: int | None = None
    force: bool = False
    distill_steps: int = 0


@dataclass(frozen=True, eq=False)
class ConvertedModel:
    """A converted model.

    Attributes:
        model: In evaluation mode.
        report: What was replaced. With a text the errors are of the layers' outputs, root mean
            square over held-out text as a share of theirs, when the dense model feeds both; else
            of the weights.
        perplexities: Before and after on held-out text; None without a text.
    """

    model: Any
    report: Replacements
    perplexities: tuple[float, float] | None


def check(settings: ConversionSettings, *, calibrates: bool) -> None:
    """Refuse what cannot be done, before anything is loaded.

    Raises:
        TensorizeError: See above.
    """
    form_named(settings.form)
    if settings.form == "lax":
        raise TensorizeError(
            "form = 'lax' adds layers' latents up, which no dense model is turned into: train it "
            "from scratch, or use form = 'low_rank'"
        )
    if settings.distill_steps < 0:
        raise TensorizeError(f"distill_steps = {settings.distill_steps} must be 0 or more")
    if settings.form == "cola" and not calibrates:
        raise TensorizeError(
            "form = 'cola' has a nonlinearity and is fitted to what the layers read: give a text "
            "(--calibrate FILE), or use form = 'low_rank'"
        )
    if settings.distill_steps and not calibrates:
        raise TensorizeError(
            f"distill_steps = {settings.distill_steps} needs a text to learn from: give one "
            "(--calibrate FILE)"
        )


def load_dense(directory: Path) -> Any:
    """A causal language model from a local folder, in the dtype that it has there.

    Raises:
        TensorizeError: The folder holds none, not all of its weights, or one that needs code.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (directory / "config.json").is_file():
        raise TensorizeError(
            f"{directory} holds no config.json: give the folder of a Hugging Face model on this "
            "machine"
        )
    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
        if hasattr(config, entries.KEY):
            raise TensorizeError(
                f"{directory} holds factors already: give the dense model that they came from"
            )
        with contextlib.redirect_stderr(io.StringIO()):
            model, found = AutoModelForCausalLM.from_pretrained(
                str(directory),
                config=config,
                dtype="auto",
                local_files_only=True,
                output_loading_info=True,
            )
    except TensorizeError:
        raise
    except Exception as error:  # transformers raises errors of many kinds
        reason = " ".join(str(error).split())[:300]
        raise TensorizeError(f"the model in {directory} cannot be loaded: {reason}") from None
    if found["missing_keys"]:
        some = ", ".join(sorted(found["missing_keys"])[:3])
        raise TensorizeError(
            f"{directory} lacks {len(found['missing_keys'])} weights of its model ({some}): "
            "download it again"
        )
    return model.eval()


def convert_model(
    model: Any,
    settings: ConversionSettings,
    text: CalibrationText | None = None,
    progress: Progress | None = None,
) -> ConvertedModel:
    """Replace the layers of a dense model by those nearest to them.

    With a text, low-rank and block layers are those that change the outputs least for what they
    read of it (activation-weighted singular values), and all forms can be distilled.

    Args:
        model: A causal language model of transformers; without a text it is changed in place, with
            one it is the copy that is.
        settings: What it becomes.
        text: What to calibrate and judge by.
        progress: See `Progress`.

    Raises:
        TensorizeError: See `check` and `tensorize`, or values are not finite.
    """
    check(settings, calibrates=text is not None)
    say = progress or (lambda what, done, total: None)
    if text is None:
        say("replacing layers", 0, 1)
        return ConvertedModel(model, _tensorized(model, settings), None)
    _make_linear(model)
    held_out = text.held_out
    before = perplexity(model, held_out, lambda *n: say("perplexity of the dense model", *n))
    say("replacing layers", 0, 1)
    student = copy.deepcopy(model)
    report = _tensorized(student, settings)
    if settings.form in _FITTED:
        _fit(student, model, _fittable(report, model), text, say)
    if settings.distill_steps:
        _distill(student, model, settings.distill_steps, text, say)
    errors = _output_errors(student, model, held_out, say)
    rows = tuple(replace(row, error=errors.get(row.name, row.error)) for row in report.replaced)
    after = perplexity(student, held_out, lambda *n: say("perplexity of the converted model", *n))
    return ConvertedModel(student.eval(), replace(report, replaced=rows), (before, after))


def _tensorized(model: nn.Module, settings: ConversionSettings) -> Replacements:
    options: dict[str, Any] = {"cores": settings.cores} if settings.cores else {}
    with torch.no_grad():
        return tensorize(
            model,
            form=settings.form,
            rank=settings.rank,
            match=settings.match,
            exclude=settings.exclude or None,
            # Of other forms a nonlinearity is no part.
            activation=settings.activation if settings.form == "cola" else None,
            init="scratch" if settings.form in NO_MATRICES else "from_dense",
            force=settings.force,
            **options,
        )


def _make_linear(model: nn.Module) -> None:
    """Make `nn.Linear` of GPT-2's Conv1D, with the same memory, so that all layers are alike."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Conv1D":
            weight: Any = module.weight
            into, out = weight.shape
            linear = nn.Linear(into, out, device="meta")
            linear.weight = nn.Parameter(weight.detach().t())
            linear.bias = module.bias
            model.set_submodule(name, linear.train(module.training))


def _fittable(report: Replacements, teacher: nn.Module) -> list[str]:
    """Names of replaced layers that have factors of their own and stood for a linear layer."""
    return [
        row.name
        for row in report.replaced
        if row.parameters and type(teacher.get_submodule(row.name)) is nn.Linear
    ]


@torch.no_grad()
def _fit(
    student: nn.Module, teacher: Any, names: Sequence[str], text: CalibrationText, say: Progress
) -> None:
    """Give layers the factors that change their outputs least."""
    groups = list(_groups(teacher, names))
    done = 0
    for number, group in enumerate(groups):
        what = "reading the text" + (f", part {number + 1} of {len(groups)}" if number else "")
        match = [glob.escape(name) for name in group]
        with InputMoments(teacher, match=match) as moments:
            for place, batch in enumerate(batches(text.calibration, teacher.device)):
                say(what, place, math.ceil(len(text.calibration) / len(batch["input_ids"])))
                teacher(**batch)
        for name in group:
            say("fitting layers", done, len(names))
            done += 1
            if moments.tokens[name]:
                layer, dense = student.get_submodule(name), teacher.get_submodule(name)
                _fit_layer(layer, dense, moments[name])


def _groups(teacher: nn.Module, names: Sequence[str]) -> Iterator[list[str]]:
    """Layers whose second moments fit into memory together."""
    group: list[str] = []
    held = 0
    for name in names:
        layer: Any = teacher.get_submodule(name)
        size = 8 * layer.in_features**2
        if group and held + size > _MOMENT_BYTES:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield group


def _fit_layer(layer: Any, dense: Any, moment: Tensor) -> None:
    if layer.form == "cola":
        start_from_dense(layer, dense, moment=moment)
        return
    network = layer.network
    rank = network.size(network.bonds)
    if layer.form == "low_rank":
        found = low_rank_for_inputs(dense.weight, moment, rank=rank)
    else:
        into, out = (tuple(map(network.size, side)) for side in (network.inputs, network.outputs))
        (m1, m0), (n0, n1) = into, out
        found = to_blocks_for_inputs(
            dense.weight, moment, in_modes=(m1, m0), out_modes=(n0, n1), rank=rank
        )
    # Blocks are fitted as if their inputs did not correlate, which can be worse than no weights.
    if found.error < output_change(dense.weight - layer.to_dense(), moment):
        for factor, core in zip(layer.factors(), found.cores, strict=True):
            factor.copy_(core)


def _distill(
    student: nn.Module, teacher: Any, steps: int, text: CalibrationText, say: Progress
) -> None:
    """Every layer learns by itself, from what the dense layer reads and answers."""
    turns = itertools.chain.from_iterable(
        batches(text.calibration, teacher.device) for _ in itertools.count()
    )
    distill_model(
        student,
        teacher,
        itertools.islice(turns, steps),
        learning_rate=cosine(_RATE, steps, warmup=min(10, steps // 10)),
        on_batch=lambda number, errors: say("distilling", number + 1, steps),
    )


def _output_errors(
    student: nn.Module, teacher: Any, held_out: Tensor, say: Progress
) -> dict[str, float]:
    """Relative errors of the replaced layers' outputs, root mean square over batches."""
    read = list(batches(held_out, teacher.device))
    # With a rate of zero, distillation measures and moves nothing.
    found = distill_model(
        student,
        teacher,
        read,
        learning_rate=0.0,
        on_batch=lambda number, errors: say("measuring layers", number + 1, len(read)),
    )
    return {
        name: math.sqrt(sum(error**2 for error in errors) / len(errors))
        for name, errors in found.items()
        if errors
    }
