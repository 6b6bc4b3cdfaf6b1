"""``python -m train.studies NAME``: comparisons of runs. Imports ``train.tasks`` and what is below them.

Each file imports only those before it:

    settings    the schema of the files in conf/study
    summary     means, differences and verdicts from the numbers of finished runs
    tables      a summary as tables, on the screen and as Markdown
    runner      trains the runs that are missing, and reads their results
    __main__    the command line
    drafter     a separate command: measures decoding with a drafter
"""
