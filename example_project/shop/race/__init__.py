"""The race: servers to run in, clients who ship and cancel at once, and a report of what came of it."""


class RaceFailed(Exception):
    """The race cannot be run; the text says why."""
