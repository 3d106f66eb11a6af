"""As the reference scripts of torchvision: a meter of meters, and a loader within a generator."""

import argparse
import datetime
import time
from collections import defaultdict, deque
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset


class SmoothedValue:
    def __init__(self, window_size=20, fmt=None):
        self.deque = deque(maxlen=window_size)
        self.total = 0.0
        self.count = 0
        self.fmt = fmt or "{median:.4f} ({global_avg:.4f})"

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def median(self):
        return torch.tensor(list(self.deque)).median().item()

    @property
    def global_avg(self):
        return self.total / self.count

    @property
    def value(self):
        return self.deque[-1]

    def __str__(self):
        return self.fmt.format(median=self.median, global_avg=self.global_avg, value=self.value)


class MetricLogger:
    def __init__(self, delimiter="\t"):
        self.meters = defaultdict(SmoothedValue)
        self.delimiter = delimiter

    def update(self, **kwargs):
        for k, v in kwargs.items():
            if isinstance(v, torch.Tensor):
                v = v.item()
            assert isinstance(v, (float, int))
            self.meters[k].update(v)

    def __getattr__(self, attr):
        if attr in self.meters:
            return self.meters[attr]
        if attr in self.__dict__:
            return self.__dict__[attr]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{attr}'")

    def __str__(self):
        return self.delimiter.join(f"{name}: {meter!s}" for name, meter in self.meters.items())

    def add_meter(self, name, meter):
        self.meters[name] = meter

    def log_every(self, iterable, print_freq, header=None):
        i = 0
        if not header:
            header = ""
        start_time = time.time()
        end = time.time()
        iter_time = SmoothedValue(fmt="{global_avg:.4f}")
        data_time = SmoothedValue(fmt="{global_avg:.4f}")
        space_fmt = ":" + str(len(str(len(iterable)))) + "d"
        log_msg = self.delimiter.join(
            [header, "[{0" + space_fmt + "}/{1}]", "eta: {eta}", "{meters}", "time: {time}"]
        )
        for obj in iterable:
            data_time.update(time.time() - end)
            yield obj
            iter_time.update(time.time() - end)
            if i % print_freq == 0:
                eta = str(datetime.timedelta(seconds=int(iter_time.global_avg * 3)))
                print(log_msg.format(i, len(iterable), eta=eta, meters=str(self), time=iter_time))
            i += 1  # noqa: SIM113 (as it is written there)
            end = time.time()
        total_time = str(datetime.timedelta(seconds=int(time.time() - start_time)))
        print(f"{header} Total time: {total_time}")


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema=None):
    model.train()
    metric_logger = MetricLogger(delimiter="  ")
    metric_logger.add_meter("lr", SmoothedValue(window_size=1, fmt="{value}"))
    metric_logger.add_meter("img/s", SmoothedValue(window_size=10, fmt="{value}"))
    header = f"Epoch: [{epoch}]"
    for i, (image, target) in enumerate(
        metric_logger.log_every(data_loader, args.print_freq, header)
    ):
        start_time = time.time()
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        if model_ema and i % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                model_ema.n_averaged.fill_(0)
        acc1 = (output.argmax(1) == target).float().mean()
        batch_size = image.shape[0]
        metric_logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        metric_logger.meters["acc1"].update(acc1.item(), n=batch_size)
        metric_logger.meters["img/s"].update(batch_size / (time.time() - start_time))
    return metric_logger


def evaluate(model, criterion, data_loader, device, print_freq=2, log_suffix=""):
    model.eval()
    metric_logger = MetricLogger(delimiter="  ")
    header = f"Test: {log_suffix}"
    with torch.inference_mode():
        for image, target in metric_logger.log_every(data_loader, print_freq, header):
            output = model(image.to(device))
            loss = criterion(output, target.to(device))
            metric_logger.update(loss=loss.item())
            metric_logger.meters["acc1"].update(
                (output.argmax(1) == target).float().mean().item(), n=image.shape[0]
            )
    return metric_logger.acc1.global_avg, metric_logger.loss.global_avg


def main(args):
    torch.manual_seed(3)
    device = torch.device("cpu")
    dataset = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
    test = TensorDataset(torch.randn(16, 6), torch.randint(0, 3, (16,)))
    loader = DataLoader(dataset, batch_size=8, sampler=RandomSampler(dataset), drop_last=True)
    test_loader = DataLoader(test, batch_size=8, sampler=SequentialSampler(test))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    main_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, main_schedule], [1])
    model_ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    print("Start training")
    start_time = time.time()
    history = []
    for epoch in range(args.start_epoch, args.epochs):
        meters = train_one_epoch(
            model, criterion, optimizer, loader, device, epoch, args, model_ema
        )
        schedule.step()
        acc, loss = evaluate(model, criterion, test_loader, device)
        ema_acc, ema_loss = evaluate(model_ema, criterion, test_loader, device, log_suffix="EMA")
        history.append((meters.loss.global_avg, meters.loss.median, acc, loss, ema_acc, ema_loss))
    total_time = str(datetime.timedelta(seconds=int(time.time() - start_time)))
    print(f"Training time {total_time}")
    torch.save([model.state_dict(), model_ema.state_dict(), history], args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--start-epoch", type=int, default=0)
    parser.add_argument("--print-freq", type=int, default=2)
    parser.add_argument("--clip-grad-norm", type=float, default=1.0)
    parser.add_argument("--model-ema-steps", type=int, default=2)
    parser.add_argument("--lr-warmup-epochs", type=int, default=1)
    main(parser.parse_args())
