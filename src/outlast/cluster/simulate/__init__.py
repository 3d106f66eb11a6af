"""A cluster's scheduler, event by event."""
