"""The parts of ``task=dpo``, direct preference optimisation (DPO).

This package imports ``train.rl.reference``, ``train.loop`` and modules that these two import. train/tasks/dpo.py uses
the files of this package. Each file imports only files listed above it:

    objective   computes the loss and the statistics of a micro-batch of preference pairs
    evaluate    computes loss, accuracy and rewards on held-out pairs
    log         the log lines and the plot of such a run
"""
