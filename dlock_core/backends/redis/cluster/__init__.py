"""Leases in a Redis Cluster: the names are spread over 256 hash tags, each of which is like a server of its own.

All keys of a name, the counter its tokens come from and the list it is found by when it is held have one hash tag, so
that they are in one slot and move together. No more than 256 lists are read to show what is held, whatever else is
there. (Source: the Redis Cluster specification.)
"""
