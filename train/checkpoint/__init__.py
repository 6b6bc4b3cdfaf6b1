"""Saving and restoring the state of a run, bit for bit, and loading the checkpoint that a new run starts from.

A checkpoint that was written by some number of processes can be read by any other number. This package imports
``train.errors``, ``model`` and ``optim``. Read run_state.py first. Each file imports only files listed above it:

    storage       stores split tensors of many processes in one folder; processes with another split can read it
    background    writes a checkpoint while training continues
    run_state     everything that is needed to resume a run
    init_from     the checkpoint whose weights a new run starts from
"""
