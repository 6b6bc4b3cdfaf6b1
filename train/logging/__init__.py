"""Writes the logs and the metrics of a run. From the rest of ``train``, it imports only ``train.build`` and
what ``train.build`` imports.

Read log.py first. Each file imports only files listed above it:

    text       makes text from models and data safe for a terminal and a log file
    records    the metrics of a step or an evaluation, as ``metrics.jsonl`` stores them
    plot       draws plots as PNG files; only this file imports matplotlib
    wandb      starts the Weights & Biases run; only this file imports wandb
    tensorboard  writes TensorBoard events; only this file imports tensorboard
    profile    records a trace of some steps with torch's profiler
    log        ``Reporter``, which writes log lines, ``metrics.jsonl``, plots, Weights & Biases and TensorBoard
"""
