"""The shop on FastAPI and SQLAlchemy."""
