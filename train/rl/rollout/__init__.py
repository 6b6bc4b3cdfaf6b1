"""Who generates responses. Imports ``train.distributed``, ``train.errors`` and ``model.generation``.

Read base.py. Each file imports only those before it:

    base       what a rollout is; generation in this process
    servers    inference servers: which live, what they answer, loading weights
    http       a rollout over servers
"""
