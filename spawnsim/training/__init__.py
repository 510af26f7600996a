"""Training steps that virtual ranks execute together: many equal models as rows of one `torch.func.vmap` call.

A program states its step once, as a function of model and batch. On real ranks it executes as it stands. On virtual
ranks it is a blocking call, executed with those of all ranks that have one parked. Knows models, optimizers and losses;
must not know communicators or policies.
"""

from spawnsim.training.steps import Evaluation, TrainingStep

__all__ = ["Evaluation", "TrainingStep"]
