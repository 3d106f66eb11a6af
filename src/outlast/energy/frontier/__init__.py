"""The time-energy frontier of a schedule, with a lower bound for every plan."""
