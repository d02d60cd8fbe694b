"""Mutants: small faults that are put into the code one at a time, to see whether the tests of that part notice.

`make mutants PART=fence`; `parts.py` says which files and tests a part has, `python.py` and `lua.py` which faults there are.
"""
