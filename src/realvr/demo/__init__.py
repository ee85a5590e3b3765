"""``realvr demo``: the paper's comparison in small, on this machine, from the packaged checkpoints to a report."""
