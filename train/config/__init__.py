"""The configuration of a run: typed dataclasses, checked as a whole before the run builds anything.

The values come from the YAML files in ``conf/``, which Hydra combines; the dataclasses of this package define the name,
type and meaning of every key. This package imports torch only for rules that depend on a device or a checkpoint. All of
``train`` may import this package. This package imports ``train.errors``, ``train.lora.targets``, the settings of
``model``, ``optim`` and ``data``, and, inside functions that look into a checkpoint, ``train.checkpoint``.

Read the files in this order; each file imports only files listed above it:

    strict                  pydantic settings with which the dataclass of every section is declared
    problems                the error that lists all problems of a configuration
    tasks                   the names of the tasks, and the function that runs each
    rollout, rl, dspark, dpo, distill_data, plan    the sections of the configuration that only some tasks have
    evaluation              the benchmarks that a model is evaluated on
    schema                  the configuration of a training run, and smaller ones for tasks that train nothing
    moved                   configuration keys and functions that were renamed
    step_rows               rules about the rows of a step and their length
    rules                   all rules that involve several keys
    compose                 combines the command line and ``conf/`` into one nested mapping
    help                    the text that ``--help`` prints
    parse                   converts a nested mapping to the typed configuration, or lists its problems
    resume                  which settings may change when a run is continued
"""
