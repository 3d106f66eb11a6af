"""Counters of joules that `EnergyMeter` reads."""
