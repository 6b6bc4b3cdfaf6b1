"""Evaluation on held-out rows. It imports ``train.build``, ``train.logging`` and the modules that these import.

Read evaluate.py first. Each file imports only those above it:

    exact_match    counts the conversations whose whole answer greedy decoding would write
    probe          measures the recall of the indexers
    evaluate       runs an evaluation and returns its record
"""
