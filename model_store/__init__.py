"""The models that Baton fetches and converts by itself, before a server starts; no server uses it."""
