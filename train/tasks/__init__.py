"""One file for each kind of task: ``run(config)`` is called by train/__main__.py. Imports everything else in ``train``
but ``studies``. The tasks do not import each other, but for what `asked` has:

    sample                       text of a model, for the end of a training run
    pretrain, rl, dspark, dpo    training (pretrain: also task=sft; rl: also task=distill)
    plan, convert, merge         what a run would cost; other formats; averages of checkpoints
    check                        what the data of a run hold
    asked                        a model to ask: weights, tokenizer, answers as text
    chat, generate, eval         asked on the terminal; for a file of prompts; measured on tasks
"""
