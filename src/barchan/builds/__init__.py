"""Environments from Dockerfiles: read, planned and carried out by a client of the server, wherever that is."""
