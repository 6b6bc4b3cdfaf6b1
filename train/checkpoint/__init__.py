"""Checkpoints of a run, exact to the bit, from any number of processes to any other; and what a run begins from.

Imports ``train.errors``, ``model`` and ``optim``. Read run_state.py first. Each file imports only those before it:

    storage       tensors of many processes in one folder, read back in any layout
    background    writing while training goes on
    run_state     everything that resumes a run
    init_from     the checkpoint whose weights a run begins with
"""
