"""Evaluation on held-out rows, and on the tasks of ``task.eval_tasks`` and ``task=eval``. From the
rest of ``train``, this package imports only ``train.build``, ``train.logging`` and what they import.

Read evaluate.py first. Each file imports only files listed above it:

    exact_match    counts the conversations whose whole answer greedy decoding would reproduce
    probe          measures the recall of the indexers
    evaluate       runs an evaluation on held-out rows and returns its record
    scorer         computes likelihoods and greedy answers of a model; the processes share the questions
    retrieval      makes and scores the tasks needle and multikey, retrieval from long generated texts
    harness        runs tasks of lm-evaluation-harness, an optional library
    tasks          prepares and runs all kinds of tasks
"""
