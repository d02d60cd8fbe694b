"""Leases held by a majority of independent Redis masters (6.2 or newer), all asked at once.

A lease is held while more than half of the nodes keep it, so that no minority of them, dead, slow or forgetful, can
give it to a second holder. (Idea: the distributed locks page of the Redis documentation; tokens: see `quorum`.)
"""
