"""Random faults under a checker: `make faults`, or `python -m tests.random_faults --minutes 10 --seed 7`.

Worker processes change protected rows through every integration and every store while processes, servers, clocks,
networks and databases fail at random. Each records what it did (`history`), and a checker judges the histories and the
databases (`checker`).
"""
