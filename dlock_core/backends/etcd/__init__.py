"""Leases in etcd (3.4 or newer), over its JSON gateway.

A lock belongs to the oldest of its keys; each waiter watches the one key before its own. The token is the revision at
which the holder's key was created. (Idea: clientv3/concurrency of etcd.)
"""
