"""The configuration of a run: typed, and checked as a whole before anything is built.

The values live in ``conf/`` (YAML, composed by Hydra); the dataclasses here hold names, types and meanings. Nothing
here imports torch to answer, except for rules that only a device or a checkpoint can decide. May be imported by all of
``train``; imports ``train.errors``, ``train.lora.targets``, the settings of ``model``, ``optim`` and ``data``, and,
inside functions, ``train.checkpoint`` to look at a checkpoint.

Read in this order; each file imports only from those before it:

    strict, problems        how a section is declared; the error that lists every problem
    tasks                   the tasks, and the function that runs each
    rollout, rl, dspark     sections of their own
    schema                  the whole configuration; the tasks that need none of it
    moved                   keys and functions that have new names
    rules                   what must hold between fields
    compose                 command line and ``conf/`` to one tree
    help                    what --help prints
    parse                   a tree to the typed configuration, or to sentences about what is wrong
    resume                  what a continued run may change
"""
