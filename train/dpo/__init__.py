"""The parts of ``task=dpo``, direct preference optimisation. Imports ``train.rl.reference``, ``train.loop`` and what is
below it.

Each file imports only those before it; train/tasks/dpo.py puts them together:

    objective   the loss of a micro-batch of pairs, and its statistics
    evaluate    the same on held-out pairs
    report      the lines that a run prints and the curves that it plots
"""
