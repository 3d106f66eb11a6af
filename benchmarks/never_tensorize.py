"""Staged cases of tensorized layers: what is saved, what stays dense, and what the page claims."""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import Bar, at_most
from tensorize_quality import RATES
from torch import nn

from outlast.tensorize import tensorize

ROOT = Path(__file__).parents[1]
IDS = torch.arange(18).view(2, 9) * 5 % 64
BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def _models() -> Iterator[tuple[str, Callable[[], Any], str | list[str]]]:
    """Classes of transformers, and what is replaced in them."""
    import transformers as hf

    llama = {"vocab_size": 64, **BLOCKS, **HEADS}
    ends = ["*", "*embed_tokens", "lm_head"]
    mixtral = hf.MixtralConfig(num_local_experts=4, **llama)
    gpt2 = hf.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4)
    bert = hf.BertConfig(vocab_size=64, num_labels=10, num_attention_heads=4, **BLOCKS)
    tied = hf.LlamaConfig(tie_word_embeddings=True, **llama)
    yield "Llama", lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**llama)), "*"
    yield "Llama, tied", lambda: hf.LlamaForCausalLM(tied), ends
    yield "Mixtral", lambda: hf.MixtralForCausalLM(mixtral), "*"
    yield "GPT-2", lambda: hf.GPT2LMHeadModel(gpt2), "*"
    yield "BERT", lambda: hf.BertForSequenceClassification(bert), "*"


def _changed(model: Any) -> Any:
    """The model with weights as no initialisation gives them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def _loads_wrong(model: Any, folder: Path) -> bool:
    """Whether a folder loads without an error as another function."""
    try:
        loaded = type(model).from_pretrained(folder).eval()
    except RuntimeError:
        return False
    return not torch.allclose(loaded(IDS)[0], model(IDS)[0], atol=1e-4)


class _Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(8) * (place + 1) % 64
        return {"input_ids": ids, "labels": ids}


def _trainer(folder: Path, form: str) -> Any:
    """A run of the Trainer of transformers with checkpoints after 2 and 4 steps."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **BLOCKS, **HEADS))
    tensorize(model, form, 8, force=True, generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=2, use_cpu=True,
        report_to=[], disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=_Samples())


def saved_and_loaded() -> Bar:
    """Case 5: `save_pretrained` and the Trainer's checkpoints, each loaded by transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    wrong = staged = 0
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place, (_, make, match) in enumerate(_models()):
            for form in ("low_rank", "tt", "cola"):
                if form == "cola" and match != "*":
                    continue
                torch.manual_seed(0)
                model = make()
                tensorize(model, form, 8, match, force=True)
                folder = Path(name) / f"{place}-{form}"
                _changed(model).save_pretrained(folder)
                wrong, staged = wrong + _loads_wrong(model, folder), staged + 1
        for form in ("low_rank", "cola"):
            whole, resumed = (_trainer(Path(name) / f"{form}{i}", form) for i in range(2))
            whole.train()
            resumed.train(resume_from_checkpoint=f"{name}/{form}0/checkpoint-2")
            again = resumed.model.state_dict()
            same = all(torch.equal(v, again[k]) for k, v in whole.model.state_dict().items())
            saved = Path(name) / f"{form}0" / "checkpoint-4"
            wrong += (not same) + _loads_wrong(whole.model.eval(), saved)
            staged += 2
    what = "saves and resumes of tensorized Hugging Face models, also under the Trainer"
    return at_most("models that load as another function", wrong, f"of {staged}", 0, what)


def _without_row(model: nn.Module, report: Any) -> int:
    """Matrices of a dense model that no row of the report names."""
    named = {row.name for row in report.replaced}
    named |= {row.name for row in getattr(report, "kept", ())}
    return sum(
        name not in named and name.removesuffix(".weight") not in named
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1
    )


def _attempted(make: Callable[[], nn.Module], **settings: Any) -> tuple[nn.Module, Any, str]:
    """A tensorized model, the report (None: refused) and what was warned of."""
    torch.manual_seed(0)
    model = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            report = tensorize(model, **settings)
        except Exception:
            report = None
    return model, report, " ".join(str(each.message) for each in caught)


def _classifier(width: int = 512, classes: int = 10) -> nn.Module:
    layers = (nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(width, classes))


def _recurrent() -> nn.Module:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 512, batch_first=True), 1)
    model.add_module("recurrent", nn.LSTM(256, 256))
    return model


def rows_and_speeds() -> Bar:
    """Case 6: parameters without a row, heads that fail or go, slow forms without a word."""
    wrong = staged = 0
    models = {name: make for name, make, match in _models() if match == "*"}
    for make in (*models.values(), _recurrent):
        settings = {"rank": 8, "force": True}
        dense = make()
        _, report, _ = _attempted(make, **settings)
        wrong += report is None or _without_row(dense, report) > 0
        staged += 1
    for settings in (
        {"rank": 0.1},
        {"rank": 64, "force": True},
        {"form": "monarch", "rank": 16},
        {"form": "monarch", "rank": 16, "force": True},
    ):
        model, report, _ = _attempted(_classifier, **settings)
        kept = type(model.get_submodule("4")) is nn.Linear
        replaced = type(model.get_submodule("0")) is not nn.Linear
        wrong, staged = wrong + (report is None or not kept or not replaced), staged + 1
    model, report, _ = _attempted(models["BERT"], rank=4, force=True)
    wrong, staged = wrong + (type(model.get_submodule("classifier")) is not nn.Linear), staged + 1
    for form, tokens in (("sltrain", 1), ("sltrain", 4096), ("cola", 1), ("lax", 1)):
        _, report, said = _attempted(_classifier, form=form, tokens=tokens)
        refused = report is None
        known = refused or all(row.speed is not None for row in report.replaced)
        warned = refused or ("slower" in said and form in said)
        wrong, staged = wrong + (not known or not warned), staged + 1
    what = "experts, in_proj, LSTM, heads of 10 classes, sltrain, CoLA and lax"
    return at_most("reports that leave something out", wrong, f"of {staged}", 0, what)


_FORMS = {
    "Monarch, 8 blocks": "monarch",
    "CoLA d/4": "cola",
    "BTT r = 2": "btt",
    "low rank d/4, bounded": "low_rank, bounded",
    "low rank + sparse": "sltrain",
    "low rank d/4": "low_rank",
    "LaX d/4": "lax",
    "tensor train r = 64": "tt",
}


def _table_rows(page: str) -> Iterator[list[str]]:
    """The cells of all tables of a page."""
    for line in page.splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def _number(cell: str) -> str:
    found = re.search(r"[-+\u2212]?\d[\d.]*", cell)
    return found[0].replace("\u2212", "-").replace("+", "") if found else ""


def _quotes(cell: str, figure: float | None) -> bool:
    """Whether a cell has a figure, rounded to as many places as it shows."""
    number = _number(cell)
    if figure is None:
        return cell == "not reached"
    half = 0.5 * 0.1 ** len(number.partition(".")[2])
    return bool(number) and abs(float(number) - figure) <= half * 1.001


def _misquoted(page: str, figures: dict[str, float | None], facts: dict[str, str]) -> list[str]:
    """What a page says that the results and the benchmark's code do not.

    Args:
        page: docs/tensorize.md.
        figures: Of the results, by their rows' names.
        facts: What the rows' peers say, likewise.
    """
    wrong = []
    speeds, losses = (
        {cells[0]: cells for cells in _table_rows(page) if len(cells) == count} for count in (5, 9)
    )
    layers = {name.split(", d = ")[0] for name in figures if name.endswith(", 4096 tokens")}
    for layer in layers & speeds.keys():
        for width, cell in zip((768, 1024, 2048), speeds[layer][1:4], strict=True):
            if not _quotes(cell, figures[f"{layer}, d = {width}, 4096 tokens"]):
                wrong.append(f"{layer}, {width}: {cell}")
    for label, form in _FORMS.items():
        cells = losses.get(label, [])
        if len(cells) != 9 or float(_number(cells[1]) or "nan") not in RATES[form]:
            wrong.append(f"{label}: no learning rate of {RATES[form]}")
            continue
        prefix = next(name for name in figures if re.match(rf"{form} [\d.]+, rate", name))
        prefix = prefix.split(":")[0]
        shares = re.findall(r"[\d.]+(?=x)", facts[f"{prefix}: loss at equal steps, above dense"])
        expected = [float(share) for share in shares]
        names = ("loss at equal steps, above dense", "loss at equal CPU seconds, above dense")
        expected += [
            figures[f"{prefix}: {name}"] for name in (*names, "CPU seconds to dense's loss")
        ]
        wrong += [
            f"{label}: {cell}"
            for cell, figure in zip(cells[3:], expected, strict=True)
            if not _quotes(cell, figure)
        ]
    wrong += [
        f"dense rate {rate:g}" for rate in RATES["dense"] if f"{rate:f}".rstrip("0") not in page
    ]
    for kind, words in (
        ("accepted by prices alone", "measured this machine's prices"),
        ("accepted after timing", "has timed the plans"),
        ("all layers, forced", "forced, after"),
    ):
        slower = f"more than 5 % slower than dense; {kind}"
        cells = next((cells for cells in _table_rows(page) if words in cells[0]), [""] * 4)
        right = cells[1] in facts[slower] and _quotes(cells[2], figures[slower])
        if not right or not _quotes(cells[3], figures[f"choice / dense, worst; {kind}"]):
            wrong.append(f"{kind}: {cells}")
    for name, said in (
        ("calibration", "Calibration {:.1f} s"),
        ("first plan, 8 cores", "{:.0f} ms"),
    ):
        wrong += [name] if said.format(figures[name]) not in page else []
    shipped = next((cells for cells in _table_rows(page) if "package's table" in cells[0]), [])
    if shipped[1:3] != ["29", "5"] or "independent test" not in page:
        wrong.append("what the package's table gives is not said")
    if "do not transfer the dense model's rate" not in " ".join(page.split()):
        wrong.append("the rule that failed to transfer learning rates is not said to have failed")
    return wrong


def claims_of_the_page() -> Bar:
    """Case 17: docs/tensorize.md against the committed results and the benchmark's code."""
    results = json.loads((ROOT / "benchmarks" / "results" / "tensorize.cpu2.json").read_text())
    figures = {bar["name"]: bar["figure"] for bar in results["bars"]}
    facts = {bar["name"]: bar["peer"] for bar in results["bars"]}
    wrong = _misquoted((ROOT / "docs" / "tensorize.md").read_text(), figures, facts)
    for claim in wrong:
        print(f"docs/tensorize.md: {claim}")
    what = "docs/tensorize.md against tensorize.cpu2.json and the rates of tensorize_quality.py"
    return at_most("figures and rates that the page has wrong", len(wrong), "claims", 0, what)


CASES = {5: saved_and_loaded, 6: rows_and_speeds, 17: claims_of_the_page}
