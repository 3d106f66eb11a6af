"""Planner of a layer's computation: the fastest of its routes, by measured prices of operations.

`choose.plan_for` looks a plan up, `choose.explain` prints it, `measure.calibrate` measures a
machine's prices, and `measure.tune_model` times whole plans (`measure` imports torch).
"""
