"""Masters, gradients and optimizer states of parameters, for users and checkpoints."""
