"""How fast a run is, against what the machine could do."""
