"""From joules to kWh by purpose, cost and carbon."""

from outlast.energy.account.carbon import Provider, intensity
from outlast.energy.account.prometheus import Exporter, Labels, Sample, exposition
from outlast.energy.account.purposes import PURPOSES, Purpose, Split, Window, split
from outlast.energy.account.report import (
    Amount,
    EnergyReport,
    LossPoint,
    Rates,
    Run,
    account,
    joules_to_loss,
)
from outlast.energy.account.tariff import Tariff

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
