"""A run's last states in each node's memory, outside the processes that made them."""
