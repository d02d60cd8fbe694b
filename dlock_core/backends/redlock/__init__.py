"""Leases held by a majority of independent Redis masters (6.2 or newer), with each request sent to all of them at once.

A lease is held while more than half of the nodes have it, so that no minority that is dead, slow or has lost its data
can grant it to a second holder. (Idea: the distributed locks page of the Redis documentation; tokens: see `quorum`.)
"""
