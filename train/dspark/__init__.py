"""The parts of ``task=dspark``, which trains a drafter for speculative decoding.

From the rest of ``train``, this package imports only ``train.loop`` and what ``train.loop`` imports.
train/tasks/dspark.py uses this package. Each file imports only files listed above it:

    anchors     draws the positions at which the draft blocks of a row begin
    evaluate    measures expected accepted length, acceptance per slot, and calibration
    log         the log lines and the plot of a drafter training run
"""
