"""The parts of ``task=dpo``, direct preference optimisation (DPO).

From the rest of ``train``, this package imports only ``train.rl.reference``, ``train.loop`` and what they import.
train/tasks/dpo.py uses this package. Each file imports only files listed above it:

    objective   computes the loss and the statistics of a micro-batch of preference pairs
    evaluate    computes loss, accuracy and rewards on held-out pairs
    log         the log lines and the plot of a DPO run
"""
