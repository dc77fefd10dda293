"""Models: the reference decoder, initialisation, and what can be learned from looking at any module."""
