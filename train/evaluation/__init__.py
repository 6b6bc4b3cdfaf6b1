"""What is measured on held-out rows. Imports ``train.build``, ``train.logging`` and what is below them.

Read evaluate.py. Each file imports only those before it:

    exact_match    whole answers that greedy decoding would write
    probe          recall of the indexers
    evaluate       the record of an evaluation
"""
