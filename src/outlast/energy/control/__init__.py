"""Setting clocks and power limits, only when asked to, and giving them back."""
