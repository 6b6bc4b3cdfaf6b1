"""The parts of ``task=dspark``, the training of a drafter. Imports ``train.loop`` and what is below it.

Each file imports only those before it; train/tasks/dspark.py puts them together:

    anchors     where the drafted blocks of a row begin
    evaluate    expected accepted length, acceptance by slot, calibration
    report      the lines that a run prints and the curve that it plots
"""
