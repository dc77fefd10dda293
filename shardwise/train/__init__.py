"""Train: trainer.py is the loop, read top to bottom; step.py is one step."""
