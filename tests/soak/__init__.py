"""A constant load for a given time: `make soak MINUTES=60`, or `python -m tests.soak --minutes 60`.

The sections are those of `tests.random_faults`, at a fixed rate, without faults or with a regular restart of a server.
Whatever each process and server has open or stores is sampled all the time; at the end `slopes` determines what grows.
"""
