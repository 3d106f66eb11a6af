"""Conversion of a whole dense model: layers replaced, and fitted to the text that they read.

Distillation goes layer by layer: a structured layer learns to answer as a dense layer does.

Needed for layers with a nonlinearity in the middle, which no decomposition gives, and useful for
all others: it finds what matters for the inputs that really occur. Every layer is trained alone on

    |student(x) - teacher(x)|^2 / |teacher(x)|^2

for inputs x of the dense layer, by AdamW (Loshchilov and Hutter 2019) with steps relative to every
parameter's size (as in Adafactor, Shazeer and Stern 2018, section 8): factors that start from a
dense layer differ in size by orders of magnitude.

A layer with a nonlinearity in its middle starts such that it acts like a dense one
(`start_from_dense`).

``up act(down x)`` is no linear map, so no decomposition of a weight gives its factors. But for
z ~ N(0, s^2) any activation is a constant, a slope and a rest that is uncorrelated with both
(Bussgang 1952):

    act(z) = c + g z + rest,    c = E[act(z)],    g = E[z act(z)] / s^2.

With low-rank factors D, U of the weight, rows of D scaled by a_j so that each z_j has root mean
square s, ``down = diag(a) D`` and ``up = U diag(1 / (a g))`` give W x + c up 1 + up rest; the bias
takes up the constant. For SiLU, whose odd part is exactly z / 2 since
silu(z) = z / 2 + (z / 2) tanh(z / 2), g is 1/2 whatever s is, and the rest is about z^2 / 4: its
variance is s^2 / 2 of the signal's (to lowest order), so a small s makes the layer act as linear
as wanted, at the price of large entries in `up`, which learn slowly next to small ones in `down`.

What to expect: the layer sees x through r linear channels only. For normal x the best function of
these is the linear one, so no training of a bottleneck can get below the error of the best matrix
of rank r on such inputs; for others it can, by what their dependence is worth.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import glob
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outlast.errors import TensorizeError
from outlast.extras import require
from outlast.paths import check_regular
from outlast.tensorize.bottleneck import ACTIVATIONS
from outlast.tensorize.entry import KEY
from outlast.tensorize.export import TOKENIZER_FILES
from outlast.tensorize.low_rank import BottleneckLinear
from outlast.tensorize.replace import tensorize
from outlast.tensorize.shapes import form_named
from outlast.tensorize.svd import (
    low_rank,
    low_rank_for_inputs,
    output_change,
    to_blocks_for_inputs,
    working_copy,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch.utils.hooks import RemovableHandle

    from outlast.tensorize.policy import Rank
    from outlast.tensorize.replace import Replacements


class InputMoments:
    """Collects E[x x^T] of the inputs of linear layers inside a ``with`` block.

    ::

        with InputMoments(model, match="*.mlp.*") as moments, torch.no_grad():
            for batch in batches:
                model(batch)
        factors = low_rank_for_inputs(layer.weight, moments[name], rank=64)

    Sums are float64 on the layer's device: 8 in^2 bytes a layer, 134 MB at 4096 features. Modules
    that read the same tensor are each counted.

    Args:
        model: The model whose `nn.Linear` layers are watched.
        match: Pattern or patterns of module names (as of a shell); any fitting one counts.

    Raises:
        TensorizeError: Where no linear layer has a matching name; and, from the model's forward,
            for inputs that are not finite.
    """

    def __init__(self, model: nn.Module, *, match: str | Sequence[str] = "*") -> None:
        patterns = (match,) if isinstance(match, str) else tuple(match)
        self._layers: dict[str, nn.Linear] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        if not self._layers:
            raise TensorizeError(f"match = {match!r} fits the name of no nn.Linear in the model")
        self._sums: dict[str, Tensor] = {}
        self._tokens = dict.fromkeys(self._layers, 0)
        self._handles: list[RemovableHandle] = []

    @property
    def tokens(self) -> Mapping[str, int]:
        """Rows that each layer has read so far."""
        return dict(self._tokens)

    def __getitem__(self, name: str) -> Tensor:
        """Second moment of a layer's input: (in, in), float64.

        Raises:
            TensorizeError: For a layer that is not watched or has read nothing.
        """
        if name not in self._layers:
            raise TensorizeError(f"no inputs are collected of {name!r}: it does not fit `match`")
        if not self._tokens[name]:
            raise TensorizeError(
                f"{name!r} has read no input yet: run calibration batches inside the with block"
            )
        return self._sums[name] / self._tokens[name]

    def __enter__(self) -> InputMoments:
        for name, layer in self._layers.items():
            hook = functools.partial(self._add, name)
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Sums made in inference mode could not be added to outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _add(
        self, name: str, _: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Tensor]
    ) -> None:
        inputs = (arguments[0] if arguments else named["input"]).detach()
        rows = inputs.reshape(-1, inputs.shape[-1])
        if not rows.shape[0]:
            return
        wide = rows.to(torch.float32 if rows.device.type == "mps" else torch.float64)
        if not bool(torch.isfinite(wide.sum(0)).all()):
            raise TensorizeError(f"an input of {name!r} is not finite: calibrate on a sound model")
        moment = wide.mT @ wide
        if name in self._sums:
            self._sums[name].add_(moment)
        else:
            self._sums[name] = moment
        self._tokens[name] += rows.shape[0]


SIGNAL = 0.25
"""Root mean square before the activation: the rest is then 3 % of the variance for SiLU."""


@torch.no_grad()
def start_from_dense(
    student: BottleneckLinear, teacher: nn.Linear, *, moment: Tensor | None = None
) -> None:
    """Fill a bottleneck layer in place so that it is about the best ``W' x`` of its rank.

    Without a bias in the student, the activation's mean stays in its output.

    Args:
        student: The layer to fill.
        teacher: The dense layer it shall stand for.
        moment: (in, in) second moment of the inputs, see `outlast.tensorize.svd`; None: independent
            inputs of variance 1.

    Raises:
        TensorizeError: The shapes differ, or the teacher has a bias and the student none; or a
            weight or moment cannot be used.
    """
    wanted = (student.up.out_features, student.down.in_features)
    if tuple(teacher.weight.shape) != wanted:
        raise TensorizeError(
            f"the dense layer's weight has shape {tuple(teacher.weight.shape)}, but the layer that "
            f"is to replace it has {wanted}"
        )
    if teacher.bias is not None and student.up.bias is None:
        raise TensorizeError("the dense layer has a bias, so what replaces it needs bias = True")
    wide, rank = working_copy(teacher.weight), student.down.out_features
    if moment is None:
        down, up = low_rank(wide, rank=rank)
        squares = down.square().sum(1)
    else:
        down, up = low_rank_for_inputs(wide, moment, rank=rank)
        squares = (down @ moment.to(down) * down).sum(1)
    # sqrt(E z_j^2) of z = down x, 1 where it is zero.
    size = torch.where(squares > 0, squares, torch.ones_like(squares)).sqrt()
    scale = SIGNAL / size
    mean, slope = linear_part(student.activation, SIGNAL)
    up = up / (scale * slope)
    student.down.weight.copy_((down * scale[:, None]).to(teacher.weight.dtype))
    student.up.weight.copy_(up.to(teacher.weight.dtype))
    if student.up.bias is not None:
        shift = (-mean * up.sum(1)).to(teacher.weight.dtype)
        student.up.bias.copy_(shift + (0.0 if teacher.bias is None else teacher.bias))


def linear_part(activation: str, signal: float) -> tuple[float, float]:
    """Mean and slope c, g of an activation for z ~ N(0, signal^2), by the trapezoidal rule.

    Raises:
        TensorizeError: For an activation without a linear part.
    """
    step = 1e-3
    points = torch.arange(-10_000, 10_001, dtype=torch.float64) * step
    density = torch.exp(-points.square() / 2.0) * (step / math.sqrt(2.0 * math.pi))
    values = ACTIVATIONS[activation](signal * points)
    mean = float((values * density).sum())
    slope = float((values * points * density).sum()) / signal
    if abs(slope) < 1e-6:
        raise TensorizeError(f"activation = {activation!r} has no linear part to start from")
    return mean, slope


LearningRate = float | Callable[[int], float]
"""A constant, or a function of the step, counted from 0. It is the share of a parameter's root mean
square at the start that AdamW moves it by in a step."""

_SMALLEST = 1e-3
"""Root mean square that parameters are taken to have at least: biases may start at zero."""


def cosine(peak: float, steps: int, *, warmup: int = 0) -> Callable[[int], float]:
    """A learning rate that rises linearly for `warmup` steps and falls to 0 as a cosine."""

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        share = (step - warmup) / max(1, steps - warmup)
        return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))

    return rate


def distill_model(
    student: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    learning_rate: LearningRate = 1e-2,
    on_batch: Callable[[int, Mapping[str, float]], None] | None = None,
) -> dict[str, tuple[float, ...]]:
    """Train every structured layer of a model on the inputs of the dense layer of the same name.

    One forward of the teacher per batch; each layer takes its step in a hook on its dense
    counterpart, so the activations of one layer at a time are held. All layers learn from the
    inputs that the *teacher* gives them, so their order does not matter and errors do not add up.

    Args:
        student: Model in which layers were replaced; only these are trained, in place.
        teacher: The model with the dense layers (`nn.Linear`), run in evaluation mode.
        batches: Arguments of the teacher's forward: a mapping (keywords), a tuple or list
            (positions), or one tensor.
        learning_rate: Of AdamW, relative to the parameters, see `LearningRate` and `cosine`.
        on_batch: Called with the number of the batch and every layer's relative error before its
            step.

    Returns:
        By the layer's name, ``|student(x) - teacher(x)| / |teacher(x)|`` of every batch, before
        its step; batches from which there is nothing to learn are left out.

    Raises:
        TensorizeError: Where no layer was replaced, or errors stop being finite.
    """
    replaced = replaced_layers(student, teacher)
    if not replaced:
        raise TensorizeError(
            "no nn.Linear of the teacher has another layer in its place in the student: "
            "replace some with outlast.tensorize.tensorize first"
        )
    errors: dict[str, list[float]] = {name: [] for name in replaced}
    latest: dict[str, float] = {}
    training = teacher.training
    handles = []

    def learn(
        trainer: LayerTrainer,
        _: nn.Module,
        arguments: tuple[Tensor, ...],
        named: dict[str, Tensor],
        output: Tensor,
    ) -> None:
        error = trainer.step(arguments[0] if arguments else named["input"], output)
        if error is not None:
            latest[trainer.name] = error

    with widened(*(layer for _, layer in replaced.values())):
        try:
            teacher.eval()
            for name, (dense, layer) in replaced.items():
                hook = functools.partial(learn, LayerTrainer(name, layer, learning_rate))
                handles.append(dense.register_forward_hook(hook, with_kwargs=True))
            for number, batch in enumerate(batches):
                latest.clear()
                with torch.no_grad():
                    if isinstance(batch, Mapping):
                        teacher(**batch)
                    elif isinstance(batch, Sequence):
                        teacher(*batch)
                    else:
                        teacher(batch)
                for name, error in latest.items():
                    errors[name].append(error)
                if on_batch is not None:
                    on_batch(number, dict(latest))
        finally:
            for handle in handles:
                handle.remove()
            teacher.train(training)
    return {name: tuple(values) for name, values in errors.items()}


def replaced_layers(
    student: nn.Module, teacher: nn.Module
) -> dict[str, tuple[nn.Linear, nn.Module]]:
    """Dense layers of the teacher whose place another kind of module has in the student."""
    layers = dict(student.named_modules())
    return {
        name: (module, layers[name])
        for name, module in teacher.named_modules()
        if isinstance(module, nn.Linear)
        and name in layers
        and not isinstance(layers[name], nn.Linear)
    }


class LayerTrainer:
    """AdamW on one layer."""

    def __init__(self, name: str, student: nn.Module, learning_rate: LearningRate) -> None:
        self.name = name
        self._student = student
        self._rate = learning_rate
        self._steps = 0
        trained = [one for one in student.parameters() if one.requires_grad]
        if not trained:
            raise TensorizeError(
                f"{type(student).__name__} has no parameter that requires a gradient: "
                f"unfreeze it for distillation"
            )
        self._sizes = [
            max(float(one.detach().square().mean().sqrt()), _SMALLEST) for one in trained
        ]
        groups = [{"params": [one]} for one in trained]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0)
        self._dtype = trained[0].dtype

    def step(self, inputs: Tensor, wanted: Tensor) -> float | None:
        """One step; the relative error before it, or None where there is nothing to learn from."""
        target = wanted.detach().to(self._dtype)
        scale = float(target.square().sum())
        if scale == 0.0:
            return None
        rate = self._rate(self._steps) if callable(self._rate) else self._rate
        with torch.enable_grad(), torch.autocast(inputs.device.type, enabled=False):
            loss = (self._student(inputs.detach().to(self._dtype)) - target).square().sum() / scale
            value = float(loss.detach())
            if not math.isfinite(value):
                raise TensorizeError(
                    f"distillation of {self.name} is not finite at step {self._steps}: "
                    f"lower learning_rate = {rate} or check the inputs"
                )
            for group, size in zip(self._optimizer.param_groups, self._sizes, strict=True):
                group["lr"] = rate * size
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        return math.sqrt(value)


@contextlib.contextmanager
def widened(*modules: nn.Module) -> Iterator[None]:
    """Half-precision parameters are float32 inside: AdamW's steps are lost to their rounding."""
    narrow = {
        parameter: parameter.dtype
        for module in modules
        for parameter in module.parameters()
        if parameter.dtype in (torch.bfloat16, torch.float16)
    }
    for parameter in narrow:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, dtype in narrow.items():
            parameter.data = parameter.data.to(dtype)


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
        check_regular(file)
        with file.open("rb") as opened:
            raw = opened.read(wanted * _BYTES_PER_TOKEN)
    except OSError as error:
        raise TensorizeError(f"the text {file} cannot be read: {error.strerror}") from None
    are_bytes = not any((directory / name).is_file() for name in TOKENIZER_FILES)
    ids = list(raw)
    if not are_bytes:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
            decoded = raw.decode("utf-8", errors="replace")
            ids = [int(id_) for id_ in tokenizer(decoded, add_special_tokens=False)["input_ids"]]
        except Exception as error:  # tokenizers raise errors of many kinds
            reason = " ".join(str(error).split())[:200]
            raise TensorizeError(f"the tokenizer of {directory} cannot be used: {reason}") from None
    vocabulary = config.vocab_size
    if are_bytes and vocabulary < 256:
        raise TensorizeError(
            f"{directory} has no tokenizer files, and its vocabulary of {vocabulary} is too "
            "small to read bytes: put the tokenizer beside the model"
        )
    if not are_bytes and max(ids, default=0) >= vocabulary:
        raise TensorizeError(
            f"the tokenizer of {directory} gives the id {max(ids)}, and the model's vocabulary "
            f"has {vocabulary}: put the model's own tokenizer there"
        )
    count = min(len(ids), wanted) // window
    held = max(1, count // HELD_OUT)
    if count < 2:
        raise TensorizeError(
            f"the text {file} has {len(ids)} tokens, and 2 sequences of {window} are the least: "
            "give a longer text or a smaller window"
        )
    sequences = torch.tensor(ids[: count * window]).view(count, window)
    return CalibrationText(sequences[:-held], sequences[-held:], are_bytes)


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
"""Stage under way, units done, and units in all."""

_MOMENT_BYTES = 2 << 30
"""Second moments that are held at a time; with more, the text is read once more."""

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
    require("train", "a Hugging Face model", "transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (directory / "config.json").is_file():
        raise TensorizeError(
            f"{directory} holds no config.json: give the folder of a Hugging Face model on this "
            "machine"
        )
    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
        if hasattr(config, KEY):
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
    # With the same memory, so that all layers are alike.
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Conv1D":
            into, out = module.weight.shape
            linear = nn.Linear(into, out, device="meta")
            linear.weight = nn.Parameter(module.weight.detach().t())
            linear.bias = module.bias
            model.set_submodule(name, linear.train(module.training))
    held_out, steps = text.held_out, settings.distill_steps
    before = perplexity(model, held_out, lambda *n: say("perplexity of the dense model", *n))
    say("replacing layers", 0, 1)
    student = copy.deepcopy(model)
    report = _tensorized(student, settings)
    if settings.form in _FITTED:
        _fit(student, model, report, text, say)
    if steps:
        # Every layer learns by itself, from what the dense layer reads and answers.
        turns = itertools.chain.from_iterable(
            batches(text.calibration, model.device) for _ in itertools.count()
        )
        distill_model(
            student,
            model,
            itertools.islice(turns, steps),
            learning_rate=cosine(_RATE, steps, warmup=min(10, steps // 10)),
            on_batch=lambda number, errors: say("distilling", number + 1, steps),
        )
    read = list(batches(held_out, model.device))
    # With a rate of zero, distillation measures and moves nothing.
    found = distill_model(
        student,
        model,
        read,
        learning_rate=0.0,
        on_batch=lambda number, errors: say("measuring layers", number + 1, len(read)),
    )
    # Root mean square over batches.
    errors = {
        name: math.sqrt(sum(error**2 for error in errors) / len(errors))
        for name, errors in found.items()
        if errors
    }
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
            init="scratch" if settings.form == "cola" else "from_dense",
            force=settings.force,
            **options,
        )


@torch.no_grad()
def _fit(
    student: nn.Module, teacher: Any, report: Replacements, text: CalibrationText, say: Progress
) -> None:
    """Give layers the factors that change their outputs least."""
    # Those that have factors of their own and stood for a linear layer.
    names = [
        row.name
        for row in report.replaced
        if row.parameters and type(teacher.get_submodule(row.name)) is nn.Linear
    ]
    # Layers whose second moments fit into memory together.
    groups: list[list[str]] = []
    held = _MOMENT_BYTES
    for name in names:
        size = 8 * teacher.get_submodule(name).in_features ** 2
        if held + size > _MOMENT_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
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


def _fit_layer(layer: Any, dense: Any, moment: Tensor) -> None:
    if layer.form == "cola":
        start_from_dense(layer, dense, moment=moment)
        return
    network = layer.network
    rank = network.size(network.bonds)
    if layer.form == "low_rank":
        found = low_rank_for_inputs(dense.weight, moment, rank=rank)
    else:
        (m1, m0), (n0, n1) = (map(network.size, side) for side in (network.inputs, network.outputs))
        found = to_blocks_for_inputs(
            dense.weight, moment, in_modes=(m1, m0), out_modes=(n0, n1), rank=rank
        )
    # Blocks are fitted as if their inputs did not correlate, which can be worse than no weights.
    if found.error < output_change(dense.weight - layer.to_dense(), moment):
        for factor, core in zip(layer.factors(), found.cores, strict=True):
            factor.copy_(core)
