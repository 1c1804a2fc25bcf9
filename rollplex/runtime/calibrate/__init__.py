"""`rollplex calibrate`: what is measured (grid), by whom (station), in which order and made into a file (measure)."""
