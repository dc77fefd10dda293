"""Make an nn.Module obey the Plan: parallelize.py shows the order of the passes on one screen."""
