"""Training methods, one file each; `realvr.training.method.METHODS` finds them by importing every module here."""
