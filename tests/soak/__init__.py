"""A constant load for as long as it is told: `make soak MINUTES=60`, or `python -m tests.soak --minutes 60`.

The sections are those of `tests.random_faults`, at a fixed rate and without faults (or with a server restarted every minute). What every
process and every server has open or keeps is sampled all the time; `slopes` says at the end what grows.
"""
