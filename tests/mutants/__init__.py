"""Mutants are small faults that are put into the code one at a time, to see whether the tests of that part notice.

Run `make mutants PART=fencing`. `parts.py` lists the files and tests of each part; `python.py`, `sql.py` and `lua.py`
define the faults.
"""
