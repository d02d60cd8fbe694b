"""dlock for SQLAlchemy: not there yet."""
