"""Job chains: a run as short jobs that follow each other on a queue with a time limit."""
