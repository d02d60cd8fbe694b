"""System checks: mistakes in settings and models that would otherwise show only under load; `apps` registers them."""
