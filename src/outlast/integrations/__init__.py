"""The same parts inside other training loops: a script's own, or another framework's.

A module that is named after a framework is the only one that imports it. The others are what
several of them need.
"""
