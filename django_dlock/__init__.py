"""dlock for Django."""
