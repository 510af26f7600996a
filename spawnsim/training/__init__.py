"""Training steps that virtual ranks carry out together: many equal models as rows of one tensor, one call for all.

A program states its step once, as a function of model and batch. On real ranks it is carried out as it stands. On
virtual ranks it is put off until somebody looks, and then done for all ranks that have one waiting. Knows models,
optimizers and losses; must not know communicators or policies.
"""

from spawnsim.training.steps import Evaluation, TrainingStep

__all__ = ["Evaluation", "TrainingStep"]
