"""Reinforcement learning conditioned on reasoning effort, and on-policy distillation.

This package imports ``train.session`` and modules that ``train.session`` imports. Read train/tasks/rl.py first, which
contains the RL step, then collect.py, batch.py, policy_gradient.py and distill.py. Each file imports only files listed
above it:

    effort             the length penalty of the reward; group-relative advantages
    rewards            runs reward functions in separate processes
    prompts            draws prompts from the records of the tasks
    rollout            generates responses, in this process or on inference servers
    collect            starts responses to prompts, and returns graded groups of responses
    batch              packs the responses of groups into rows
    loss               the clipped policy-gradient objective of a micro-batch
    reference          a second, frozen policy beside the trained one, and its log-probabilities for a batch
    drafting           a drafter that is trained along with the policy
    policy_gradient    task=rl: selects the responses that are trained on, and computes their losses
    distill            task=distill: runs the teachers, and computes the distillation loss
    log                the log lines and the plot of an RL run
    demo               creates the conversations and the checkpoint that ``make rl-demo`` starts from
"""
