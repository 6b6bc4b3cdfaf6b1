"""Generates the responses for RL, in this process or on inference servers.

This package imports ``train.distributed``, ``train.errors`` and ``model.generation``.

Read base.py first. Each file imports only files listed above it:

    base       the interface of a rollout, and generation in this process
    servers    connections to inference servers: retries, streams of tokens, loading of weights
    http       generation on inference servers
"""
