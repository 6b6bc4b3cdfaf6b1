"""Logs and metrics of a run. This package imports ``train.build`` and the modules that it imports.

Read log.py first. Each file imports only those above it:

    text       makes text from models and data safe for a terminal and a log file
    records    the metrics of a step or an evaluation, as ``metrics.jsonl`` stores them
    plot       plots as PNG files; only this file imports matplotlib
    wandb      Weights & Biases; only this file imports wandb
    tensorboard  TensorBoard; only this file imports tensorboard
    profile    a trace of some steps, by torch's profiler
    log        ``Reporter``, which writes log lines, ``metrics.jsonl``, plots, Weights & Biases and TensorBoard
"""
