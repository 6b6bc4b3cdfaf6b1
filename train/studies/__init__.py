"""``python -m train.studies NAME``: comparisons of runs. Imports ``train.tasks`` and what is below them.

Each file imports only those before it:

    settings    a study as its file in conf/study describes it
    summary     numbers of runs to means, differences, verdicts
    tables      a summary on the screen and as Markdown
    runner      trains what is missing, reads what came out
    __main__    the command line
    drafter     a program of its own: decoding with drafters
"""
