"""The stores; each imports its client library only here, and only when it is used."""
