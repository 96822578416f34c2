"""Collectives in which ranks of one host read each other's memory."""
