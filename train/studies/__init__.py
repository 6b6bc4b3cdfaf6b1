"""Studies: comparisons of several training runs, started by ``python -m train.studies NAME``.

This package imports ``train.tasks`` and modules that ``train.tasks`` imports. Each file imports only files listed above
it:

    settings    the schema of the files in conf/study, which describe the studies
    summary     computes means, differences and verdicts from the metrics of finished runs
    tables      formats a summary as tables for the screen and as Markdown
    runner      trains the runs of a study that do not exist yet, and reads their metrics
    __main__    the command line
    rows        a separate command, which measures loss by row frequency, memory and time of optimizers for tables
    drafter     a separate command, which measures how much a drafter speeds up decoding
"""
