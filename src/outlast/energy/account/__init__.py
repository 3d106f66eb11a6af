"""From joules to kWh by purpose, cost and carbon."""
