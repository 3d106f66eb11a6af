"""The links of a run on a queue with a time limit."""
