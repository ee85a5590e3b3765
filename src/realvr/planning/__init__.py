"""``realvr plan``: memory, time and communication of a training, before anything is rented or downloaded."""
