"""Connects the processes of a run. A run with one process creates no process group.

If experts or tables are split into n parts, n consecutive ranks hold the n parts; ranks whose numbers differ by a
multiple of n hold the same part. This package imports ``train.config``, ``train.errors`` and ``model``. Each file
imports only files listed above it:

    launchers           reads rank and number of processes from the environment; imports no torch
    workers             starts processes on this machine for one piece of work, such as converting a checkpoint
    stacks              what the threads of this process are executing, and their stack traces
    failure_detector    waits until all processes have started; detects processes that die or hang, and names them
    world               the device of this process; sums and other collective operations over all processes
    dense               divides the rows of the blocks' dense matrices over processes, by FSDP2
    engine              sums the gradients of a step over all processes, with DeepSpeed
    launch              connects the processes that a launcher has started and returns the ``World``
"""
