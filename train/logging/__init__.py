"""Where the numbers of a run go. Imports ``train.build`` and what is below it.

Read log.py. Each file imports only those before it:

    text       text for a terminal and a log file
    records    numbers of a step or an evaluation, as ``metrics.jsonl`` holds them
    plot       pictures; the only importer of matplotlib
    wandb      Weights & Biases; the only importer of wandb
    log        ``Reporter``: the log line, ``metrics.jsonl``, and the two above
"""
