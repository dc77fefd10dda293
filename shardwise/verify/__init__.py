"""Proof before GPU hours: a dry run of the real plan on fake ranks, and parity of a shrunk one with one process."""
