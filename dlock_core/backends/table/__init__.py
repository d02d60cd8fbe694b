"""Leases in a table of the application's own database: no other server, and one statement for each step.

Every statement is a separate transaction on a dedicated connection, so a lease does not depend on the outcome of the
caller's transaction, and a competitor learns of it at once instead of being blocked. (Idea of a row per lock with its
expiry: ShedLock; of a growing token in it: Kleppmann 2016.)
"""
