"""The processes of a run. One process makes no group and computes as if this package did not exist.

Ranks that split the experts or the tables among them are consecutive; ranks that hold the same part are strided.
Imports ``train.config``, ``train.errors`` and ``model.parallel``. Each file imports only those before it:

    launchers           who this process is, by environment variables; no torch
    failure_detector    rendezvous; which process has died, said by name
    world               the device; sums and flags over all processes
    engine              gradients of a step over all processes, by DeepSpeed
    launch              from the launcher's environment to a ``World``
"""
