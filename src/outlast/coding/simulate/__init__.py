"""Step times of coded and uncoded training under models of delay; no torch."""
