"""Reward functions, which are a user's code and run in processes of their own. Imports ``train.errors``.

Read pool.py. Each file imports only those before it:

    builtin    tasks with prompts that are drawn and rewards that are computed
    worker     the process that loads and calls the functions; imports nothing of the project
    pool       requests to the workers, with a limit of time
"""
