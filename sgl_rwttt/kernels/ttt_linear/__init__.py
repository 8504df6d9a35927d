"""TTT-Linear: one mini-batch of the inner learner, and the step to the next one."""
