"""Studies: comparisons of several training runs, started by ``python -m train.studies NAME``.

From the rest of ``train``, this package imports only ``train.tasks`` and what ``train.tasks`` imports. Each file
imports only files listed above it:

    settings    the schema of the files in conf/study, which describe the studies
    summary     computes means, differences and verdicts from the metrics of finished runs
    tables      formats a summary as tables for the screen and as Markdown
    runner      trains the runs of a study that are still missing, and reads the metrics of all runs
    __main__    the command line
    rows        a separate command, which compares optimizers of embedding tables: loss on rare rows, memory, time
    drafter     a separate command, which measures how much a drafter speeds up decoding
"""
