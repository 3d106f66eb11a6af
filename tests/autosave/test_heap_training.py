"""What training objects hold is found again in the objects of another process."""

import copy

import pytest
import torch
from heap_runs import resume
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.hooks import RemovableHandle

from outlast.autosave.heap.tensors import gradient

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "asgd": torch.optim.ASGD,
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, centered=True, momentum=0.5),
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "fused": lambda groups: torch.optim.AdamW(groups, fused=True),
}

SCHEDULERS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            lr_scheduler.CosineAnnealingLR(optimizer, 8),
        ],
        [2],
    ),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(optimizer, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


class Recurrent(nn.Module):
    """Keeps a hidden state and a count that `state_dict` does not know."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 3)
        self.hidden = torch.zeros(5, 4)
        self.mean = torch.zeros(())
        self.calls = 0
        self.seen = {"batches": []}

    def forward(self, x):
        self.calls += 1
        self.hidden = self.cell(x, self.hidden.detach())
        self.mean = 0.9 * self.mean + 0.1 * self.hidden.detach().mean()
        self.seen["batches"].append(float(self.mean))
        return self.out(self.norm(self.hidden))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))


def groups_of(model):
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:], "lr": 0.02}]


def step(run):
    batch = torch.full((5, 3), 0.1 * len(run["losses"])) + torch.eye(5, 3)

    def closure():
        run["optimizer"].zero_grad()
        loss = (run["model"](batch) - 1).square().mean()
        loss.backward()
        return loss

    run["losses"].append(float(run["optimizer"].step(closure)))
    if "scheduler" in run:
        plateau = isinstance(run["scheduler"], lr_scheduler.ReduceLROnPlateau)
        run["scheduler"].step(*([1.0] if plateau else []))


def steps(run, count=4):
    for _ in range(count):
        step(run)


def bits(module):
    return [each.detach().clone() for each in (*module.parameters(), *module.buffers())]


def assert_same(saved, resumed):
    for run in (saved, resumed):
        steps(run)
    assert saved["losses"] == resumed["losses"]
    for before, after in zip(bits(saved["model"]), bits(resumed["model"]), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_groups_go_on(name):
    def setup():
        model = network()
        return {
            "model": model,
            "optimizer": OPTIMIZERS[name](groups_of(model)),
            "losses": [],
        }

    runs = resume(setup, steps, __name__)
    assert runs.resumed["optimizer"].param_groups[0]["params"][0] is runs.resumed["model"][0].weight
    assert_same(runs.saved, runs.resumed)


def test_an_optimizer_that_evaluates_again_goes_on():
    def setup():
        model = network().eval()
        optimizer = torch.optim.LBFGS(model.parameters(), history_size=3, max_iter=3)
        return {"model": model, "optimizer": optimizer, "losses": []}

    runs = resume(setup, lambda run: steps(run, 2), __name__)
    assert_same(runs.saved, runs.resumed)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(name):
    def setup():
        model = network()
        optimizer = torch.optim.SGD(groups_of(model), 0.1, momentum=0.9)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": SCHEDULERS[name](optimizer),
            "losses": [],
        }

    runs = resume(setup, steps, __name__)
    assert_same(runs.saved, runs.resumed)
    rates = [
        [group["lr"] for group in run["optimizer"].param_groups]
        for run in (runs.saved, runs.resumed)
    ]
    assert rates[0] == rates[1]


def test_what_is_made_after_set_up_goes_on():
    def setup():
        return {"losses": []}

    def begin(run):
        run["model"] = network()
        run["optimizer"] = torch.optim.SGD(groups_of(run["model"]), 0.1, momentum=0.9)
        run["scheduler"] = SCHEDULERS["lambda"](run["optimizer"])
        run["copies"] = [copy.deepcopy(run["model"])]
        steps(run)

    runs = resume(setup, begin, __name__)
    assert runs.resumed["optimizer"].param_groups[0]["params"][0] is runs.resumed["model"][0].weight
    assert runs.resumed["scheduler"].optimizer is runs.resumed["optimizer"]
    assert_same(runs.saved, runs.resumed)
    assert torch.equal(runs.saved["copies"][0][0].weight, runs.resumed["copies"][0][0].weight)


def test_attributes_that_state_dicts_miss_go_on():
    def setup():
        torch.manual_seed(0)
        model = Recurrent()
        return {
            "model": model,
            "optimizer": torch.optim.Adam(model.parameters()),
            "losses": [],
        }

    runs = resume(setup, steps, __name__)
    assert runs.resumed["model"].calls == 4
    assert runs.resumed["model"].seen == runs.saved["model"].seen
    assert torch.equal(runs.resumed["model"].hidden, runs.saved["model"].hidden)
    assert torch.equal(runs.resumed["model"].mean, runs.saved["model"].mean)
    assert_same(runs.saved, runs.resumed)


def test_averages_of_weights_go_on():
    def setup():
        model = network()
        return {
            "model": model,
            "optimizer": torch.optim.Adam(model.parameters()),
            "average": torch.optim.swa_utils.AveragedModel(
                model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            ),
            "copy": copy.deepcopy(model),
            "losses": [],
        }

    def train(run):
        for _ in range(3):
            step(run)
            run["average"].update_parameters(run["model"])
            with torch.no_grad():
                for slow, fast in zip(
                    run["copy"].parameters(), run["model"].parameters(), strict=True
                ):
                    slow.lerp_(fast, 0.1)

    runs = resume(setup, train, __name__)
    train(runs.saved)
    train(runs.resumed)
    for name in ("average", "copy"):
        for before, after in zip(bits(runs.saved[name]), bits(runs.resumed[name]), strict=True):
            assert torch.equal(before, after)
    assert int(runs.resumed["average"].n_averaged) == 6


def test_scales_of_gradients_go_on():
    def setup():
        return {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)}

    def train(run):
        for value in (1.0, 1.0, float("inf")):
            weight = torch.ones(2, requires_grad=True)
            optimizer = torch.optim.SGD([weight], 0.1)
            run["scaler"].scale(weight.sum() * value).backward()
            run["scaler"].step(optimizer)
            run["scaler"].update()

    runs = resume(setup, train, __name__)
    train(runs.saved)
    train(runs.resumed)
    assert runs.saved["scaler"].state_dict() == runs.resumed["scaler"].state_dict()


def test_gradients_in_the_middle_of_an_accumulation_are_kept():
    def setup():
        return {"model": network()}

    def train(run):
        run["model"](torch.ones(4, 3)).sum().backward()

    runs = resume(setup, train, __name__)
    train(runs.saved)
    train(runs.resumed)
    for before, after in zip(
        runs.saved["model"].parameters(), runs.resumed["model"].parameters(), strict=True
    ):
        assert torch.equal(before.grad, after.grad)


def test_the_modes_of_modules_and_frozen_weights_come_back():
    def setup():
        return {"model": network()}

    def train(run):
        run["model"].eval()
        run["model"][0].weight.requires_grad_(False)
        run["model"][2] = nn.ReLU()

    runs = resume(setup, train, __name__)
    assert not any(each.training for each in runs.resumed["model"][:2])
    assert not runs.resumed["model"][0].weight.requires_grad
    assert isinstance(runs.resumed["model"][2], nn.ReLU)


def test_weights_that_change_place_type_and_size_come_back():
    def setup():
        torch.manual_seed(0)
        embedding = nn.Embedding(4, 3)
        head = nn.Linear(3, 4, bias=False)
        head.weight = embedding.weight
        return {"embedding": embedding, "head": head, "other": nn.Linear(3, 4)}

    def train(run):
        run["embedding"].weight.data = torch.randn(6, 3)
        run["embedding"].num_embeddings = 6
        run["other"].to(torch.bfloat16)

    runs = resume(setup, train, __name__)
    resumed = runs.resumed
    assert resumed["head"].weight is resumed["embedding"].weight
    assert torch.equal(resumed["head"].weight, runs.saved["head"].weight)
    assert resumed["embedding"].num_embeddings == 6
    assert resumed["other"].weight.dtype == torch.bfloat16
    assert torch.equal(resumed["other"].weight, runs.saved["other"].weight)


def test_lazy_modules_come_back_as_what_they_became():
    def setup():
        return {"model": nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())}

    def train(run):
        torch.manual_seed(0)
        run["model"](torch.ones(2, 5))

    runs = resume(setup, train, __name__)
    assert type(runs.resumed["model"][0]) is nn.Linear
    assert torch.equal(runs.saved["model"](torch.eye(5)), runs.resumed["model"](torch.eye(5)))


def test_a_compiled_module_shares_the_weights_of_its_own():
    def setup():
        model = network()
        compiled = torch.compile(model, backend="eager")
        optimizer = torch.optim.Adam(compiled.parameters())
        return {"model": compiled, "optimizer": optimizer, "losses": []}

    runs = resume(setup, steps, __name__)
    assert_same(runs.saved, runs.resumed)


def test_names_of_a_compiled_modules_state_come_from_the_module_alone():
    def setup():
        return {"model": torch.compile(network(), backend="eager")}

    runs = resume(setup, lambda run: None, __name__)
    names = [name for name in runs.captured.tensors if name.startswith("=")]
    assert names
    assert all(name.startswith("=model._orig_mod._") for name in names)


def test_an_unsaved_computation_stops_a_backward_pass():
    def setup():
        return {"weight": torch.ones(3, requires_grad=True), "total": 0.0}

    def train(run):
        run["total"] = run["total"] + run["weight"].square().sum()

    runs = resume(setup, train, __name__)
    assert runs.resumed["total"].item() == 3.0
    runs.resumed["total"] += 1
    with pytest.raises(Exception, match="graph of that computation is not saved"):
        runs.resumed["total"].backward()
    assert gradient(runs.resumed["weight"]) is None


class Count:
    """A hook that counts."""

    def __init__(self):
        self.calls = 0

    def __call__(self, module, arguments, output):
        self.calls += 1


def test_hooks_set_after_set_up_come_back_and_leave_room_for_others():
    def setup():
        # As in a process of its own.
        RemovableHandle.next_id = 5000
        return {"model": network(), "count": Count()}

    def train(run):
        run["model"].register_forward_hook(run["count"])
        run["model"](torch.ones(2, 3))

    runs = resume(setup, train, __name__)
    run = runs.resumed
    other = Count()
    run["model"].register_forward_hook(other)
    run["model"](torch.ones(2, 3))
    assert (run["count"].calls, other.calls) == (2, 1)


def test_handles_of_hooks_still_remove_them():
    def setup():
        return {"model": network()}

    def train(run):
        run["handle"] = run["model"][0].register_forward_hook(lambda *given: None)

    run = resume(setup, train, __name__).resumed
    assert len(run["model"][0]._forward_hooks) == 1
    run["handle"].remove()
    assert not run["model"][0]._forward_hooks


def test_recurrent_state_kept_by_the_caller_goes_on():
    def setup():
        torch.manual_seed(0)
        model = nn.LSTM(3, 4, 2)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "state": None}

    def train(run):
        for _ in range(2):
            found, state = run["model"](torch.ones(5, 1, 3), run["state"])
            run["state"] = tuple(each.detach() for each in state)
            run["optimizer"].zero_grad()
            found.square().sum().backward()
            run["optimizer"].step()

    runs = resume(setup, train, __name__)
    train(runs.saved)
    train(runs.resumed)
    for before, after in zip(bits(runs.saved["model"]), bits(runs.resumed["model"]), strict=True):
        assert torch.equal(before, after)
    assert all(map(torch.equal, runs.saved["state"], runs.resumed["state"]))


def test_weights_that_are_computed_from_others_come_back():
    def setup():
        torch.manual_seed(0)
        parametrizations = nn.utils.parametrizations
        return {
            "scaled": parametrizations.weight_norm(nn.Linear(3, 3)),
            "bounded": parametrizations.spectral_norm(nn.Linear(3, 3)),
        }

    def train(run):
        run["bounded"](torch.ones(1, 3))
        with torch.no_grad():
            for each in run["scaled"].parameters():
                each.add_(1)

    runs = resume(setup, train, __name__)
    assert torch.equal(runs.saved["scaled"].weight, runs.resumed["scaled"].weight)
    assert torch.equal(runs.saved["bounded"].weight, runs.resumed["bounded"].weight)
