"""The configuration of a run: typed dataclasses, checked as a whole before the run builds anything.

The values are in ``conf/`` (YAML files, composed by Hydra); the dataclasses here define names, types and meanings. This
package imports torch only for rules that depend on a device or a checkpoint. All of ``train`` may import it. It imports
``train.errors``, ``train.lora.targets``, the settings of ``model``, ``optim`` and ``data``, and, inside functions,
``train.checkpoint`` to look into a checkpoint.

Read the files in this order; each file imports only files listed above it:

    strict, problems        how every section is declared as a dataclass; the error that lists all problems
    tasks                   the names of the tasks, and the function that runs each
    rollout, rl, dspark, dpo, distill_data, plan    the sections of the configuration that only some tasks have
    evaluation              the benchmarks that a model is evaluated on
    schema                  the configuration of a training run, and the smaller ones of tasks that do not train
    moved                   configuration keys and functions that were renamed
    step_rows               rules about the rows of a step and their length
    rules                   all rules that involve several keys
    compose                 combines the command line and ``conf/`` into one nested mapping
    help                    the text that ``--help`` prints
    parse                   converts a nested mapping to the typed configuration, or lists its problems
    resume                  which settings may change when a run is continued
"""
