"""From joules to kWh by purpose, cost and carbon."""

from outlast.energy.account.prices import Provider, Tariff, intensity
from outlast.energy.account.prometheus import Exporter, Labels, Sample, exposition
from outlast.energy.account.report import (
    PURPOSES,
    Amount,
    EnergyReport,
    LossPoint,
    Purpose,
    Rates,
    Run,
    Split,
    Window,
    account,
    joules_to_loss,
    split,
)

__all__ = [
    "PURPOSES",
    "Amount",
    "EnergyReport",
    "Exporter",
    "Labels",
    "LossPoint",
    "Provider",
    "Purpose",
    "Rates",
    "Run",
    "Sample",
    "Split",
    "Tariff",
    "Window",
    "account",
    "exposition",
    "intensity",
    "joules_to_loss",
    "split",
]
