"""The parts of ``task=dspark``, which trains a drafter for speculative decoding.

This package imports ``train.loop`` and modules that ``train.loop`` imports. train/tasks/dspark.py uses the files of
this package. Each file imports only files listed above it:

    anchors     draws the positions at which the draft blocks of a row begin
    evaluate    measures expected accepted length, acceptance per slot, and calibration
    log         the log lines and the plot of such a run
"""
