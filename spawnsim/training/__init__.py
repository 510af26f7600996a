"""Training steps that virtual ranks execute together: many equal models as rows of one `torch.func.vmap` call.

A program defines its step once, as a function of model and batch. Real ranks execute it directly. On virtual ranks it
is a blocking call, executed together with the parked calls of other ranks. Knows models, optimizers and losses; must
not know communicators or policies.
"""

from spawnsim.training.steps import Evaluation, TrainingStep

__all__ = ["Evaluation", "TrainingStep"]
