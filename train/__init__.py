"""The trainer: configuration, the training loop, metrics and checkpoints. Run it with ``python -m train``."""
