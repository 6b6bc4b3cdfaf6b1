"""Runs reward functions, which users may write, in separate processes. This package imports ``train.errors``.

Read pool.py first. Each file imports only files listed above it:

    builtin    built-in tasks: functions that draw prompts, and their reward functions
    worker     the program of a worker process, which loads and calls reward functions; it imports no project code
    pool       sends responses to the worker processes, with a time limit for each call
"""
