"""Trained models as folders that load elsewhere, and layers as fast ones for generating text.

`export_dense` writes a plain Hugging Face model, `export_factored` the factors themselves,
``model.save_pretrained`` of transformers both, and `absorb` merges chains of cores in place. None
of them changes what the model computes.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.errors import TensorizeError
from outlast.extras import require
from outlast.tensorize import entry as entries
from outlast.tensorize.embedding import StructuredEmbedding, TiedHead, name_of, tied_heads
from outlast.tensorize.entry import Structured, dense_layer, is_matrix, merged_layer, structured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
)
"""Files of Hugging Face's tokenizers."""


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse to write where something is that should stay.

    Raises:
        TensorizeError: `target` is a file, or a folder that is not empty and may not be replaced,
            or holds no model.
    """
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir() or target.is_symlink():
        raise TensorizeError(f"{target} is no folder: give another name to write the model to")
    held = {path.name for path in target.iterdir()}
    if not held:
        return
    if not overwrite:
        raise TensorizeError(
            f"{target} exists: give another folder to write the model to, or --force "
            "(overwrite = True) to replace it"
        )
    if "config.json" not in held:
        raise TensorizeError(
            f"{target} holds no config.json, so it is no model to replace: give another folder"
        )


@contextlib.contextmanager
def new_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill, which gets its name at the end of the block, when its files are durable.

    Args:
        target: Its name; must be new or an empty folder unless `overwrite`.
        overwrite: Replace a model that is there, once the new one is whole.

    Raises:
        TensorizeError: See `check_target`; or the files cannot be written.
    """
    target = target.absolute()
    check_target(target, overwrite=overwrite)
    partial, earlier = (
        target.with_name(f".{target.name}.{os.getpid()}.{kind}") for kind in ("partial", "old")
    )
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for file in partial.rglob("*"):
            _make_durable(file)
        _make_durable(partial)
        # Somebody may have put a folder there meanwhile.
        check_target(target, overwrite=overwrite)
        if target.exists():
            target.rename(earlier)
        partial.rename(target)
        _make_durable(target.parent)
        shutil.rmtree(earlier, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        if earlier.exists() and not target.exists():
            earlier.rename(target)
        reason = getattr(error, "strerror", None) or error
        raise TensorizeError(
            f"the model cannot be written to {target}: {reason}; give another folder"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copy a tokenizer's files; returns their names."""
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, folder / name)
    return found


def _make_durable(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


VARIANT = "factored"
"""Part of the names of files of factors, so that nobody takes them for the dense weights."""

_CONFIG = "config.json"

_LAYERS_FILE = "outlast_tensorize.json"

_CODE_FILE = "modeling_outlast.py"

_SHARD = "5GB"


def absorb(model: nn.Module) -> dict[str, str]:
    """Merge the cores of a model's layers, in place, for generating text.

    Tensor trains, Tucker and CP layers become two factors, of the rank of the best cut of their
    chain, where that is fewer parameters than dense; what is not two matrices (tensor-train
    matrices, low rank plus sparse) or has no fewer parameters becomes `nn.Linear` or
    `nn.Embedding`. Block tensor trains, Monarch layers and nonlinear ones stay. The model computes
    the same, up to rounding. Layers that share their factors still do.

    Args:
        model: Any module; call it before `torch.compile` and after training.

    Returns:
        Name of every changed layer -> ``low_rank`` or ``dense``.
    """
    changed = {}
    heads = {
        name: (head, name_of(head.embedding, model)) for name, head in tied_heads(model).items()
    }
    for name, layer in _replaced(model, merged_layer).items():
        model.set_submodule(name, layer)
        changed[name] = "low_rank" if hasattr(layer, "network") else "dense"
    for name, (head, embedding) in heads.items():
        if embedding in changed:
            kind = _retied(model, name, head, model.get_submodule(embedding))
            changed[name] = kind
    return changed


def _retied(model: nn.Module, name: str, head: TiedHead, embedding: nn.Module) -> str:
    """Tie a head to what its embedding has become; gives what the head is then."""
    if isinstance(embedding, StructuredEmbedding):
        head.tie(embedding)
        return "low_rank"
    linear = nn.Linear(head.in_features, head.out_features, head.bias is not None, device="meta")
    linear.weight = embedding.weight  # type: ignore[assignment]
    if head.bias is not None:
        linear.bias = head.bias
    model.set_submodule(name, linear.train(head.training))
    return "dense"


def _replaced(model: nn.Module, make: Callable[[Structured], nn.Module]) -> dict[str, nn.Module]:
    """Call `make` for every layer and return those that it changes; shared factors stay shared."""
    made: dict[int, nn.Module] = {}
    leaders: dict[tuple[int, ...], nn.Module] = {}
    found = {}
    for name, layer in structured(model).items():
        if id(layer) not in made:
            new = make(layer)
            leader = leaders.setdefault(tuple(map(id, layer.factors())), new)
            if leader is not new:
                for own, parameter in list(leader.named_parameters()):
                    home, _, last = own.rpartition(".")
                    if last == "weight":
                        setattr(new.get_submodule(home), last, parameter)
            made[id(layer)] = new
        if made[id(layer)] is not layer:
            found[name] = made[id(layer)]
    return found


def export_dense(
    model: nn.Module,
    directory: Path | str,
    *,
    tokenizer: Path | str | None = None,
    overwrite: bool = False,
    max_shard_size: str = _SHARD,
) -> Path:
    """Write a plain Hugging Face model, with dense weights in the place of factors.

    ``AutoModelForCausalLM.from_pretrained(directory)`` loads it without Outlast. The given model
    is not changed; meanwhile its dense weights take memory as well.

    Args:
        model: A `PreTrainedModel` of transformers.
        directory: Where to; appears whole or not at all.
        tokenizer: A folder whose tokenizer files are copied.
        overwrite: Replace a model that is there.
        max_shard_size: Size from which weights are written in several files.

    Returns:
        The directory.

    Raises:
        TensorizeError: The model is none of transformers, a layer is no matrix, or the directory
            cannot be written.
    """
    _check_model(model)
    for name, layer in structured(model).items():
        if not is_matrix(layer):
            raise TensorizeError(
                f"{name} ({layer.form}) is no matrix, so there is no dense model of the same "
                "function: write its factors (export_factored, --as factored)"
            )
    plain = _dense_model(model)
    target = Path(directory)
    with new_folder(target, overwrite=overwrite) as folder:
        _save(plain, folder, max_shard_size=max_shard_size)
        if tokenizer is not None:
            copy_tokenizer(Path(tokenizer), folder)
    return target


def _save(model: Any, folder: Path, **options: Any) -> None:
    """``save_pretrained`` without its progress bar."""
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder, **options)


def save_with_dense_weights(
    save: Callable[..., Any], model: Any, directory: Any, *positional: Any, **named: Any
) -> Any:
    """``save_pretrained`` of a model that may have structured layers.

    Beside the factors, from which training resumes, the files hold each layer's dense weight, with
    which ``from_pretrained`` gives the same function. A layer that is no matrix gets an empty
    weight instead, so that ``from_pretrained`` raises where it would draw random numbers. With
    ``outlast_tensorize.json``, `load_factored` gives the very model back.

    Args:
        save: The method of transformers.
        model: A `PreTrainedModel`, or a part of one that is such a model itself.
        directory: Where to.
        positional: Other arguments of the method.
        named: Likewise.

    Raises:
        TensorizeError: The layers cannot be written so that they load elsewhere.
    """
    layers = structured(model)
    if not layers:
        saved = save(model, directory, *positional, **named)
        # What another model left here would be taken for the layers of this one.
        if (Path(directory) / _LAYERS_FILE).is_file():
            bound = inspect.signature(save).bind(model, directory, *positional, **named)
            if _writes_all(model, bound.arguments):
                (Path(directory) / _LAYERS_FILE).unlink(missing_ok=True)
        return saved
    settings = inspect.signature(save).bind(model, directory, *positional, **named).arguments
    if settings.get("variant") == VARIANT or _adapters_alone(model):
        return save(model, directory, *positional, **named)
    if settings.get("distributed_checkpoint"):
        raise TensorizeError(
            "distributed_checkpoint = True writes the factors alone, which from_pretrained would "
            "replace by random weights: leave it out, or save state_dict() by "
            "torch.distributed.checkpoint"
        )
    given = settings.get("state_dict")
    state = dict(model.state_dict() if given is None else given)
    if not state:
        # What trainers write where each process has its own part, to be removed again.
        return save(model, directory, *positional, **named)
    factored = _with_dense_weights(model, layers, state, exact=given is None)
    if nonlinear := [name for name in factored if not is_matrix(layers[name])]:
        warnings.warn(
            f"{nonlinear[0]} and {len(nonlinear) - 1} other layers are no matrices, so "
            f"from_pretrained({str(directory)!r}) will raise: load the model by "
            "outlast.tensorize.load_factored",
            stacklevel=3,
        )
    if factored and settings.get("push_to_hub"):
        warnings.warn(
            f"{_LAYERS_FILE} is not pushed with the weights, and load_factored needs it: call "
            "model.push_to_hub instead, or upload the file",
            stacklevel=3,
        )
    # As they are named here: a resumed run reads them with load_state_dict.
    rest = {"save_original_format": False, **settings, **settings.get("kwargs", {})}
    for done in ("self", "save_directory", "state_dict", "kwargs"):
        rest.pop(done, None)
    with _honest_tie(model, state):
        saved = save(model, directory, state_dict=state, **rest)
    file = Path(directory) / _LAYERS_FILE
    if factored and settings.get("is_main_process", True):
        described = entries.describe(model, entries.shared_names(model.state_dict(keep_vars=True)))
        # After the weights, and whole: a save that was cut short is not described as if it were.
        new = file.with_name(f".{file.name}.{os.getpid()}")
        new.write_text(json.dumps({entries.KEY: described}, indent=2) + "\n")
        new.replace(file)
    elif not factored and _writes_all(model, settings):
        file.unlink(missing_ok=True)
    return saved


def _writes_all(model: Any, settings: Mapping[str, Any]) -> bool:
    """Return whether ``save_pretrained`` replaces the weights that lie in a folder."""
    partial = settings.get("variant") or _adapters_alone(model)
    return bool(settings.get("is_main_process", True)) and not partial


def _adapters_alone(model: Any) -> bool:
    """Return whether ``save_pretrained`` writes adapters and nothing of the model itself."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _with_dense_weights(
    model: Any, layers: Mapping[str, Structured], state: dict[str, Tensor], *, exact: bool
) -> list[str]:
    """Add the dense weights of all layers to a state of their factors.

    Args:
        model: Whose.
        layers: Its structured layers by name.
        state: Full tensors or shards of them.
        exact: Whether the state is what the layers hold; else they are computed from it.

    Returns:
        Names of the layers whose factors it holds; of others it has the dense weight.

    Raises:
        TensorizeError: It has neither, or lacks some of a layer's factors.
    """
    written: dict[str, Tensor] = {}
    factored = []
    first = entries.shared_names(model.state_dict(keep_vars=True))
    for name, layer in layers.items():
        own = {key: f"{name}.{key}" for key in layer.state_dict()}
        # States may hold what is shared under its first name alone.
        found = {key: at if at in state else first.get(at, at) for key, at in own.items()}
        names = [key for key in own if key != "bias"]
        held = [key for key in names if found[key] in state]
        dense = f"{name}.weight" in state
        if dense and not held:
            continue
        if not held:
            raise TensorizeError(
                f"what is saved has neither {own[names[0]]} nor {name}.weight, but "
                f"{next(iter(state))} and others: name the tensors of state_dict as "
                "model.state_dict() does (without module. or _orig_mod.), or save the model "
                "before it is wrapped"
            )
        if missing := [key for key in own if found[key] not in state]:
            raise TensorizeError(
                f"state_dict lacks {own[missing[0]]}: give all tensors of a layer or its dense "
                "weight"
            )
        factored.append(name)
        if dense:
            continue
        if not is_matrix(layer):
            like = state[found[held[0]]]
            written[f"{name}.weight"] = torch.empty(0, dtype=like.dtype, device=like.device)
            continue
        values = {key: state[at] for key, at in found.items()}
        whole = {
            key: (value.full_tensor() if isinstance(value, DTensor) else value)
            for key, value in values.items()
        }
        source = layer
        if not exact or any(whole[key] is not values[key] for key in whole):
            source = copy.deepcopy(layer)
            source.load_state_dict(whole, assign=True)
        for key, value in dense_layer(source).state_dict().items():
            written[f"{name}.{key}"] = value
    for name, head in tied_heads(model).items():
        table = f"{name_of(head.embedding, model)}.weight"
        if table in written:
            written[f"{name}.weight"] = written[table]
    written = _as_native(written, model, skeleton_of(model))
    state.update({key: value for key, value in written.items() if key not in state})
    tied = set(_tied(model))
    seen: set[int] = set()
    for key in [key for name in layers for key in state if key.startswith(f"{name}.")]:
        # Files hold no aliases but those that transformers knows.
        if state[key].data_ptr() in seen and key not in tied:
            state[key] = state[key].clone()
        seen.add(state[key].data_ptr())
    return factored


@contextlib.contextmanager
def _honest_tie(model: Any, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the written config say that weights are not tied which differ in a state."""
    config = model.config
    pairs = [pair for pair in _tied(model).items() if set(pair) <= state.keys()]
    was = getattr(config, "tie_word_embeddings", None)
    differs = bool(was) and any(not _are_one(state, *pair) for pair in pairs)
    if differs:
        config.tie_word_embeddings = False
    try:
        yield
    finally:
        if differs:
            config.tie_word_embeddings = was


def _check_model(model: nn.Module) -> None:
    require("train", "a Hugging Face model", "transformers")
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TensorizeError(
            f"{type(model).__name__} is no model of transformers, so it has no config.json: save "
            "its state_dict(), after outlast.tensorize.export.absorb where it is to run elsewhere"
        )
    if getattr(model.config, entries.KEY, None) is not None:
        raise TensorizeError(
            "the model was loaded with trust_remote_code: load it with "
            "outlast.tensorize.export.load_factored to export it again"
        )


def _dense_model(model: Any) -> Any:
    """A new model of the same class with plain layers."""
    state = dict(model.state_dict())
    for name, layer in _replaced(model, dense_layer).items():
        for key in [key for key in state if key.startswith(f"{name}.")]:
            del state[key]
        state.update({f"{name}.{key}": value for key, value in layer.state_dict().items()})
    for name, head in tied_heads(model).items():
        state[f"{name}.weight"] = state[f"{name_of(head.embedding, model)}.weight"]
    skeleton = skeleton_of(model)
    state = _as_native(state, model, skeleton)
    tied = set(_tied(skeleton))
    if any(not _are_one(state, *pair) for pair in _tied(skeleton).items()):
        skeleton, tied = skeleton_of(model, tie_word_embeddings=False), set()
    seen: set[int] = set()
    for key, value in state.items():
        # What transformers does not know to be tied must not share memory in a file.
        if key not in tied and value.data_ptr() in seen:
            state[key] = value.clone()
        elif key not in tied:
            seen.add(value.data_ptr())
    skeleton.load_state_dict(state, assign=True)
    if model.can_generate():
        skeleton.generation_config = copy.deepcopy(model.generation_config)
    return skeleton.eval()


def _tied(skeleton: Any) -> dict[str, str]:
    """Name of every parameter that transformers ties -> that of the one that it is tied to."""
    return dict(getattr(skeleton, "all_tied_weights_keys", None) or {})


def _are_one(state: Mapping[str, Tensor], key: str, source: str) -> bool:
    one, other = state.get(key), state.get(source)
    return one is not None and other is not None and one.data_ptr() == other.data_ptr()


def skeleton_of(model: Any, **settings: Any) -> Any:
    """The dense model of the same class and config, on the meta device.

    Args:
        model: A `PreTrainedModel`.
        settings: To change in the config.
    """
    config = copy.deepcopy(model.config)
    for name, value in settings.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return type(model)(config)


def _as_native(
    state: dict[str, Tensor], model: nn.Module, skeleton: nn.Module
) -> dict[str, Tensor]:
    """Transpose weights that the model has as (out, in) and its class as (in, out): Conv1D."""
    state = dict(state)
    for name, module in skeleton.named_modules():
        key = f"{name}.weight"
        if (
            type(module).__name__ == "Conv1D"
            and key in state
            and type(model.get_submodule(name)) is not type(module)
        ):
            state[key] = state[key].t().contiguous()
    return state


def export_factored(
    model: nn.Module,
    directory: Path | str,
    *,
    merged: bool = False,
    tokenizer: Path | str | None = None,
    overwrite: bool = False,
    max_shard_size: str = _SHARD,
) -> Path:
    """Write a model's factors as they are; `load_factored` gives the very same model.

    The weights are in ``model.factored.safetensors`` (or several such files), which
    ``from_pretrained`` does not take for a dense model's. The entry ``outlast_tensorize`` of
    config.json describes the layers, see `outlast.tensorize.entry`. Unless layers cross latents
    or share factors, as tied heads do, ``modeling_outlast.py`` is written as well, with which
    ``from_pretrained(directory, trust_remote_code=True)`` loads the model without Outlast.

    Args:
        model: A `PreTrainedModel` of transformers with structured layers.
        directory: Where to; appears whole or not at all.
        merged: Merge chains of cores to two factors first, see `absorb`.
        tokenizer: A folder whose tokenizer files are copied.
        overwrite: Replace a model that is there.
        max_shard_size: Size from which weights are written in several files.

    Returns:
        The directory.

    Raises:
        TensorizeError: The model is none of transformers or has no structured layers, or the
            directory cannot be written.
    """
    require("train", "a Hugging Face model", "transformers")
    import transformers

    _check_model(model)
    if not structured(model):
        raise TensorizeError(
            "the model has no structured layers, so there are no factors to write: use "
            "export_dense, or tensorize it first"
        )
    name = type(model).__name__
    if not hasattr(transformers, name):
        raise TensorizeError(f"{name} is no class of transformers itself: use export_dense")
    if merged:
        model = copy.deepcopy(model)
        absorb(model)
    skeleton = skeleton_of(model)
    every = model.state_dict(keep_vars=True)
    shared = entries.shared_names(every)
    own = {key: value.detach() for key, value in every.items() if key not in shared}
    own = {key: value.contiguous() for key, value in _as_native(own, model, skeleton).items()}
    described = entries.describe(model, shared)
    target = Path(directory)
    with new_folder(target, overwrite=overwrite) as folder:
        _save(
            model,
            folder,
            state_dict=own,
            variant=VARIANT,
            save_original_format=False,
            max_shard_size=max_shard_size,
        )
        content = json.loads((folder / _CONFIG).read_text())
        content[entries.KEY] = described
        content.pop("auto_map", None)
        if content.get("tie_word_embeddings") and not set(_tied(skeleton)) & set(shared):
            content["tie_word_embeddings"] = False
        special = described["lines"] or described["heads"]
        if not special and set(shared) <= set(_tied(skeleton)):
            auto = "AutoModelForCausalLM" if model.can_generate() else "AutoModel"  # type: ignore[operator]
            content["auto_map"] = {auto: f"{Path(_CODE_FILE).stem}.Tensorized"}
            code = (Path(entries.__file__).parent / "modelling.py").read_text()
            (folder / _CODE_FILE).write_text(
                code.replace("import PreTrainedModel as Dense", f"import {name} as Dense")
            )
        (folder / _CONFIG).write_text(json.dumps(content, indent=2) + "\n")
        if tokenizer is not None:
            copy_tokenizer(Path(tokenizer), folder)
    return target


def load_factored(directory: Path | str, device: torch.device | str = "cpu") -> Any:
    """The model that `export_factored` or ``save_pretrained`` wrote, with equal tensors.

    Nothing that the folder contains is executed.

    Args:
        directory: What was written.
        device: Where the model's tensors go.

    Returns:
        A `PreTrainedModel` in evaluation mode.

    Raises:
        TensorizeError: The directory holds no factors, or is damaged.
    """
    require("train", "a Hugging Face model", "transformers")
    import transformers
    from transformers.initialization import no_init_weights

    folder = Path(directory)
    saved = (folder / _LAYERS_FILE).is_file()
    described = folder / (_LAYERS_FILE if saved else _CONFIG)
    entry = entries.checked(_json(described).get(entries.KEY), str(described))
    kind = getattr(transformers, str(entry.get("model_class")), None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise TensorizeError(
            f"{folder} holds a {entry.get('model_class')}, which this transformers "
            f"({transformers.__version__}) does not have: use the version that wrote it"
        )
    config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    for extra in (entries.KEY, "auto_map"):
        if hasattr(config, extra):
            delattr(config, extra)
    with no_init_weights():
        model: Any = kind(config)
    entries.put_in_layers(model, entry)
    tensors = _tensors(folder, None if saved else VARIANT)
    try:
        found = model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise TensorizeError(f"{folder} is damaged: {reason}; write it again") from None
    missing = set(found.missing_keys) - set(entry["shared"])
    if missing or found.unexpected_keys:
        raise TensorizeError(
            f"{folder} is damaged: missing are {sorted(missing)[:3]}, unexpected "
            f"{found.unexpected_keys[:3]}; write it again"
        )
    entries.share(model, entry["shared"])
    if (folder / "generation_config.json").is_file():
        generation = transformers.GenerationConfig.from_pretrained(
            str(folder), local_files_only=True
        )
        model.generation_config = generation
    return model.to(device).eval()


def _json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise TensorizeError(f"{file} cannot be read: {error}") from None
    return content


def _tensors(folder: Path, variant: str | None) -> dict[str, Tensor]:
    """All tensors of a folder, from one file or several."""
    part = f".{variant}" if variant else ""
    index = folder / f"model.safetensors.index{part}.json"
    names = [f"model{part}.safetensors"]
    if index.exists():
        names = sorted(set(_json(index)["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            # An index names files of its own folder alone.
            tensors.update(load_file(folder / Path(name).name))
        except (OSError, SafetensorError) as error:
            raise TensorizeError(f"{folder / name} cannot be read: {error}") from None
    return tensors
