"""The tasks, one file for each task. train/__main__.py calls the function ``run(config)`` of a task's file.

This package may import everything in ``train`` except ``studies``. Tasks do not import each other; `sample` and `asked`
are not tasks, but helpers that tasks import:

    sample                       continues a prompt, for the sample text at the end of a training run
    pretrain, rl, dspark, dpo    training tasks (pretrain.py is also task=sft, rl.py is also task=distill)
    distill_data                 training task: a student learns from a teacher on given text
    plan                         computes the memory and the time that a run would need
    convert, merge               convert a checkpoint to another format; average several checkpoints
    check                        reports what the data of a run contain
    asked                        loads a model and its tokenizer, and answers prompts
    chat, generate, eval         talk with a model; answer the prompts in a file; measure a model on benchmarks
"""
