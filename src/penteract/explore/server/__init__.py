"""The explorer's server: this machine alone, one page, and worker processes that answer. Needs `penteract[explore]`."""
